"""jmpscale.testing: each tool finds the fault, and its message names the leaf."""

import os
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import assert_replicated, assert_step_is_noop, inject, inject_backward

import children

STATE = {"w": jnp.arange(3.0), "n": jnp.array(3), "key": jax.random.key(0), "f": jnp.tanh, "s": "text"}


def test_assert_step_is_noop_accepts_a_step_that_changed_nothing():
    copy = {name: leaf.copy() if hasattr(leaf, "copy") else leaf for name, leaf in STATE.items()}
    assert_step_is_noop(STATE, copy)
    assert_step_is_noop({"w": np.float32("nan")}, {"w": np.float32("nan")})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("w", jnp.array([0.0, 1.0, np.nextafter(np.float32(2), np.float32(3))])),
        ("w", jnp.array([-0.0, 1.0, 2.0])),
        ("w", jnp.arange(3.0, dtype=jnp.float16)),
        ("w", jnp.arange(3.0)[None]),
        ("n", jnp.array(4)),
        ("key", jax.random.key(1)),
        ("f", jnp.sin),
        ("s", "other"),
    ],
)
def test_assert_step_is_noop_names_a_leaf_of_which_one_bit_changed(name, value):
    with pytest.raises(AssertionError, match=rf"(?s)the step changed state\['{name}'\]: .* before, .* after"):
        assert_step_is_noop(STATE, STATE | {name: value})


NAN = float("nan")


@pytest.mark.parametrize("value", [NAN, -NAN, 0.0, -0.0, 1, True, 2.5, 10**40, complex(NAN, -0.0), np.float32("nan")])
def test_assert_step_is_noop_accepts_equal_numbers(value):
    assert_step_is_noop({"n": value}, {"n": type(value)(value)})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (1.0, 1 + 0j),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (10**40, 10**40 + 1),
        (1.0, np.float32(1.0)),
        (1.0, jnp.float32(1.0)),
        (NAN, 0.0),
        ("1", 1),
        (jnp.float16, jnp.bfloat16),
        (np.float32, np.float64),
        (np.str_("a"), np.str_("b")),
        (np.zeros(2, jax.dtypes.float0), np.zeros(3, jax.dtypes.float0)),
    ],
)
def test_assert_step_is_noop_distinguishes_numbers_and_other_leaves(before, after):
    for was, now in ((before, after), (after, before)):
        with pytest.raises(AssertionError, match=r"(?s)the step changed state\['n'\]: .* before, .* after"):
            assert_step_is_noop({"n": was}, {"n": now})
        assert_step_is_noop({"n": was}, {"n": was})


def test_assert_step_is_noop_names_a_change_of_the_structure():
    with pytest.raises(AssertionError, match=r"structure of the training state: \['extra'\] differs"):
        assert_step_is_noop(STATE, STATE | {"extra": 1})
    with pytest.raises(AssertionError, match="a container differs"):
        assert_step_is_noop([1.0], (1.0,))


@jax.tree_util.register_pytree_with_keys_class
class Pair:
    """Two children under the same key."""

    def __init__(self, first, second):
        self.children = first, second

    def tree_flatten_with_keys(self):
        return tuple((jax.tree_util.GetAttrKey("x"), child) for child in self.children), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_assert_step_is_noop_compares_both_of_two_leaves_with_the_same_path():
    before = Pair(jnp.ones(1), jnp.ones(1))
    assert_step_is_noop(before, Pair(jnp.ones(1), jnp.ones(1)))
    for after in (Pair(jnp.zeros(1), jnp.ones(1)), Pair(jnp.ones(1), jnp.zeros(1))):
        with pytest.raises(AssertionError, match=r"the step changed state\.x: "):
            assert_step_is_noop(before, after)


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_inject_changes_one_leaf_at_one_step(value, dtype):
    grads = {"a": [jnp.ones((2, 3), dtype), jnp.array(5)], "b": jnp.ones(4, dtype)}
    step = jax.jit(lambda n: inject(grads, value, path="['a'][0]", when=n == 3))
    hit, unchanged = step(3), step(2)
    assert_step_is_noop(grads, unchanged)
    assert not jnp.isfinite(hit["a"][0][0, 0])
    assert jnp.isfinite(hit["a"][0]).sum() == 5
    assert_step_is_noop(grads["b"], hit["b"])
    assert hit["a"][0].dtype == dtype


def test_inject_on_one_device():
    mesh = jax.make_mesh((8,), ("d",))

    def local(x):
        return inject(x, jnp.nan, path="", when=jax.lax.axis_index("d") == 5)

    ones = jax.device_put(jnp.ones(16), jax.NamedSharding(mesh, P("d")))
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(ones)
    assert np.flatnonzero(np.isnan(out)).tolist() == [10]


