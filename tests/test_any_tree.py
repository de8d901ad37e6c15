"""What passes through the library besides arrays of numbers: everything that Python programs keep in their trees.

Trees are drawn that contain numbers of Python and NumPy, text, functions, types, keys, float0 and empty containers
beside arrays. Leaves that are not arrays of numbers bypass every function: they are returned as the same objects.
"""

import dataclasses
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale
from jmpscale.testing import assert_step_is_noop

SCALER = jmpscale.static(2.0**8)


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    kind: Any = dataclasses.field(metadata={"static": True}, default="dense")


class Module:
    """An object that is not a pytree but has a dtype, such as a Linen module."""

    dtype = np.dtype(np.float16)


def _function(x):
    return x


ARRAYS = [
    jnp.array([1.0, -0.0, 3.0]),
    jnp.float32(2.0),
    jnp.array([[1.0, 2.0]], jnp.float16),
    jnp.array([0.5], jnp.bfloat16),
    jnp.array([1 + 2j, -0.0j], jnp.complex64),
    jnp.zeros((0, 2)),
    np.array([1.0, 2.0], np.float32),
    np.float32(0.5),
    np.float16(-0.0),
]
FAULTY = [
    jnp.array([1.0, jnp.nan]),
    jnp.array([jnp.inf], jnp.float16),
    jnp.array([complex(1, jnp.inf)]),
    np.float32("nan"),
]
NUMBERS = [1.5, -0.0, 1 + 2j]
FAULTY_NUMBERS = [float("nan"), float("-inf"), complex(0, float("inf"))]
OTHER_ARRAYS = [
    jnp.arange(3),
    jnp.array(True),
    np.array([1, 2], np.int8),
    np.int32(3),
    np.bool_(True),
    jax.random.key(0),
]
OTHERS = [
    True,
    7,
    10**30,
    "text",
    b"bytes",
    np.str_("text of NumPy"),
    np.array(["a", "b"]),
    np.array([None, "a"], object),
    np.zeros((2,), jax.dtypes.float0),
    jnp.tanh,
    _function,
    jnp.float16,
    np.float32,
    np.dtype("f2"),
    Module(),
    Module,
    object(),
]


def _trees(*kinds):
    leaves = st.sampled_from([leaf for kind in kinds for leaf in kind])
    containers = [[], {}, (), None, Point(None, ())]
    return st.recursive(
        leaves | st.sampled_from(containers),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
            | st.tuples(inner, inner)
            | st.builds(Point, inner, inner)
            | st.builds(Layer, inner)
        ),
        max_leaves=8,
    )


SOUND = _trees(ARRAYS, NUMBERS, OTHER_ARRAYS, OTHERS)
ANY = _trees(ARRAYS, NUMBERS, OTHER_ARRAYS, OTHERS, FAULTY, FAULTY_NUMBERS)
each_flag = pytest.mark.parametrize("flag", [True, False], ids=["applied", "skipped"])


def _is_array(leaf):
    """Tests whether a leaf is an array of numbers or keys, independently of the package."""
    if isinstance(leaf, jax.Array):
        return True
    return (
        isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufcV" and leaf.dtype != jax.dtypes.float0
    )


def _is_inexact(leaf):
    return isinstance(leaf, (float, complex)) or (_is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact))


def _leaves(tree):
    return jax.tree.leaves(tree)


def _assert_others_are_the_same_objects(before, after, chosen):
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for was, now in zip(_leaves(before), _leaves(after), strict=True):
        if not chosen(was):
            assert now is was, (was, now)


# --- the gate ---


def _double(tree):
    return jax.tree.map(lambda x: x * 2 if _is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact) else x, tree)


def _gate(flag, fn, tree, *, jitted):
    """Runs `apply_if`; under jit only arrays pass into and out of the program."""
    if not jitted:
        return jmpscale.apply_if(flag, fn, tree)
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    kept = []

    def put(arrays):
        new = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(treedef, [new.get(i, leaf) for i, leaf in enumerate(leaves)])

    @jax.jit
    def run(flag, arrays):
        out = jax.tree.leaves(jmpscale.apply_if(flag, fn, put(arrays)))
        kept[:] = [None if i in places else leaf for i, leaf in enumerate(out)]
        return [out[i] for i in places]

    new = dict(zip(places, run(flag, [leaves[i] for i in places]), strict=True))
    return jax.tree.unflatten(treedef, [new.get(i, leaf) for i, leaf in enumerate(kept)])


