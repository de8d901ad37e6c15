"""Checks for the tests and the debugging of training programs that use jmpscale. They read values, on the host."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jmpscale._finite import named_leaves


def assert_replicated(tree: Any) -> None:
    """Raises unless every device holds the same bits of every array of the tree.

    A missing `axis_name` under `jax.pmap`, or under `jax.shard_map` with `check_vma=False`, only gives a warning: the
    array calls itself replicated while each device has gone its own way. Call it on the scaler after a step
    that overflowed on one device. With several processes all of them have to call it.

    Args:
      tree: a scaler, or any pytree of arrays that all devices should hold alike. An array that `jax.pmap` returned
        has a leading axis of devices; its parts are compared.

    Raises:
      AssertionError: two devices differ; names the leaf, the devices and the values.
      TypeError: a leaf is no `jax.Array`.

    >>> import jmpscale
    >>> assert_replicated(jmpscale.dynamic())
    """
    for path, leaf in named_leaves(tree):
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"tree{path} must be a jax.Array, got {type(leaf).__name__}. Pass what a step returned.")
        # The parts that jax.pmap returns keep their device axis, or lose it, depending on the version.
        held = [(shard.device, np.asarray(shard.data).reshape(-1)) for shard in leaf.addressable_shards]
        first_device, first = held[0]
        for device, value in held[1:]:
            if value.tobytes() != first.tobytes():
                raise AssertionError(
                    f"tree{path} differs between devices: {first} on {first_device}, {value} on {device}. Each device "
                    "has decided for itself; give axis_name to unscale_and_check, update or with_loss_scaling."
                )
        if jax.process_count() > 1:
            multihost_utils.assert_equal(first, f"tree{path} differs between processes.")