@pytest.mark.parametrize("path", ["['c']", "['n']", "['empty']"])
def test_inject_refuses_a_leaf_that_cannot_hold_the_value(path):
    tree = {"w": jnp.ones(2), "n": jnp.array(1), "empty": jnp.ones(0)}
    with pytest.raises(
        ValueError, match=r"path must be that of a floating-point leaf .*The paths of this tree are \[\"\['w'\]\"\]"
    ):
        inject(tree, jnp.nan, path=path)


# --- faults in the backward pass ---


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan, 3])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_inject_backward_changes_only_the_cotangent(value, dtype):
    tree = {"w": jnp.array([[-0.0, 1.0], [2.0, 3.0]], dtype), "v": jnp.ones(3, dtype), "n": 7, "act": jnp.tanh}

    def run(w, v, when):
        here = tree | {"w": w, "v": v}
        there = inject_backward(here, value, path="['w']", when=when)
        assert (there["n"], there["act"]) == (7, jnp.tanh)
        return there["w"], there["v"]

    out, pull = jax.vjp(lambda w, v: run(w, v, jnp.array(True)), tree["w"], tree["v"])
    assert_step_is_noop(out, (tree["w"], tree["v"]))
    cotangents = jnp.full((2, 2), -0.0, dtype), jnp.full(3, 5.0, dtype)
    expected = inject(cotangents, value, path="[0]")
    assert_step_is_noop(pull(cotangents), expected)
    pull = jax.vjp(lambda w, v: run(w, v, jnp.array(False)), tree["w"], tree["v"])[1]
    assert_step_is_noop(pull(cotangents), cotangents)


def test_inject_backward_at_one_step_of_a_training_run_skips_that_step():
    def loss_fn(w, x, step):
        w = inject_backward(w, jnp.inf, path="", when=step == 3)
        return jnp.mean((x @ w) ** 2)

    def one(carry, step):
        w, scaler = carry
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, w, jnp.ones((2, 4)), step)
        finite = jmpscale.all_finite(grads)
        w = jmpscale.apply_if(finite, lambda w: w - 0.1 * grads, w)
        return (w, jmpscale.update(scaler, finite, loss=loss)), finite

    (w, scaler), finite = jax.jit(lambda *c: jax.lax.scan(one, c, jnp.arange(6)))(jnp.ones((4, 1)), jmpscale.dynamic())
    assert finite.tolist() == [True, True, True, False, True, True]
    assert int(scaler.last_skip) == jmpscale.SkipReason.GRADIENTS
    assert jnp.isfinite(w).all()


def test_inject_at_a_gated_step_count_skips_every_later_step():
    def one(carry, _):
        w, step = carry
        grads = inject(jnp.ones(2), jnp.inf, path="", when=step == 3)
        finite = jmpscale.all_finite(grads)
        return jmpscale.apply_if(finite, lambda w, step: (w - grads, step + 1), w, step), finite

    _, finite = jax.lax.scan(one, (jnp.zeros(2), jnp.array(0)), length=8)
    assert finite.tolist() == [True] * 3 + [False] * 5


def test_inject_backward_on_an_activation_spreads_through_the_backward_pass():
    def loss(params, x):
        hidden = inject_backward(x @ params["first"], jnp.inf, path="")
        return jnp.sum(hidden @ params["second"])

    params = {"first": jnp.ones((2, 3)), "second": jnp.ones((3, 1))}
    grads = jax.jit(jax.grad(loss))(params, jnp.ones((4, 2)))
    assert jnp.isinf(grads["first"][:, 0]).all()
    assert jnp.isfinite(grads["first"][:, 1:]).all()
    assert jnp.isfinite(grads["second"]).all()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("place", ["parameters", "activations"])
def test_inject_backward_on_one_device(place, check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def loss(w, x):
        when = jax.lax.axis_index("d") == 5
        if place == "parameters":
            w = inject_backward(w, jnp.nan, path="", when=when)
        else:
            x = inject_backward(x, jnp.nan, path="", when=when)
        return jnp.sum(w * x)

    def local(w, x):
        return jax.tree.map(lambda g: jnp.atleast_1d(g)[None], jax.grad(loss, (0, 1))(w, x))

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), check_vma=check_vma)
    of_w, of_x = jax.jit(run)(jnp.float32(2.0), jnp.ones(8))
    # With types, the cotangent of a value that the devices share is a sum over them; without, each device has its own.
    everywhere = list(range(8)) if check_vma else [5]
    assert np.flatnonzero(np.isnan(of_w)).tolist() == (everywhere if place == "parameters" else [])
    assert np.flatnonzero(np.isnan(of_x)).tolist() == ([5] if place == "activations" else [])