eager_and_jit = pytest.mark.parametrize(
    "jitted", [False, pytest.param(True, marks=pytest.mark.full)], ids=["eager", "jit"]
)


@eager_and_jit
@each_flag
@hypothesis.given(tree=ANY)
def test_apply_if_changes_what_the_step_changes_and_keeps_every_other_object(jitted, flag, tree):
    out = _gate(jnp.array(flag), _double, tree, jitted=jitted)
    assert_step_is_noop(_double(tree) if flag else tree, out)
    _assert_others_are_the_same_objects(tree, out, _is_array)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
@hypothesis.given(tree=ANY)
@hypothesis.example(tree={"seed": 2**40, "w": jnp.ones(2)})
def test_apply_if_keeps_every_object_if_the_step_returns_its_carry(jitted, tree):
    seen = []

    def same(tree):
        seen.append(tree)
        return tree

    for flag in (True, False):
        out = _gate(jnp.array(flag), same, tree, jitted=jitted)
        assert_step_is_noop(tree, out)
        _assert_others_are_the_same_objects(tree, out, _is_array)
    for inside in seen:
        _assert_others_are_the_same_objects(tree, inside, _is_array)


@each_flag
@pytest.mark.parametrize("number", [2, 2.5, True, 1 + 2j])
def test_apply_if_returns_a_number_that_the_step_changes_as_an_array(flag, number):
    carry = {"n": number, "kept": number, "name": "text"}
    step = lambda c: c | {"n": not c["n"] if number is True else c["n"] * 2}  # noqa: E731
    out = jax.jit(lambda flag: {"n": jmpscale.apply_if(flag, step, carry)["n"]})(jnp.array(flag))
    assert isinstance(out["n"], jax.Array)
    assert out["n"] == (step(carry)["n"] if flag else number)
    eager = jmpscale.apply_if(jnp.array(flag), step, carry)
    assert eager["kept"] is number
    assert eager["n"] == out["n"]


@each_flag
@pytest.mark.parametrize(
    "leaf", ["text", np.str_("text"), jnp.tanh, np.float32, jnp.float16, np.dtype("f2")], ids=lambda x: type(x).__name__
)
def test_apply_if_refuses_a_change_of_any_other_object(flag, leaf):
    step = jax.jit(
        lambda flag, w: jmpscale.apply_if(flag, lambda c: {"w": c["w"], "x": "other"}, {"w": w, "x": leaf})["w"]
    )
    with pytest.raises(
        TypeError, match=r"carry\[0\]\['x'\] was .* and is 'other'\. Only arrays and Python numbers may change"
    ):
        step(jnp.array(flag), jnp.ones(2))


# --- checking and unscaling ---


def _finite(tree):
    return all(np.isfinite(_parts(x)).all() for x in _leaves(tree) if _is_inexact(x))


@hypothesis.given(tree=ANY)
def test_all_finite_tests_only_floating_point_leaves(tree):
    assert bool(jmpscale.all_finite(tree)) == _finite(tree)


def _parts(leaf):
    """Returns the real and the imaginary part, or the real one alone, in float64."""
    x = np.asarray(leaf)
    return np.asarray([x.real, x.imag] if np.iscomplexobj(x) else [x], np.float64)


@hypothesis.given(tree=ANY)
def test_unscale_divides_floating_point_leaves_and_keeps_every_other_object(tree):
    alone = jmpscale.unscale(SCALER, tree)
    out, finite = jmpscale.unscale_and_check(SCALER, tree)
    assert_step_is_noop(alone, out)
    assert bool(finite) == _finite(tree)
    _assert_others_are_the_same_objects(tree, out, _is_inexact)
    for was, now in zip(_leaves(tree), _leaves(out), strict=True):
        if _is_inexact(was):
            dtype = jnp.result_type(was)
            assert now.dtype == (jnp.float32 if dtype == jnp.float16 else dtype)
            np.testing.assert_array_equal(_parts(now), _parts(was) / 2**8)
    off, finite = jmpscale.unscale_and_check(jmpscale.disabled(), tree)
    assert off is tree
    assert finite


