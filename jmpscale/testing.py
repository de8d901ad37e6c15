"""Checks for the tests and the debugging of training programs that use jmpscale. They read values, on the host."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jmpscale._scaling import require_flag
from jmpscale._state import shortened, shown
from jmpscale._tree import is_inexact, named_leaves


def inject(tree: Any, value: float, *, path: str, when: Any = True) -> Any:
    """Plants a bad value in one leaf of a tree: the fault that a training program has to survive.

    Works inside `jax.jit` and `jax.shard_map`; to hit one step or one device, make `when` depend on a step count or on
    `jax.lax.axis_index`.

    Args:
      tree: pytree of gradients, or of anything else.
      value: what to plant, such as `jnp.inf` or `jnp.nan`; in the leaf's dtype.
      path: which leaf, as `jax.tree_util.keystr` spells it, such as `"['dense']['kernel']"`.
      when: bool[], whether to plant it at all.

    Returns:
      The tree; the first element of that leaf is `value` where `when` is true.

    Raises:
      TypeError: `when` is not a boolean.
      ValueError: no floating-point or complex leaf is at `path` (names those that there are), or `value` or `when` is
        not a scalar.

    >>> grads = {"w": jnp.ones(3), "b": jnp.ones(2)}
    >>> inject(grads, jnp.inf, path="['w']")["w"]
    Array([inf,  1.,  1.], dtype=float32)
    """
    there = [name for name, leaf in named_leaves(tree) if is_inexact(leaf) and jnp.size(leaf)]
    if not (isinstance(cast(object, path), str) and path in there):
        raise ValueError(
            f"path must be that of an inexact leaf with elements, got {shown(path)}. There are: {there[:20]}."
        )
    if getattr(value, "shape", ()) or not jnp.issubdtype(getattr(value, "dtype", type(value)), np.number):
        raise ValueError(f"value must be a scalar such as jnp.inf, got {shown(value)}. Plant one value at a time.")
    flag = require_flag(when, "when")

    def plant(at: Any, leaf: Any) -> Any:
        if jax.tree_util.keystr(at) != path:
            return leaf
        first = (jnp.arange(jnp.size(leaf)) == 0).reshape(jnp.shape(leaf))
        return jnp.where(first & flag, jnp.asarray(value, jnp.result_type(leaf)), leaf)

    return jax.tree_util.tree_map_with_path(plant, tree)


def assert_step_is_noop(before: Any, after: Any) -> None:
    """Raises unless a step has left everything as it was, bit for bit: what a skipped step must do.

    Args:
      before: parameters, optimizer state, averages and whatever else belongs to the training state, before the step.
        Copy what the step takes over as donated buffers.
      after: the same, after the step; without the scaler, which counts the skip.

    Raises:
      AssertionError: a structure, shape, dtype or bit differs; names the first leaf that does.

    >>> assert_step_is_noop({"w": jnp.ones(3)}, {"w": jnp.ones(3)})
    """
    old, new = dict(named_leaves(before)), dict(named_leaves(after))
    if jax.tree.structure(before) != jax.tree.structure(after):
        differing = sorted(set(old) ^ set(new)) or ["a container"]
        raise AssertionError(f"the step changed the structure of the training state: {differing[0]} differs.")
    for path, was in old.items():
        if _bits(was) != _bits(new[path]):
            old_text, new_text = shortened(was, 200), shortened(new[path], 200)
            raise AssertionError(
                f"the step changed state{path}: {old_text} before, {new_text} after. Gate it in apply_if."
            )


def _bits(leaf: Any) -> Any:
    """Returns something that is equal for two leaves only if they are equal bit for bit."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not hasattr(leaf, "dtype"):
        return leaf
    value = cast(Any, np.asarray(leaf))
    return value.shape, value.dtype, value.tobytes()


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