def test_inject_backward_under_vmap_and_second_derivatives():
    def f(x, when):
        return jnp.sum(inject_backward(x, jnp.inf, path="", when=when) ** 3)

    grads = jax.vmap(jax.grad(f))(jnp.ones((2, 3)), jnp.array([True, False]))
    assert jnp.isinf(grads).tolist() == [[True, False, False], [False] * 3]
    second = jax.grad(lambda x: jnp.sum(jax.grad(f)(x, jnp.array(False))))(jnp.ones(3))
    assert second.tolist() == [6.0] * 3


# --- equal bits on all devices ---

MESH = {"data": 4, "model": 2}


def _placed(x, spec, mesh):
    return jax.device_put(x, jax.NamedSharding(mesh, spec))


def _drifted(x, spec, axis, mesh):
    """Returns an array that is marked as replicated along `axis` although the devices there hold different values."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):

        def change(x):
            return jax.vmap(jax.random.fold_in, (0, None))(x, jax.lax.axis_index(axis))
    else:

        def change(x):
            return jnp.where(jax.lax.axis_index(axis) == 1, -x, x)

    return jax.jit(jax.shard_map(change, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x)


STATES = {
    "w": (jnp.arange(1.0, 33.0).reshape(8, 4), P("data")),
    "v": (jnp.arange(1.0, 33.0).reshape(4, 8), P(None, "model")),
    "full": (jnp.arange(8.0), P(("data", "model"))),
    "n": (jnp.float32(3.0), P()),
    "key": (jax.random.split(jax.random.key(0), 4), P("data")),
}


def test_assert_replicated_compares_the_copies_of_each_shard():
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 2)
    state = {name: _placed(x, spec, mesh) for name, (x, spec) in STATES.items()}
    assert_replicated(state)
    assert_replicated(state["full"].reshape(2, 4))
    assert_replicated({"key": jax.random.key(0), "keys": jax.random.split(jax.random.key(1))})
    for name, axis in (("w", "model"), ("v", "data"), ("n", "data"), ("n", "model"), ("key", "model")):
        x, spec = STATES[name]
        drifted = _drifted(x, spec, axis, mesh)
        with pytest.raises(
            AssertionError, match=rf"tree\['{name}'\] differs between devices: (?s:.*) on .*, (?s:.*) on "
        ):
            assert_replicated(state | {name: drifted})


def test_assert_replicated_does_not_compare_the_rows_of_an_array_sharded_along_two_axes():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    both = jax.device_put(jnp.arange(16.0).reshape(8, 2), jax.NamedSharding(mesh, jax.P("a", "b")))
    assert_replicated(both)


@pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning")
def test_assert_replicated_compares_the_rows_that_pmap_returns():
    scaler = jax.tree.map(lambda x: jnp.stack([x] * 8), jmpscale.dynamic())
    step = jax.pmap(lambda s, finite: (jmpscale.update(s, finite, axis_name=()), jnp.zeros((2, 8))), axis_name="d")
    assert_replicated(step(scaler, jnp.ones(8, bool)))
    with pytest.raises(AssertionError, match=r"tree\[0\]\.(loss_scale|finite_steps) differs between devices"):
        assert_replicated(step(scaler, jnp.arange(8) != 5))


# Two processes of two devices each. Each process holds a copy of every shard along "model".
PROCESSES = """
import sys, os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from jmpscale.testing import assert_replicated

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))

def held(values, *spec):
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

w, fsdp, n = np.arange(8.0, dtype=np.float32), np.arange(4.0, dtype=np.float32), np.float32(3.0)
own = np.float32(jax.process_index())
state = {"w": held(w, "model"), "fsdp": held(fsdp, ("data", "model")), "n": held(np.asarray(n))}
assert_replicated(state)
for name, drifted in (("w", held(w + own, "model")), ("n", held(np.asarray(n + own)))):
    try:
        assert_replicated(state | {name: drifted})
    except AssertionError as error:
        print(error)
"""


@pytest.mark.full
def test_assert_replicated_compares_the_shards_of_several_processes():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    started = [children.start("-c", PROCESSES, address, number, env=environment) for number in range(2)]
    for out, errors in [children.end(process) for process in started]:
        told = [line for line in out.splitlines() if line.startswith("tree")]  # Gloo prints as well
        assert told == [f"tree['{name}'] differs between processes." for name in "wn"], errors
