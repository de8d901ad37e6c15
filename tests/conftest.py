"""Configures the tests: eight simulated devices, and no implicit promotion of ranks or dtypes."""

import contextlib
import os
import re
import sys
import tempfile
import types

# The environment may set another number of devices.
if "device_count" not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = flags + " --xla_force_host_platform_device_count=8"

import chex
import hypothesis
import jax
import numpy as np
import pytest

import jmpscale
import jmpscale._algorithm.finite
import jmpscale._base.marks
import jmpscale._monitoring.grad_report

import meshes

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Filtering tracebacks takes a quarter of the time of tests that call functions with thousands of wrong arguments.
jax.config.update("jax_traceback_filtering", "off")

# Different tests compile the same programs. With this cache, each process compiles them once.
_compiled_programs = tempfile.TemporaryDirectory(prefix="compiled-programs-")
jax.config.update("jax_compilation_cache_dir", _compiled_programs.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Every run draws the same examples.
hypothesis.settings.register_profile("reproducible", max_examples=30, derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("reproducible")

# Recorded data, tests for another environment, code for type checkers, and a script that tests start.
collect_ignore = ["data", "frameworks", "types", "worker.py"]

ALL_FULL = re.compile(r"^pytestmark = \[?pytest\.mark\.full\b", re.MULTILINE)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests that are marked full")
    parser.addoption("--default-form", action="store_true", help="test the form of programs for GPUs and TPUs")
    parser.addoption("--without-guards", action="store_true", help="run all tests that need no guard, without guards")


def _default_form(*args, default, **forms):
    """Runs the form for GPUs and TPUs. Traces the other forms and compares types, as `platform_dependent` does."""
    expected = _result_types(default, args)
    for name, form in forms.items():
        types = _result_types(form, args)
        assert types == expected, f"the form for {name} returns {types}, the default form {expected}"
    return default(*args)


def _result_types(form, args):
    return [str(aval.strip_weak_type()) for aval in jax.make_jaxpr(form)(*args).out_avals]


class _NoGuards:
    """Replaces a module of guards. A guard returns nothing, or is a context manager."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: contextlib.nullcontext()


def _remove_guards():
    """Removes all guards from the algorithm: a test that passes shows a result that depends on none of them."""
    for name, module in list(sys.modules.items()):
        guards = vars(module).get("guards")
        if name.startswith("jmpscale.") and isinstance(guards, types.ModuleType):
            module.guards = _NoGuards()


def pytest_configure(config):
    if config.getoption("--default-form"):
        jax.lax.platform_dependent = _default_form
    if config.getoption("--without-guards"):
        _remove_guards()


def pytest_ignore_collect(collection_path, config):
    """Does not import the modules whose tests are all marked full: their arrays and programs take seconds."""
    if config.getoption("--full") or not collection_path.match("test_*.py"):
        return None
    return True if ALL_FULL.search(collection_path.read_text()) else None


def pytest_unconfigure():
    _compiled_programs.cleanup()


def pytest_collection_modifyitems(config, items):
    removed = [] if config.getoption("--full") else ["full"]
    removed += ["guards"] if config.getoption("--without-guards") else []
    deselected = [item for item in items if any(map(item.get_closest_marker, removed))]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives all tests of a file to one worker, because they share compiled programs, unless `--dist` says otherwise."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture(autouse=True)
def _clear_trace_counter():
    chex.clear_trace_counter()


@pytest.fixture(autouse=True, scope="session")
def _loss_was_scaled():
    """Scales a loss before the first step, as every program does: many tests write their gradients by hand."""
    jmpscale.scale(jmpscale.dynamic(), 1.0)


@pytest.fixture
def nothing_scaled(monkeypatch):
    """Records that no loss has been scaled, as when a process starts."""
    monkeypatch.setattr(jmpscale._base.marks, "_used", set())


@pytest.fixture(params=["cpu", pytest.param("default", marks=pytest.mark.full)])
def platform(request, monkeypatch):
    """The form of the package's programs: for CPU, or for every other platform (with `--full` or `--default-form`)."""
    if request.param == "cpu":
        meshes.require_cpu()
        yield request.param
        return
    monkeypatch.setattr(jax.lax, "platform_dependent", _default_form)
    _clear_caches_of_forms()
    yield request.param
    _clear_caches_of_forms()


def _clear_caches_of_forms():
    """Makes the jitted functions of the package that have two forms trace again."""
    for module in (jmpscale._algorithm.finite, jmpscale._monitoring.grad_report):
        for fn in vars(module).values():
            if hasattr(fn, "clear_cache"):
                fn.clear_cache()


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def standard_promotion():
    """Allows implicit promotion of dtypes during one test; optax and Flax rely on it."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def standard_promotion_and_ranks():
    """Allows implicit promotion of dtypes and ranks during one test; layers rely on both."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _vmapped(fn):
    """Maps `fn` over a batch of three equal arguments, checks that the results are equal, and returns one."""

    def batched(*args):
        stacked = jax.tree.map(lambda x: np.stack([np.asarray(jax.numpy.asarray(x))] * 3), args)
        out = jax.tree.map(np.asarray, jax.jit(jax.vmap(fn))(*stacked))  # NumPy compiles nothing
        first, *others = (jax.tree.map(lambda x, i=i: jax.numpy.asarray(x[i]), out) for i in range(3))
        for other in others:
            chex.assert_trees_all_equal(first, other)
        return first

    return batched


@pytest.fixture(
    params=[
        pytest.param(lambda fn: fn, marks=pytest.mark.full),
        jax.jit,
        pytest.param(_vmapped, marks=pytest.mark.full),
    ],
    ids=["eager", "jit", "vmap"],
)
def variant(request):
    """A transformation: the identity, `jax.jit`, or `jax.vmap`."""
    return request.param
