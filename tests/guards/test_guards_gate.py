"""`apply_if` takes a flag, a step and its carry; the step returns the carry with the same types, and no scaler."""

from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.experimental import sparse
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmpscale

import meshes
from calls import (
    BIG,
    GRADS,
    LOSS,
    NNX,
    SCALE,
    SCALE_STATE,
    STATE,
    TRUE,
    W32,
    Mistake,
    after_gradients,
    apply_if_applied,
    check_message,
    gate_variables,
    per_device,
    raises,
    same,
)
from messages import NO_FLAG, ONLY_IN
from tables import rows

pytestmark = pytest.mark.guards


def _apply(fn, *carry):
    return lambda: jmpscale.apply_if(TRUE, fn, *carry)


def _reshard_in_step():
    mesh = meshes.make_mesh(AxisType.Explicit, d=8)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, P("d")))
        jmpscale.apply_if(TRUE, lambda x: jax.sharding.reshard(x, P()), x)


def _pair_class():
    """Returns a new class, as a notebook cell creates one each time that it runs."""
    return NamedTuple("Pair", [("x", jax.Array), ("y", jax.Array)])


def _sparse(**flags):
    return sparse.BCOO((W32, jnp.arange(2)[:, None]), shape=(16,), **flags)


def _gate(new, state, finite=None):
    return jmpscale.apply_if(new.scaler.step_applied if finite is None else finite, lambda _: new, state)


WRONG_CALLS = {
    "no flag": Mistake(lambda: jmpscale.apply_if(BIG, same, LOSS), f"{NO_FLAG} dict"),
    "no function": Mistake(
        _apply(LOSS, LOSS), "fn must be a function ... got Array. ... apply_if(finite, fn, *carry)."
    ),
    "no carry": Mistake(_apply(same), "carry must hold at least one value, got none. Pass"),
    "nnx": Mistake(
        _apply(same, NNX), "carry must hold ... got a Flax NNX Dropout ... carry nnx.state(model), and write"
    ),
    "list": Mistake(_apply(lambda a, b: [a, b], 1, 1), "returned a list, expected a tuple of 2 values: `return a, b`."),
    "dropped": Mistake(_apply(lambda c: c["layer_1"], BIG), f"carry[0]['layer_0']['bias'] {ONLY_IN} input."),
    "added": Mistake(_apply(lambda c: c | {"v": 1}, GRADS), f"carry[0]['v'] {ONLY_IN} output"),
    "container": Mistake(
        _apply(lambda c: {"a": {"b": list(c["a"]["b"])}}, {"a": {"b": (LOSS, LOSS)}}),
        "but carry[0]['a']['b'] is a tuple in its input and a list in its output. Return every value that fn takes, in",
    ),
    "value in place of None": Mistake(
        _apply(lambda c: {**c, "b": W32}, {"a": W32, "b": None}),
        "but carry[0]['b'] is None in its input and float32[2] in its output.",
    ),
    "empty state": Mistake(_apply(lambda c: optax.EmptyState(), None), "is None in its input and an EmptyState in its"),
    "class of the same name": Mistake(
        _apply(lambda c: [_pair_class()(*c[0])], [_pair_class()(W32, W32)]),
        "but carry[0][0] is a Pair in its input and of another class with this name in its output.",
    ),
    "settings": Mistake(
        _apply(lambda c: c | {"scaler": jmpscale.dynamic(growth_interval=5)}, {"scaler": STATE}),
        (
            "but carry[0]['scaler'] is a ScalerState with ... growth_interval=2000, hysteresis=1, ... in its input and "
            "with ... growth_interval=5, hysteresis=1, ... in its output."
        ),
    ),
    "order of keys": Mistake(
        _apply(lambda c: OrderedDict(reversed(c.items())), OrderedDict(a=W32, b=W32)),
        "but carry[0] is an OrderedDict with ('a', 'b') in its input and with ('b', 'a') in its output.",
    ),
    "length": Mistake(
        _apply(lambda c: [None], [None, None]), "is a list with PyTreeDef([*, *]) in its input and with "
    ),
    "flags of a sparse array": Mistake(
        _apply(lambda c: c | {"w": _sparse(indices_sorted=True)}, {"o": W32, "w": _sparse()}),
        (
            "but carry[0]['w'] is a BCOO with ... 'indices_sorted': False, 'unique_indices':... in its input and with "
            "... 'indices_sorted': True, 'unique_indices': ... in its output."
        ),
    ),
    "dtype": Mistake(_apply(lambda w: w.astype("f2"), LOSS), "was float32[] and is float16[]. Convert it with .astype"),
    "shape": Mistake(_apply(lambda w: w[None], LOSS), "[0] was float32[] and is float32[1]. Reshape"),
    "sharding": Mistake(_reshard_in_step, "was float32[8@d] and is float32[8]. ... reshard it in fn"),
    "varying": Mistake(
        lambda: per_device(lambda x: _apply(lambda w: w * x, jnp.ones(1))(), check_vma=True),
        "was float32[1] and is float32[1] ... or reduce gradients that vary over devices.",
    ),
    "object": Mistake(_apply(lambda w, _: (w, "b"), 1, "a"), "carry[1] was 'a' and is 'b'. Only arrays and Python"),
    "number": Mistake(_apply(lambda n: n + 0.5, 1), "carry[0] was int32[] and is float32[]"),
    "scaler": Mistake(
        after_gradients(lambda state, _, finite: _gate(jmpscale.update(state, finite), state, finite)),
        "a scaler, and fn changes",
        raises=UserWarning,
    ),
    "earlier flag": Mistake(
        after_gradients(lambda state, _, finite: apply_if_applied(state, finite, False)),
        "is about an earlier step",
        raises=UserWarning,
    ),
    "wrapper": Mistake(
        after_gradients(lambda state, grads, _: _gate(SCALE.update(grads, state)[1], state), SCALE_STATE),
        "fn changes it:",
        raises=UserWarning,
    ),
    "variables": Mistake(
        gate_variables, "fn returns the Flax NNX variables ... old = nnx.clone(nnx.state(model)).", raises=UserWarning
    ),
    "traced variables": Mistake(
        lambda: nnx.jit(gate_variables)(), "fn returns the Flax NNX variables", raises=UserWarning
    ),
}


