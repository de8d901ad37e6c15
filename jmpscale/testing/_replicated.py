"""Checks that devices agree."""

import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jmpscale._base.text import truncate, type_name
from jmpscale._base.tree import PyTree, bit_pattern, is_array, named_leaves


def assert_replicated(tree: PyTree) -> None:
    """Raises unless devices that hold the same part of an array hold the same bits.

    A missing `axis_name` under `jax.pmap` or `check_vma=False` gives only a warning, and the array is then marked as
    replicated although devices have diverged. Call this function after a step that overflowed on one device. On
    multiple hosts, every process must call it.

    Args:
      tree: a scaler, or any pytree of arrays. The copies of each shard are compared; or the rows, if every array has
        one row for each device, as `jax.pmap` returns them.

    Raises:
      AssertionError: two devices differ; the message names the leaf, and within a process the devices and the values.
      TypeError: a leaf is not an array.

    >>> import jmpscale
    >>> from jmpscale import testing
    >>> testing.assert_replicated(jmpscale.dynamic())
    """
    for path, leaf in named_leaves(tree):
        if not is_array(leaf):
            raise TypeError(f"tree{path} must be an array, got {type_name(leaf)}. Pass the result of a step.")
    check_copies(tree)


def check_copies(tree: PyTree, name: str = "tree") -> None:
    """Raises unless devices that hold the same part of a JAX array hold the same bits."""
    on_devices = [(path, leaf) for path, leaf in named_leaves(tree) if isinstance(leaf, jax.Array)]
    by_rows = all(_has_one_row_per_device(leaf) for _, leaf in on_devices)
    for path, leaf in on_devices:
        shards: dict[str, tuple[Any, object]] = {}  # the first shard of each part, and its bits
        shards_here = leaf.addressable_shards
        if len(shards_here) == jax.process_count() == 1:
            continue
        for shard in shards_here:
            bits = bit_pattern(shard.data)
            other, expected = shards.setdefault("" if by_rows else str(shard.index), (shard, bits))
            if bits != expected:
                raise AssertionError(
                    f"{name}{path} differs between devices: {truncate(other.data, 200)} on {other.device}, "
                    f"{truncate(shard.data, 200)} on {shard.device}. Each device has its own gradients or "
                    "has decided independently: average the gradients with jax.lax.pmean, and pass axis_name, with all "
                    "mapped axes, to all_finite, unscale_and_check, update or with_loss_scaling. If devices hold parts "
                    "of the gradients, pass norm_axis_name, too."
                )
        if jax.process_count() > 1:
            _check_processes(f"{name}{path}", {part: bits for part, (_, bits) in shards.items()})


def _check_processes(name: str, bits: dict[str, Any]) -> None:
    sums = [[zlib.crc32(part.encode()), zlib.crc32(value[-1])] for part, value in bits.items()]
    gathered = np.reshape(multihost_utils.process_allgather(np.array(sums, np.uint32)), (-1, 2))
    if len(np.unique(gathered, axis=0)) > len(np.unique(gathered[:, 0])):
        raise AssertionError(f"{name} differs between processes.")


def _has_one_row_per_device(x: jax.Array) -> bool:
    return x.shape[:1] == (len(x.global_shards),) and x.sharding.shard_shape(x.shape)[0] == 1
