"""The checks that users build their own tests from: they bite, and they name what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jmpscale.testing import assert_step_is_noop, inject

STATE = {"w": jnp.arange(3.0), "n": jnp.array(3), "key": jax.random.key(0), "f": jnp.tanh, "s": "text"}


def test_a_step_that_changed_nothing_passes():
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
def test_a_single_bit_that_moved_is_named(name, value):
    with pytest.raises(AssertionError, match=rf"(?s)the step changed state\['{name}'\]: .* before, .* after"):
        assert_step_is_noop(STATE, STATE | {name: value})


def test_another_structure_is_named():
    with pytest.raises(AssertionError, match=r"structure of the training state: \['extra'\] differs"):
        assert_step_is_noop(STATE, STATE | {"extra": 1})
    with pytest.raises(AssertionError, match="a container differs"):
        assert_step_is_noop([1.0], (1.0,))


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_a_fault_is_planted_in_one_leaf_at_one_step(value, dtype):
    grads = {"a": [jnp.ones((2, 3), dtype), jnp.array(5)], "b": jnp.ones(4, dtype)}
    step = jax.jit(lambda n: inject(grads, value, path="['a'][0]", when=n == 3))
    hit, spared = step(3), step(2)
    assert_step_is_noop(grads, spared)
    assert not jnp.isfinite(hit["a"][0][0, 0])
    assert jnp.isfinite(hit["a"][0]).sum() == 5
    assert_step_is_noop(grads["b"], hit["b"])
    assert hit["a"][0].dtype == dtype


def test_a_fault_is_planted_on_one_device():
    mesh = jax.make_mesh((8,), ("d",))

    def local(x):
        return inject(x, jnp.nan, path="", when=jax.lax.axis_index("d") == 5)

    ones = jax.device_put(jnp.ones(16), jax.NamedSharding(mesh, P("d")))
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(ones)
    assert np.flatnonzero(np.isnan(out)).tolist() == [10]


@pytest.mark.parametrize("path", ["['c']", "['n']", "['empty']"])
def test_a_place_that_cannot_hold_a_fault_is_refused(path):
    tree = {"w": jnp.ones(2), "n": jnp.array(1), "empty": jnp.ones(0)}
    with pytest.raises(ValueError, match=r"path must be that of an inexact leaf .*There are: \[\"\['w'\]\"\]"):
        inject(tree, jnp.nan, path=path)