def _select(new, old, finite=TRUE):
    return lambda: jmpscale.select_tree(finite, new, old)


WRONG_SELECTIONS = {
    "no flag": Mistake(_select(1, 1, BIG), f"{NO_FLAG} dict"),
    "nnx": Mistake(_select(NNX, NNX), "new must hold ... got a Flax NNX Dropout ... pass nnx.state(model), and write"),
    "dropped": Mistake(_select({}, GRADS), "new must have the same structure as old, but ['b'] is only in old."),
    "added": Mistake(_select({"w": W32, "v": W32}, {"w": W32}), "but ['v'] is only in new."),
    "container": Mistake(_select([1], (1,)), "same structure as old, but it is a tuple in old and a list in new."),
    "container in a dict": Mistake(_select({"a": [1]}, {"a": (1,)}), "but ['a'] is a tuple in old and a list in new."),
    "dtype": Mistake(
        _select(W32.astype("f2"), W32), "but new is float16[2] and old is float32[2]. Convert it with .astype."
    ),
    "shape": Mistake(
        _select({"m": W32[:1]}, {"m": W32}), "but new['m'] is float32[1] and old['m'] is float32[2]. Reshape"
    ),
    "object": Mistake(_select("b", "a"), "new is 'b' and old is 'a'. Only arrays"),
    "vector": Mistake(_select(1, 1, jnp.array([True])), "finite must be a scalar, got shape (1,)", raises=ValueError),
    "scaler": Mistake(
        after_gradients(lambda state, _, finite: jmpscale.select_tree(finite, jmpscale.update(state, finite), state)),
        "new contains a scaler that update has adjusted: a skipped step would not adjust its scale",
        raises=UserWarning,
    ),
    "earlier flag": Mistake(
        after_gradients(lambda state, _, finite: jmpscale.select_tree(_earlier_flag(state, finite), 1.0, 1.0)),
        "is about an earlier step",
        raises=UserWarning,
    ),
}


def _earlier_flag(scaler, finite):
    flag = scaler.step_applied
    jmpscale.update(scaler, finite)
    return flag


@pytest.mark.parametrize("mistake", rows(WRONG_SELECTIONS))
def test_select_tree_requires_a_flag_and_equal_types(mistake):
    check_message(mistake)


@pytest.mark.parametrize("mistake", rows(WRONG_CALLS))
def test_apply_if_requires_a_flag_and_a_step_that_keeps_types(mistake):
    check_message(mistake)


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit])
def test_apply_if_encloses_only_its_step(transform):
    """Neither after the step nor after an error in it does `update` seem to be inside; a warning would raise."""

    def fail(w):
        raise ZeroDivisionError

    def run(scaler, w):
        jmpscale.apply_if(TRUE, lambda w: 2 * w, w)
        with pytest.raises(ZeroDivisionError):
            jmpscale.apply_if(TRUE, fail, w)
        return jmpscale.update(scaler, TRUE)

    transform(run)(STATE, W32)
    with raises(UserWarning, "jmpscale.update is inside jmpscale.apply_if"):
        transform(lambda scaler: jmpscale.apply_if(TRUE, lambda scaler: jmpscale.update(scaler, TRUE), scaler))(STATE)
