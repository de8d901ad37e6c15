"""Tools for testing training programs."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike

from jmpscale._base.axes import map_like
from jmpscale._base.check import check_flag
from jmpscale._base.compat import varying_axes
from jmpscale._base.text import describe, truncate, type_name
from jmpscale._base.tree import PyTree, Tree, bit_pattern, check_no_nnx_objects, is_array, is_inexact, named_leaves
from jmpscale._check_step import check_step

__all__ = ["assert_replicated", "check_step", "inject_backward"]


def inject_backward(tree: Tree, value: ArrayLike, *, path: str = "", when: ArrayLike = True) -> Tree:
    """Returns a tree unchanged, and in the backward pass sets the first element of one leaf's cotangent to a value.

    Call it in the loss function, on parameters or activations. The fault then passes through the rest of the backward
    pass, the unscaling and the check, as a real overflow does. A ReLU or a maximum before this point may remove the
    fault: where it is not active, its derivative sets the cotangent to zero.

    Args:
      tree: pytree of parameters or activations that the loss depends on.
      value: a scalar such as `jnp.inf` or `jnp.nan`, converted to the leaf's dtype.
      path: the leaf, in the notation of `jax.tree_util.keystr`: `"['dense']['kernel']"` in dictionaries,
        `".layers[0].weight"` in an Equinox model, and `""` if the tree is a single array.
      when: bool[], whether to inject the fault. For a fault in one step, compare a count that advances on skipped
        steps as well, such as the index of the loop: with a gated count every later step would be skipped, too. For a
        fault on one device, compare `jax.lax.axis_index`; devices that hold the same leaf all receive the fault,
        because the cotangent is a sum over them.

    Returns:
      The tree, bit for bit. In reverse mode, the first element of the leaf's cotangent is `value` if `when` is true.

    Raises:
      TypeError: `when` is not a boolean, or the tree contains a Flax NNX object.
      ValueError: there is no floating-point or complex leaf at `path`, or `value` or `when` is not a scalar.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jmpscale import testing
    >>> jax.grad(lambda w: jnp.sum(testing.inject_backward(w, jnp.inf) ** 2))(jnp.ones(3))
    Array([inf,  2.,  2.], dtype=float32)
    """
    check_no_nnx_objects(
        tree, "tree", "Inject into the result of the model: inject_backward(model(x), jnp.inf, when=...)."
    )
    paths = [name for name, leaf in named_leaves(tree) if is_inexact(leaf) and jnp.size(leaf)]
    if not (isinstance(path, str) and path in paths):
        raise ValueError(
            f"path must lead to a floating-point leaf with elements, got {describe(path)}. The paths of this tree "
            f"are {paths[:20]}."
        )
    if getattr(value, "shape", ()) or not jnp.issubdtype(getattr(value, "dtype", type(value)), np.number):
        raise ValueError(f"value must be a scalar such as jnp.inf, got {describe(value)}. Inject one value at a time.")
    flag = check_flag(when, "when")

    changed = [_fault_in_cotangent(leaf, value, flag) if name == path else leaf for name, leaf in named_leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), changed)


def _set_first(leaf: jax.Array, value: ArrayLike, flag: jax.Array) -> jax.Array:
    first = (jnp.arange(jnp.size(leaf)) == 0).reshape(jnp.shape(leaf))
    return jnp.where(first & flag, jnp.asarray(value, jnp.result_type(leaf)), leaf)


def _fault_in_cotangent(leaf: jax.Array, value: ArrayLike, flag: jax.Array) -> jax.Array:
    # The cotangent of a value that devices share is a sum over them: a fault on one device is a fault on all.
    if axes := varying_axes(flag) - varying_axes(leaf):
        flag = jax.lax.pmax(flag.astype(np.int32), tuple(sorted(axes))).astype(bool)
    identity: Any = jax.custom_vjp(lambda leaf, value, flag: map_like(leaf, flag))
    identity.defvjp(
        lambda leaf, value, flag: (map_like(leaf, flag), (value, flag)),
        lambda fault, cotangent: (_set_first(cotangent, *fault), None, None),
    )
    return identity(leaf, value, flag)


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
    leaves = named_leaves(tree)
    for path, leaf in leaves:
        if not is_array(leaf):
            raise TypeError(f"tree{path} must be an array, got {type_name(leaf)}. Pass the result of a step.")
    on_devices = [(path, leaf) for path, leaf in leaves if isinstance(leaf, jax.Array)]  # NumPy arrays have no copies
    by_rows = all(_has_one_row_per_device(leaf) for _, leaf in on_devices)
    for path, leaf in on_devices:
        shards: dict[str, tuple[Any, object]] = {}  # the first shard of each part, and its bits
        for shard in leaf.addressable_shards:
            bits = bit_pattern(shard.data)
            other, expected = shards.setdefault("" if by_rows else str(shard.index), (shard, bits))
            if bits != expected:
                raise AssertionError(
                    f"tree{path} differs between devices: {truncate(other.data, 200)} on {other.device}, "
                    f"{truncate(shard.data, 200)} on {shard.device}. Each device has its own gradients or "
                    "has decided independently: average the gradients with jax.lax.pmean, and pass axis_name to "
                    "all_finite, unscale_and_check, update or with_loss_scaling."
                )
        if jax.process_count() > 1:
            _assert_equal_on_processes(path, {part: bits for part, (_, bits) in shards.items()})


def _assert_equal_on_processes(path: str, bits: dict[str, Any]) -> None:
    sums = [[zlib.crc32(part.encode()), zlib.crc32(value[-1])] for part, value in bits.items()]
    gathered = np.reshape(multihost_utils.process_allgather(np.array(sums, np.uint32)), (-1, 2))
    if len(np.unique(gathered, axis=0)) > len(np.unique(gathered[:, 0])):
        raise AssertionError(f"tree{path} differs between processes.")


def _has_one_row_per_device(x: jax.Array) -> bool:
    return x.shape[:1] == (len(x.global_shards),) and x.sharding.shard_shape(x.shape)[0] == 1
