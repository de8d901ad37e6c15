"""jmpscale.testing: each tool finds or plants a fault, and its message names the leaf."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from jmpscale.testing import assert_replicated
from jmpscale.testing._first_difference import first_difference

import meshes
import worker

DIFFERENT = {  # two leaves, and the texts of the first elements that differ, and their place
    "scalars": (np.int32(0), np.int32(1), "0", "1", ""),
    "number and array": (1.0, jnp.float32(2.0), "1.0", "2.0", ""),
    "texts": ("a", "b", "a", "b", ""),
    "matrix": (jnp.ones((2, 3)), jnp.ones((2, 3)).at[1, 2].set(jnp.nan), "1.0", "nan", ", at [1, 2]"),
    "NaN in both": (np.array([np.nan, 1.0]), np.array([np.nan, 2.0]), "1.0", "2.0", ", at [1]"),
    "sign of zero": (np.array([0.0, 0.0]), np.array([0.0, -0.0]), "0.0", "-0.0", ", at [1]"),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16).at[1].set(3), "1", "3", ", at [1]"),
    "another dtype": (np.ones(2, np.float16), np.array([1.0, 2.0], np.float32), "1.0", "2.0", ", at [1]"),
    "booleans": (np.array([True, True]), np.array([True, False]), "True", "False", ", at [1]"),
    "key": (jax.random.key(0), jax.random.key(1), "0", "1", ", at [1]"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_first_difference_describes_one_element(name):
    one, other, *expected = DIFFERENT[name]
    assert list(first_difference(one, other)) == expected


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
    words = rf"tree\['{name}'\] differs between devices: -?[13]\.0 on \S+, -?[13]\.0 on [^ ,]+(, at \[0, 0\])?\. "
    with pytest.raises(AssertionError, match=words):
        assert_replicated(state)


def test_assert_replicated_compares_one_row_per_device():
    mesh = meshes.make_mesh(d=8)
    rows = jax.NamedSharding(mesh, P("d"))
    equal, different = jax.device_put((np.full((8, 2), 3.0), np.arange(8.0)), rows)
    assert_replicated({"w": equal, "n": equal[:, 0]})
    with pytest.raises(AssertionError, match=r"tree\['n'\] differs between devices: 0\.0 on .*, 1\.0 on .*, at \[0\]"):
        assert_replicated({"w": equal, "n": different})
    assert_replicated({"n": different, "other": jax.device_put(np.zeros(16), rows)})  # two rows for each device


def _on_two_processes(check, trees, monkeypatch):
    """Calls `check` in two threads as if in two processes; returns the errors. It raises if one waits for the other."""
    barrier, arrays = threading.Barrier(2, timeout=60), {}

    def gather(x):
        arrays[threading.current_thread().name] = x
        barrier.wait()
        gathered = np.stack([arrays["0"], arrays["1"]])
        barrier.wait()
        return gathered

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    errors = {}
    threads = [
        threading.Thread(target=lambda n=n: errors.update({n: worker.error_of(check, trees[n])}), name=str(n))
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [errors[0], errors[1]]


@pytest.mark.parametrize("name", worker.TREES)
def test_assert_replicated_raises_on_both_processes_or_on_neither(name, monkeypatch):
    make, words = worker.TREES[name]
    for error in _on_two_processes(assert_replicated, [make(0), make(1)], monkeypatch):
        assert error is None if words is None else words in (error or "")


def test_assert_replicated_compares_shards_of_other_processes(monkeypatch):
    """Simulates a second process, which holds other bits of one shard."""
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    other = np.where(x == 31, 30, x)
    equal, different = (jax.device_put(y, jax.NamedSharding(meshes.make_mesh(), P("data"))) for y in (x, other))
    assert _on_two_processes(assert_replicated, [{"w": equal}] * 2, monkeypatch) == [None, None]
    error = "AssertionError: tree['w'] differs between the processes 0 and 1. Give every process the same program"
    for found in _on_two_processes(assert_replicated, [{"w": equal}, {"w": different}], monkeypatch):
        assert found.startswith(error)
