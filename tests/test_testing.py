"""jmpscale.testing: each tool injects or finds the fault, and its message names the leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import assert_replicated, assert_step_is_noop, inject, inject_backward

import meshes

# --- assert_step_is_noop ---

STATE = {"w": jnp.arange(3.0), "n": jnp.array(3), "key": jax.random.key(0), "f": jnp.tanh, "s": "text"}
NAN = float("nan")


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """Two children under the same key."""

    def __init__(self, first, second):
        self.children = first, second

    def tree_flatten_with_keys(self):
        return tuple((jax.tree_util.GetAttrKey("x"), child) for child in self.children), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (STATE, {name: leaf.copy() if hasattr(leaf, "copy") else leaf for name, leaf in STATE.items()}),
        (np.float32("nan"), np.float32("nan")),
        (np.arange(3.0, dtype=np.float32), jnp.arange(3.0)),
        (NAN, -float("nan")),
        (10**40, 10**39 * 10),
        (complex(NAN, -0.0), complex(NAN, -0.0)),
        (Twins(1, 2), Twins(1, 2)),
    ],
    ids=["state", "numpy-nan", "numpy-jax", "nan", "int", "complex", "twins"],
)
def test_assert_step_is_noop_accepts_equal_bits(before, after):
    assert_step_is_noop({"x": before}, {"x": after})


DIFFERENT = {  # two leaves that differ
    "array: one bit": (jnp.arange(3.0), jnp.array([0.0, 1.0, np.nextafter(np.float32(2), np.float32(3))])),
    "array: dtype": (jnp.zeros(2), jnp.zeros(2, jnp.int32)),
    "array: shape": (jnp.zeros(2), jnp.zeros((2, 1))),
    "key: value": (jax.random.key(0), jax.random.key(1)),
    "key: shape": (jax.random.key(0), jax.random.key(0)[None]),
    "key: implementation": (jax.random.key(0), jax.random.key(0, impl="rbg")),
    "function": (jnp.tanh, jnp.sin),
    "string and int": ("1", 1),
    "float: sign of zero": (0.0, -0.0),
    "int and bool": (1, True),
    "complex: sign of zero": (complex(0.0, 0.0), complex(0.0, -0.0)),
    "float and NumPy scalar": (1.0, np.float32(1.0)),
    "float and array": (1.0, jnp.float32(1.0)),
    "NumPy string": (np.str_("a"), np.str_("b")),
    "float0: shape": (np.zeros(2, jax.dtypes.float0), np.zeros(3, jax.dtypes.float0)),
    "container: second child": (Twins(1, 2), Twins(1, 3)),
}


@pytest.mark.parametrize(("before", "after"), DIFFERENT.values(), ids=DIFFERENT)
def test_assert_step_is_noop_names_a_changed_leaf(before, after):
    words = r"(?s)the step changed state\['x'\].*: .* before, .* after"
    words += ".*If the step was skipped .*apply_if, .*; otherwise no overflow reached"
    for was, now in ((before, after), (after, before)):
        with pytest.raises(AssertionError, match=words):
            assert_step_is_noop({"x": was}, {"x": now})


def test_assert_step_is_noop_shortens_long_values():
    with pytest.raises(AssertionError) as caught:
        assert_step_is_noop("a" * 198, "b" * 199)
    assert f"{'a' * 198!r} before, '{'b' * 196}... after" in str(caught.value)


def _train_state():
    return TrainState.create(apply_fn=lambda x: x, params=jnp.ones(2), tx=optax.sgd(1.0))


STRUCTURES = {  # before and after the step, and the words of the message
    "another container": (
        {"w": [1.0]},
        {"w": (1.0,)},
        r"PyTreeDef\({'w': \[\*\]}\) before, PyTreeDef\({'w': \(\*,\)}\) after\. A container has another type",
    ),
    "leaf and container": ({"w": 1.0}, {"w": {}}, r"state\['w'\] is only in one"),
    "static fields": ([_train_state()], [_train_state()], "PyTreeDef.* or another static field, such as a function"),
}


def test_assert_step_is_noop_names_a_change_of_the_structure():
    for before, after in ((STATE, STATE | {"extra": 1}), (STATE | {"extra": 1}, STATE)):
        with pytest.raises(AssertionError, match=r"structure of the training state: state\['extra'\] is only in one"):
            assert_step_is_noop(before, after)
    for before, after, words in STRUCTURES.values():
        with pytest.raises(AssertionError, match=f"structure of the training state: {words}"):
            assert_step_is_noop(before, after)


def test_assert_step_is_noop_says_that_a_scaler_counts_the_skip():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0))
    opt_state = tx.init(jnp.ones(2))
    _, after = tx.update(jnp.full(2, jnp.inf), opt_state)
    words = r"state\[1\]\.scaler\.loss_scale: .*belongs to a scaler, which counts the skip .*compare inner_state"
    with pytest.raises(AssertionError, match=words):
        assert_step_is_noop((1.0, opt_state), (1.0, after))


@pytest.mark.full
def test_assert_step_is_noop_requires_copies_of_nnx_variables():
    """A step changes the variables of a model in place, so an alias would always be equal."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    alias, copy = nnx.state(model), nnx.clone(nnx.state(model))
    assert_step_is_noop(copy, nnx.state(model))
    model.kernel[...] += 1
    with pytest.raises(AssertionError, match=r"the step changed state\['kernel'\]"):
        assert_step_is_noop(copy, nnx.state(model))
    with pytest.raises(TypeError, match=r"before must be a copy .* before = nnx\.clone\(nnx\.state\(model\)\)"):
        assert_step_is_noop(alias, nnx.state(model))
    for before, after, name in ((model, copy, "before"), (copy, model, "after")):
        with pytest.raises(TypeError, match=f"{name} must hold values, got a Flax NNX Linear, which is changed in"):
            assert_step_is_noop(before, after)


