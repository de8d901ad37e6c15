"""cast, get_scaler and replace_scaler accept trees of any containers and leaves."""

import collections
import dataclasses
from typing import Any

import equinox
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState

import jmpscale

from bits import assert_equal_bits
from messages import NO_BATCH, ONE_SCALER

Point = collections.namedtuple("Point", ["x", "y"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    kind: str = dataclasses.field(metadata={"static": True}, default="dense")


class Module(equinox.Module):
    weight: Any
    kind: str = equinox.field(static=True, default="dense")


class NNXModel(nnx.Module):
    def __init__(self):
        self.dropout, self.w = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(2))


class NotATree:
    """An object that has a dtype, such as a Linen module."""

    dtype = np.dtype(np.float16)


LEAVES = [
    *(jnp.array([1.0, -0.0, np.nan], dtype) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2)),
    *(np.array([1.0, np.inf], dtype) for dtype in (np.float64, np.float16)),
    *(np.float32(0.5), np.float16(-0.0), jnp.zeros((0, 2)), jnp.array([1 + 2j]), np.complex128(1j)),
    *(jnp.arange(3), jnp.array(True), np.array([1], np.int8), np.int32(3), np.bool_(True), jax.random.key(0)),
    *(1.5, -0.0, float("nan"), 1 + 2j, True, 7, 10**400),
    *("text", b"bytes", np.str_("text"), np.array(["a"]), np.array([None, "a"], object)),
    *(
        np.zeros(2, jax.dtypes.float0),
        jnp.tanh,
        jnp.float16,
        np.float32,
        np.dtype("f2"),
        NotATree(),
        NotATree,
        object(),
    ),
]
trees = st.recursive(
    st.sampled_from(LEAVES) | st.sampled_from([[], {}, (), None, Point(None, ())]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
        st.tuples(inner, inner),
        *(st.builds(node, inner) for node in (Layer, Module, lambda x: FrozenDict(x=x), lambda x: Point(x, x))),
    ),
    max_leaves=8,
)

# cast


def _is_converted(leaf):
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and jnp.issubdtype(leaf.dtype, jnp.floating)


@pytest.mark.parametrize(
    "dtype", ["float16", *(pytest.param(x, marks=pytest.mark.full) for x in ("bfloat16", "float32"))]
)
@hypothesis.given(tree=trees)
@hypothesis.example(tree=LEAVES)
def test_cast_converts_only_floating_point_arrays(dtype, tree):
    out = jmpscale.cast(tree, dtype)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for was, now in zip(jax.tree.leaves(tree), jax.tree.leaves(out), strict=True):
        if _is_converted(was):
            assert isinstance(now, jax.Array)
            assert_equal_bits(jnp.asarray(was).astype(dtype), now)
        else:
            assert now is was


def test_cast_returns_scalers_unchanged():
    opt_state = jmpscale.with_loss_scaling(optax.trace(0.9)).init(jnp.ones(2))
    out = jmpscale.cast(opt_state, jnp.bfloat16)
    assert out.scaler is opt_state.scaler
    assert out.inner_state.trace.dtype == jnp.bfloat16


def test_cast_raises_for_nnx_objects_and_casts_their_state():
    """A copy of the model would draw the same dropout mask in every step."""
    model = NNXModel()
    for tree in (model, {"model": model, "x": jnp.ones(3)}):
        with pytest.raises(TypeError, match=r"got a Flax NNX NNXModel.*autocast.*dtype=jnp\.float16.*cast nnx\.state"):
            jmpscale.cast(tree, jnp.float16)
    half = jmpscale.cast(nnx.state(model, nnx.Param), jnp.float16)
    assert [x.dtype for x in jax.tree.leaves(half)] == [jnp.float16]
    assert [x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))] == [jnp.float32]


def test_cast_is_differentiable():
    """The gradient has the dtype of the array before the conversion."""
    grad = jax.jit(jax.grad(lambda p: jmpscale.cast(p, jnp.float16)["w"].astype(jnp.float32).sum()))
    assert_equal_bits({"w": jnp.ones(2)}, grad({"w": jnp.ones(2)}))


# get_scaler and replace_scaler

OLD, NEW = jmpscale.dynamic(8.0), jmpscale.static(4.0)
TX = jmpscale.with_loss_scaling(optax.trace(0.9), OLD)
PARAMS = {"w": jnp.ones(2)}


