"""The test suites of the installed optax and jmp, run unchanged against jmpscale.

optax's suites get every optimizer inside `with_loss_scaling(..., static(1.0))`, which must not change their results.
jmp's tests of its loss scales, and optax's tests of `apply_if_finite`, get adapters of a few lines.
"""

import functools
import importlib
import inspect
import types
import unittest
from typing import NamedTuple

import jax
import optax
import pytest

import jmpscale

pytestmark = [
    pytest.mark.once,
    pytest.mark.usefixtures("standard_promotion", "standard_ranks"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]


@pytest.fixture
def standard_ranks():
    """Allows silent promotion of ranks during one test."""
    with jax.numpy_rank_promotion("allow"):
        yield


OMITTED = "mixed_precision"  # requires float16 states for float16 gradients; here the states are float32


def _tests(module, names):
    """Returns the tests of another project's module whose names begin with `names`, with all their parameters."""

    def flat(suite):
        for one in suite:
            yield from flat(one) if isinstance(one, unittest.TestSuite) else [one]

    tests = flat(unittest.defaultTestLoader.loadTestsFromModule(module))
    chosen = [test for test in tests if test._testMethodName.startswith(tuple(names)) and OMITTED not in test.id()]
    assert chosen, f"{module.__name__} has no tests called {names}"
    return chosen


def _run(test):
    """Runs a test; returns the traceback of its failure, or None."""
    result = unittest.TestResult()
    test.run(result)
    found = [*result.errors, *result.failures]
    return "\n".join(text for _, text in found) or None


class Guarded:
    """A module of optax whose functions return their transformations inside `with_loss_scaling`."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        found = getattr(self._module, name)
        if not isinstance(found, (types.FunctionType, functools.partial)):
            return found

        @functools.wraps(found)
        def factory(*args, **kwargs):
            made = found(*args, **kwargs)
            if not isinstance(made, optax.GradientTransformation):
                return made
            return jmpscale.with_loss_scaling(made, jmpscale.static(1.0))

        factory.__signature__ = inspect.signature(found)  # optax reads it
        return factory


# optax's suites: the module whose transformations are wrapped, and the tests that do not read fields of their state.
SUITES = {
    "optax._src.lookahead_test": ("alias", ["test_"]),
    "optax.contrib._schedule_free_test": ("alias", ["test_"]),
    "optax.transforms._accumulation_test": ("alias", ["test_multi_steps"]),
    "optax._src.alias_test": ("alias", ["test_explicit_dtype", "test_preserve_dtype"]),
}


def _parameters():
    for suite, (wrapped, names) in SUITES.items():
        for name in names:
            yield pytest.param(suite, wrapped, name, id=f"{suite.rpartition('.')[2]}, {name}")


# The suite of MultiSteps puts the wrapped optimizers inside it, where only an overflow would be harmful.
@pytest.mark.filterwarnings("ignore:with_loss_scaling is inside optax.MultiSteps:UserWarning")
@pytest.mark.full
@pytest.mark.parametrize(("suite", "wrapped", "name"), list(_parameters()))
def test_suites_of_optax_with_every_optimizer_wrapped(suite, wrapped, name, monkeypatch):
    if suite == "optax._src.alias_test":
        pytest.importorskip("sklearn", reason="optax's tests of its optimizers import it")
    module = importlib.import_module(suite)
    monkeypatch.setattr(module, wrapped, Guarded(getattr(module, wrapped)))
    assert not list(filter(None, map(_run, _tests(module, [name]))))


class ApplyIfFiniteState(NamedTuple):
    """The state of `with_loss_scaling`, read as that of `optax.apply_if_finite`."""

    opt_state: object

    @property
    def last_finite(self):
        return self.opt_state.scaler.step_applied

    @property
    def notfinite_count(self):
        return self.opt_state.scaler.consecutive_skips

    @property
    def total_notfinite(self):
        return self.opt_state.scaler.skipped


def _apply_if_finite(inner, max_consecutive_errors):
    assert max_consecutive_errors == 2
    # Nothing needs to be combined: under pmap these tests sum the gradients first.
    tx = jmpscale.with_loss_scaling(inner, jmpscale.static(1.0), axis_name=())

    def update(updates, state, params=None, **extra_args):
        updates, opt_state = tx.update(updates, state.opt_state, params, **extra_args)
        return updates, ApplyIfFiniteState(opt_state)

    return optax.GradientTransformationExtraArgs(lambda params: ApplyIfFiniteState(tx.init(params)), update)


def test_with_loss_scaling_passes_the_tests_of_apply_if_finite(monkeypatch):
    suite = importlib.import_module("optax.transforms._conditionality_test")
    monkeypatch.setattr(suite._conditionality, "apply_if_finite", _apply_if_finite)
    for test in _tests(suite, ["test_apply_if_finite"]):
        found = _run(test)
        if "pmap" in test._testMethodName:
            assert not found
        else:  # all but the last assertion: the third consecutive bad step is applied, and the parameters become NaN
            assert "self.assertTrue(bool(jnp.isnan(jax.tree.flatten(params)[0][0])))" in found
            assert found.count("Error") == 1


class Static:
    """A loss scale with jmp's interface."""

    def __init__(self, loss_scale):
        self.state = jmpscale.static(float(loss_scale))

    def scale(self, tree):
        return jmpscale.scale(self.state, tree)

    def unscale(self, tree):
        return jmpscale.unscale(self.state, tree)


class NoOp(Static):
    def __init__(self):
        self.state = jmpscale.disabled()


class Dynamic(Static):
    def __init__(self, loss_scale, counter=0, period=2000, factor=2, min_loss_scale=1.0):
        self.period, self.factor = period, factor
        self.state = jmpscale.dynamic(
            float(loss_scale),
            growth_interval=int(period),
            growth_factor=float(factor),
            backoff_factor=1 / factor,
            min_scale=max(float(min_loss_scale), 2.0**-126),  # the smallest there is; jmp allows 0
        )

    @property
    def loss_scale(self):
        return self.state.loss_scale

    @property
    def counter(self):
        return self.state.finite_steps

    def adjust(self, grads_finite):
        new = Dynamic(1.0, 0, self.period, self.factor)
        new.state = jmpscale.update(self.state, grads_finite)
        return new


JMP = types.SimpleNamespace(
    NoOpLossScale=NoOp,
    StaticLossScale=Static,
    DynamicLossScale=Dynamic,
    all_finite=jmpscale.all_finite,
    select_tree=lambda finite, new, old: jmpscale.apply_if(finite, lambda _: new, old),
)
DIFFERENT = {
    "test_static_empty_trees_StaticLossScale": "a static scaler has leaves too: it counts the skipped steps",
    "test_dynamic_loss_scale_tree": "other leaves in another order",
    "test_dynamic_loss_scale_raises_type_error_on_int_loss_scale": "a warning about integer arrays; here a TypeError",
    "test_dynamic_loss_scale_raises_type_error_on_int_min_loss_scale": "the same",
    "test_select_tree_rejects_non_scalar": "an AssertionError; here a TypeError",
}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # 3**100 in the test itself
def test_the_scaler_passes_the_tests_of_jmp(monkeypatch):
    suite = importlib.import_module("jmp._src.loss_scale_test")
    monkeypatch.setattr(suite, "jmp", JMP)
    failed = {test._testMethodName for test in _tests(suite, ["test_"]) if _run(test)}
    assert failed == set(DIFFERENT)