# --- inject and inject_backward ---

TREE = {"w": [jnp.array([[-0.0, 1.0], [2.0, 3.0]]), jnp.array(5)], "v": jnp.ones(3), "n": 7, "f": jnp.tanh}


@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", ["float32", "float16", pytest.param("complex64", marks=pytest.mark.full)])
def test_inject_changes_the_first_element_of_one_leaf(value, dtype):
    leaf, path = TREE["w"][0].astype(dtype), "['w'][0]"
    value = np.array(value, dtype)[()]  # a GPU that converts a NaN changes its bits
    tree = TREE | {"w": [leaf, TREE["w"][1]]}
    changed = leaf.at[0, 0].set(value)
    assert_step_is_noop(TREE | {"w": [changed, TREE["w"][1]]}, inject(tree, value, path=path))
    step = jax.jit(lambda leaf, n: inject(leaf, value, path="", when=n == 3))
    assert_step_is_noop(changed, step(leaf, 3))
    assert_step_is_noop(leaf, step(leaf, 2))


@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", ["float32", "float16", pytest.param("complex64", marks=pytest.mark.full)])
def test_inject_backward_changes_only_the_cotangent(value, dtype):
    value = np.array(value, dtype)[()]  # a GPU that converts a NaN changes its bits

    def fn(leaf, when):
        out = inject_backward(TREE | {"w": [leaf]}, value, path="['w'][0]", when=when)
        assert (out["n"], out["f"]) == (7, jnp.tanh)
        return out["w"][0], out["v"]

    leaf = TREE["w"][0].astype(dtype)
    cotangents = jnp.full((2, 2), -0.0, dtype), jnp.ones(3)
    out, pull = jax.vjp(lambda leaf: fn(leaf, jnp.array(True)), leaf)
    assert_step_is_noop(out, (leaf, TREE["v"]))
    assert_step_is_noop(pull(cotangents), (cotangents[0].at[0, 0].set(value),))
    pull = jax.vjp(lambda leaf: fn(leaf, jnp.array(False)), leaf)[1]
    assert_step_is_noop(pull(cotangents), (cotangents[0],))


@pytest.mark.full
def test_inject_backward_works_under_second_derivatives():
    def fn(x):
        return jnp.sum(inject_backward(x, jnp.inf, path="", when=False) ** 3)

    assert jax.grad(lambda x: jnp.sum(jax.grad(fn)(x)))(jnp.ones(3)).tolist() == [6.0] * 3


@pytest.mark.parametrize("transform", [lambda fn: fn, jmpscale.autocast], ids=["plain", "autocast"])
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("place", ["parameters", "activations"])
def test_inject_backward_reaches_devices_that_share_a_value(place, check_vma, transform):
    mesh = meshes.make_mesh(d=8)

    @transform
    def loss_fn(w, x):
        when = jax.lax.axis_index("d") == 5
        if place == "parameters":
            w = inject_backward(w, jnp.nan, path="", when=when)
        else:
            x = inject_backward(x, jnp.nan, path="", when=when)
        return jnp.sum(x @ w)

    def local(w, x):
        return jax.tree.map(lambda g: g[None], jax.grad(loss_fn, (0, 1))(w, x))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), check_vma=check_vma)
    of_w, of_x = jax.jit(mapped)(jnp.ones((3, 2)), jnp.ones((8, 3)))
    # With types, the cotangent of a shared value is a sum over the devices; without types, each device has its own.
    shared = list(range(8)) if check_vma else [5]
    assert np.flatnonzero(np.isnan(of_w).any((1, 2))).tolist() == (shared if place == "parameters" else [])
    assert np.flatnonzero(np.isnan(of_x).any((1, 2))).tolist() == ([5] if place == "activations" else [])