@hypothesis.given(tree=ANY)
@hypothesis.example(tree=np.dtype("f2"))
def test_scale_scales_losses_and_refuses_every_other_leaf(tree):
    losses = [leaf for leaf in _leaves(tree) if _is_inexact(leaf) and not jnp.iscomplexobj(leaf)]
    for loss, scaled in zip(losses, jmpscale.scale(SCALER, losses), strict=True):
        np.testing.assert_array_equal(np.asarray(scaled, np.float64), np.asarray(loss, np.float64) * 2**8)
    if len(losses) < len(_leaves(tree)):
        with pytest.raises(TypeError, match=r"scale takes losses of a floating-point dtype, got .* at tree"):
            jmpscale.scale(SCALER, tree)


# --- casting ---


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@hypothesis.given(tree=ANY)
def test_cast_converts_floating_point_arrays_and_keeps_every_other_object(dtype, tree):
    out = jmpscale.cast(tree, dtype)
    floating = lambda x: _is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    _assert_others_are_the_same_objects(tree, out, floating)
    for was, now in zip(_leaves(tree), _leaves(out), strict=True):
        if floating(was):
            assert now.dtype == dtype
            np.testing.assert_array_equal(np.asarray(now, np.float32), np.asarray(jnp.asarray(was, dtype), np.float32))


# --- the scaler in a tree ---


@hypothesis.given(tree=ANY)
def test_the_scaler_is_found_and_replaced_among_anything(tree):
    other = jmpscale.dynamic(4.0)
    whole = {"before": tree, "scaler": SCALER, "after": (tree, None)}
    assert jmpscale.get_scaler(whole) == SCALER
    out = jmpscale.replace_scaler(whole, other)
    assert jmpscale.get_scaler(out) == other
    assert out["scaler"] == other
    for name in ("before", "after"):
        _assert_others_are_the_same_objects(whole[name], out[name], lambda _: False)
    for number, several in ((0, tree), (2, [whole, SCALER])):
        with pytest.raises(ValueError, match=f"exactly one ScalerState, found {number}"):
            jmpscale.get_scaler(several)
        with pytest.raises(ValueError, match=f"exactly one ScalerState, found {number}"):
            jmpscale.replace_scaler(several, other)


# --- looking ---


@hypothesis.given(tree=ANY)
def test_grad_report_counts_only_floating_point_leaves(tree):
    seen = [leaf for leaf in _leaves(tree) if _is_inexact(leaf)]
    if not seen:
        with pytest.raises(ValueError, match="grads must have a leaf of a floating-point dtype, got none"):
            jmpscale.grad_report(tree)
        return
    report = jmpscale.grad_report(tree)
    parts = [_parts(leaf) for leaf in seen]
    assert report.sizes == tuple(p.size for p in parts)
    assert report.nan.tolist() == [int(np.isnan(p).sum()) for p in parts]
    assert report.inf.tolist() == [int(np.isinf(p).sum()) for p in parts]
    assert report.zero.tolist() == [int((p == 0).sum()) for p in parts]
    assert bool(report.finite) == _finite(tree)
    assert len(set(report.paths)) == len(seen)
    assert report.describe().count("\n") == min(len(seen), 20) + 1


@hypothesis.given(tree=ANY)
def test_assert_step_is_noop_accepts_an_equal_tree_and_no_other(tree):
    leaves, treedef = jax.tree.flatten(tree)
    assert_step_is_noop(tree, jax.tree.unflatten(treedef, leaves))
    for i, leaf in enumerate(leaves):
        other = jax.tree.unflatten(treedef, [*leaves[:i], "another", *leaves[i + 1 :]])
        with pytest.raises(AssertionError, match="the step changed state"):
            assert_step_is_noop(tree, other)
        if _is_array(leaf) and leaf.size:
            with pytest.raises(AssertionError, match="the step changed state"):
                assert_step_is_noop(
                    tree, jax.tree.unflatten(treedef, [*leaves[:i], _with_another_bit(leaf), *leaves[i + 1 :]])
                )


def _with_another_bit(leaf):
    """Returns an array that differs in the lowest bit of its last byte."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    value = np.array(jax.random.key_data(leaf) if is_key else leaf)
    if value.dtype == bool:
        return ~value
    changed = bytearray(value.tobytes())
    changed[-1] ^= 1
    value = np.frombuffer(bytes(changed), value.dtype).reshape(value.shape)
    return jax.random.wrap_key_data(jnp.asarray(value)) if is_key else value
