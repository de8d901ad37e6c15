"""A strict session: eight simulated devices, no silent promotion of ranks or dtypes, every warning an error."""

import os
import sys

# Unless the process that starts this one has said how many devices there are to be.
if "device_count" not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = flags + " --xla_force_host_platform_device_count=8"

import chex
import hypothesis
import jax
import numpy as np
import pytest

import jmpscale  # noqa: F401  (its modules are looked up by name)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Both draw the same examples every time; the deep one, `--hypothesis-profile=deep`, wants a quarter of an hour.
hypothesis.settings.register_profile("fast", max_examples=30, derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("deep", hypothesis.settings.get_profile("fast"), max_examples=1000)
hypothesis.settings.load_profile("fast")

# Recorded data, tests for another environment, code for type checkers, and a script that test_processes.py runs.
collect_ignore = ["data", "frameworks", "types", "worker.py"]


OPTIONAL = {  # marker, which is also the option that runs it: what it stands for
    "full": "what the README's command leaves to CI",
    "slow": "the tests that take minutes",
}


def pytest_addoption(parser):
    for marker, meaning in OPTIONAL.items():
        parser.addoption(f"--{marker}", action="store_true", help=f"also run {meaning}")
    parser.addoption("--default-form", action="store_true", help="run the form that programs have on GPUs and TPUs")


def _default_form(*args, default, **forms):
    """Runs the form for GPUs and TPUs; traces the others too and compares their types, as `platform_dependent` does."""
    expected = _result_types(default, args)
    for name, form in forms.items():
        types = _result_types(form, args)
        assert types == expected, f"the form for {name} returns {types}, the default form {expected}"
    return default(*args)


def _result_types(form, args):
    return [str(aval.strip_weak_type()) for aval in jax.make_jaxpr(form)(*args).out_avals]


def pytest_configure(config):
    """Gives every program of the session the form that it has on GPUs and TPUs, if asked to."""
    if config.getoption("--default-form"):
        jax.lax.platform_dependent = _default_form


def pytest_collection_modifyitems(config, items):
    """Leaves out what was not asked for: such tests count as deselected, so that skipped ones stay visible."""
    off = [marker for marker in OPTIONAL if not config.getoption(marker)]
    left_out = [item for item in items if any(map(item.get_closest_marker, off))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives a file's tests to one worker, since they share what they have compiled; the files in their order."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def _count_traces_afresh():
    chex.clear_trace_counter()


@pytest.fixture(params=["cpu", "default"])
def platform(request, monkeypatch):
    """The form of the package's programs: that for CPU, or that for every other platform."""
    if request.param == "cpu":
        yield request.param
        return
    monkeypatch.setattr(jax.lax, "platform_dependent", _default_form)
    _forget_programs()
    yield request.param
    _forget_programs()


def _forget_programs():
    """Makes the package's own jitted functions trace again; all else in a test is traced afresh anyway."""
    for name in ("_finite", "_report"):
        for fn in vars(sys.modules[f"jmpscale.{name}"]).values():
            if hasattr(fn, "clear_cache"):
                fn.clear_cache()


@pytest.fixture
def x64():
    """Allows 64-bit numbers during one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def standard_promotion():
    """Allows silent promotion of dtypes during one test: optax and Flax rely on it."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def _eager(fn):
    return fn


def _jitted(fn):
    return jax.jit(fn)


def _vmapped(fn):
    """Runs `fn` on a batch of three equal arguments, requires three equal results, and returns one."""

    def batched(*args):
        stacked = jax.tree.map(lambda x: np.stack([np.asarray(jax.numpy.asarray(x))] * 3), args)
        out = jax.tree.map(np.asarray, jax.jit(jax.vmap(fn))(*stacked))  # compared here: that compiles nothing
        first, *others = (jax.tree.map(lambda x, i=i: jax.numpy.asarray(x[i]), out) for i in range(3))
        for other in others:
            chex.assert_trees_all_equal(first, other)
        return first

    return batched


@pytest.fixture(params=[_eager, _jitted, _vmapped], ids=["eager", "jit", "vmap"])
def variant(request):
    """How a function is run: as it is, under `jax.jit`, or under `jax.vmap`."""
    return request.param