HOLDERS = {
    "scaler": lambda: OLD,
    "optimizer": lambda: TX.init(PARAMS),
    "chain": lambda: optax.chain(optax.clip(1.0), TX).init(PARAMS),
    "masked": lambda: optax.masked(TX, {"w": True}).init(PARAMS),
    "inject_hyperparams": lambda: optax.inject_hyperparams(lambda decay: TX)(decay=0.5).init(PARAMS),
    "train-state": lambda: TrainState.create(apply_fn=jnp.tanh, params=PARAMS, tx=TX),
    "dataclass": lambda: Layer({"deep": [OLD, None]}),
    "equinox": lambda: Module((jnp.tanh, OLD)),
    "nnx-optimizer": lambda: nnx.Optimizer(NNXModel(), TX, wrt=nnx.Param).opt_state,
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", HOLDERS)
def test_get_scaler_and_replace_scaler_find_the_scaler(name):
    holder = HOLDERS[name]()
    assert_equal_bits(OLD, jmpscale.get_scaler(holder))
    replaced = jmpscale.replace_scaler(holder, NEW)
    assert_equal_bits(NEW, jmpscale.get_scaler(replaced))
    assert_equal_bits(holder, jmpscale.replace_scaler(replaced, OLD))


def test_get_scaler_and_replace_scaler_accept_shapes():
    shapes = jax.eval_shape(TX.init, PARAMS)
    assert jmpscale.get_scaler(shapes).loss_scale.dtype == jnp.float32
    assert jmpscale.replace_scaler(shapes, NEW).scaler == NEW


@hypothesis.given(tree=trees)
def test_get_scaler_and_replace_scaler_accept_any_tree(tree):
    holder = {"before": tree, "scaler": OLD, "after": (tree, None)}
    assert jmpscale.get_scaler(holder) == OLD
    out = jmpscale.replace_scaler(holder, NEW)
    assert out["scaler"] == NEW
    for name in ("before", "after"):
        pairs = zip(jax.tree.leaves(out[name]), jax.tree.leaves(holder[name]), strict=True)
        assert all(now is was for now, was in pairs)


@pytest.mark.guards
@pytest.mark.parametrize("call", [jmpscale.get_scaler, lambda tree: jmpscale.replace_scaler(tree, NEW)])
def test_get_scaler_and_replace_scaler_raise_unless_there_is_one_scaler(call):
    for number, tree in ((0, {"w": jnp.ones(2)}), (2, [{"a": OLD}, OLD])):
        with pytest.raises(ValueError, match=f"{ONE_SCALER} {number}"):
            call(tree)


@pytest.mark.guards
def test_get_scaler_raises_for_a_scaler_without_an_array():
    with pytest.raises(ValueError, match="all arrays, got 6"):
        jmpscale.get_scaler({"scaler": OLD._replace(total_skips=None)})


BATCH = jax.vmap(lambda scale: OLD._replace(loss_scale=scale))(jnp.array([1.0, 2.0, 4.0]))
HOLDERS_OF_BATCHES = {
    "scaler": lambda: BATCH,
    "ensemble": lambda: jax.vmap(TX.init)({"w": jnp.ones((3, 2))}),
    "shapes": lambda: jax.eval_shape(jax.vmap(TX.init), {"w": jnp.ones((3, 2))}),
    "nnx": lambda: nnx.State({"scaler": jax.tree.map(nnx.OptState, BATCH)}),
}


@pytest.mark.parametrize("name", HOLDERS_OF_BATCHES)
def test_replace_scaler_replaces_each_scaler_of_a_batch(name):
    holder = HOLDERS_OF_BATCHES[name]()
    of_each = jax.tree.map(lambda x: jnp.stack([x] * 3), NEW)
    for new, expected in ((NEW, of_each), (BATCH, BATCH)):
        replaced = jmpscale.replace_scaler(holder, new)
        assert_equal_bits(expected, jmpscale.get_scaler(replaced))
        kinds = [type(x) for x in jax.tree.leaves(replaced, is_leaf=lambda x: isinstance(x, nnx.Variable))]
        assert kinds == [nnx.OptState] * 7 or name != "nnx"


@pytest.mark.guards
@pytest.mark.parametrize("holder", [OLD, jax.tree.map(lambda x: x[:2], BATCH)], ids=["scaler", "other size"])
def test_replace_scaler_raises_for_a_batch_of_another_shape(holder):
    with pytest.raises(ValueError, match=f"scaler {NO_BATCH} a batch"):
        jmpscale.replace_scaler(holder, BATCH)


def test_replace_scaler_copies_the_scaler():
    """Each state may then be donated."""
    scaler = jax.tree.map(jnp.asarray, NEW)
    for _ in range(2):
        state = jmpscale.replace_scaler([OLD], scaler)
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(state)
        assert state[0].loss_scale.is_deleted()
    assert not scaler.loss_scale.is_deleted()


@pytest.mark.usefixtures("standard_promotion")
def test_replace_scaler_changes_the_scaler_of_an_nnx_optimizer():
    model = NNXModel()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, gradient):
        optimizer.update(model, nnx.State({"w": nnx.Param(jnp.array([1.0, gradient]))}))

    optimizer.opt_state = jmpscale.replace_scaler(optimizer.opt_state, jmpscale.dynamic(64.0, backoff_factor=0.25))
    step(model, optimizer, jnp.inf)
    assert jmpscale.get_scaler(optimizer.opt_state).loss_scale == 16
    assert model.w[...].tolist() == [1, 1]