def test_inject_backward_into_some_examples_of_a_batch():
    """The parameter is shared by the examples, and its gradient is the sum over them."""

    def loss(w, x, when):
        return inject_backward(w, 100.0, path="", when=when) * x

    @jax.jit
    def gradient(flags):
        return jax.grad(lambda w: jax.vmap(loss, (None, 0, 0))(w, jnp.arange(1.0, 5.0), flags).sum())(1.0)

    assert gradient(jnp.zeros(4, bool)) == 10
    assert gradient(jnp.array([False, True, False, False])) == 108


# --- assert_replicated ---

PLACED = {  # each with an axis along which its shards are copies
    "w": (np.arange(1.0, 33.0, dtype=np.float32).reshape(8, 4), P("data"), "model"),
    "v": (np.arange(1.0, 33.0, dtype=np.float32).reshape(4, 8), P(None, "model"), "data"),
    "n": (np.float32(3.0), P(), "data"),
    "m": (np.float32(3.0), P(), "model"),
}


def _placed(name):
    x, spec, _ = PLACED[name]
    return jax.device_put(x, jax.NamedSharding(meshes.make_mesh(), spec))


def _drifted(x, spec, axis):
    """Returns an array whose sharding is replicated along `axis`, although the devices there hold different values."""

    def change(x):
        return jnp.where(jax.lax.axis_index(axis) == 1, -x, x)

    return jax.jit(jax.shard_map(change, mesh=meshes.make_mesh(), in_specs=spec, out_specs=spec, check_vma=False))(x)


def test_assert_replicated_accepts_equal_copies():
    state = {name: _placed(name) for name in PLACED}
    rows = jax.device_put(
        np.arange(16.0, dtype=np.float32).reshape(8, 2), jax.NamedSharding(meshes.make_mesh(), P("data", "model"))
    )
    all_axes = jax.device_put(
        np.arange(8.0, dtype=np.float32), jax.NamedSharding(meshes.make_mesh(), P(("data", "model")))
    )
    assert_replicated(state | {"rows": rows, "all_axes": all_axes, "numpy": np.ones(2), "key": jax.random.key(0)})
    assert_replicated(rows)
    assert_replicated({"matrix": all_axes.reshape(2, 4), "keys": jax.random.split(jax.random.key(1))})


@pytest.mark.parametrize("name", PLACED)
def test_assert_replicated_names_a_leaf_that_differs(name):
    state = {"a": np.ones(2), "b": _placed("w"), name: _drifted(*PLACED[name])}
    words = rf"(?s)tree\['{name}'\] differs between devices: .*[13].* on .*, .*-[13].* on .*\. .*pass axis_name"
    with pytest.raises(AssertionError, match=words):
        assert_replicated(state)


def test_assert_replicated_names_a_key_that_differs():
    def local(key):
        return jax.random.fold_in(key, jax.lax.axis_index("data"))

    key = jax.jit(jax.shard_map(local, mesh=meshes.make_mesh(), in_specs=P(), out_specs=P(), check_vma=False))(
        jax.random.key(0)
    )
    with pytest.raises(AssertionError, match="tree differs between devices"):
        assert_replicated(key)


def test_assert_replicated_compares_one_row_per_device():
    mesh = meshes.make_mesh(d=8)
    rows = jax.NamedSharding(mesh, P("d"))
    equal, different = jax.device_put((np.full((8, 2), 3.0), np.arange(8.0)), rows)
    assert_replicated({"w": equal, "n": equal[:, 0]})
    with pytest.raises(AssertionError, match=r"tree\['n'\] differs between devices: \[0\.\] on .*, \[1\.\] on"):
        assert_replicated({"w": equal, "n": different})
    assert_replicated({"n": different, "other": jax.device_put(np.zeros(16), rows)})  # two rows for each device


@pytest.mark.parametrize(("other", "error"), [(0, False), (1, True)])
def test_assert_replicated_compares_shards_of_other_processes(other, error, monkeypatch):
    """Simulates a second process, which holds other bits of the same shards."""

    def gather(sums):
        return np.stack([sums, sums + np.array([0, other], np.uint32)])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    if not error:
        assert_replicated({"w": _placed("w")})
        return
    with pytest.raises(AssertionError, match=r"^tree\['w'\] differs between processes\.$"):
        assert_replicated({"w": _placed("w")})
