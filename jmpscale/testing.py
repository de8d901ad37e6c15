"""Checks for the tests and the debugging of training programs that use jmpscale. They read values, on the host."""

import zlib
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jmpscale._finite import varying_axes
from jmpscale._scaling import require_flag
from jmpscale._state import shortened, shown
from jmpscale._tree import is_inexact, named_leaves


def inject(tree: Any, value: float, *, path: str, when: Any = True) -> Any:
    """Plants a bad value in one leaf of a tree: the fault that a training program has to survive.

    Works inside `jax.jit` and `jax.shard_map`; to hit one step or one device, make `when` depend on a step count or on
    `jax.lax.axis_index`. Count with something that moves on when a step is skipped, such as the loop's own counter.
    `when=state.step == 3` with a `step` that the gate holds back plants the fault at every step from then on: step 3
    is skipped, so the count stays at 3, and the run skips for ever.

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
    return _at(path, tree, _plant, value, when)


def inject_backward(tree: Any, value: float, *, path: str, when: Any = True) -> Any:
    """Returns a tree as it is, and plants a bad value in the cotangent of one leaf: an overflow where it happens.

    Call it inside the loss function, on parameters or on activations. The fault then goes through all that a real one
    goes through: the rest of the backward pass, the check, and whatever else stands between the gradients and the
    step. `value_and_grad` hands back gradients and flag together, which leaves no place for `inject` in between.

    Args:
      tree: pytree that the loss depends on, of parameters or activations.
      value: what to plant, as in `inject`.
      path: which leaf, as in `inject`; `""` if the tree is one array.
      when: bool[], whether to plant it at all; `inject` names a trap. If it differs between devices that hold the
        same leaf, all of them see the fault, as they do one in any term of a sum over devices.

    Returns:
      The tree, bit for bit. The first element of that leaf's cotangent is `value` where `when` is true; reverse mode
      only.

    Raises:
      TypeError: as `inject`.
      ValueError: as `inject`.

    >>> jax.grad(lambda w: jnp.sum(inject_backward(w, jnp.inf, path="") ** 2))(jnp.ones(3))
    Array([inf,  2.,  2.], dtype=float32)
    """
    return _at(path, tree, cast(Any, _spoilt_on_the_way_back), value, when)


def _at(path: str, tree: Any, change: Any, value: float, when: Any) -> Any:
    """Returns the tree with `change(leaf, value, when)` in the place of the leaf at `path`."""
    there = [name for name, leaf in named_leaves(tree) if is_inexact(leaf) and jnp.size(leaf)]
    if not (isinstance(cast(object, path), str) and path in there):
        raise ValueError(
            f"path must be that of an inexact leaf with elements, got {shown(path)}. There are: {there[:20]}."
        )
    if getattr(value, "shape", ()) or not jnp.issubdtype(getattr(value, "dtype", type(value)), np.number):
        raise ValueError(f"value must be a scalar such as jnp.inf, got {shown(value)}. Plant one value at a time.")

    def visit(at: Any, leaf: Any) -> Any:
        return change(leaf, value, require_flag(when, "when")) if jax.tree_util.keystr(at) == path else leaf

    return jax.tree_util.tree_map_with_path(visit, tree)


def _plant(leaf: Any, value: Any, flag: Any) -> Any:
    first = (jnp.arange(jnp.size(leaf)) == 0).reshape(jnp.shape(leaf))
    return jnp.where(first & flag, jnp.asarray(value, jnp.result_type(leaf)), leaf)


@jax.custom_vjp
def _spoilt_on_the_way_back(leaf: Any, value: Any, flag: Any) -> Any:
    return leaf


def _forward(leaf: Any, value: Any, flag: Any) -> Any:
    # The cotangent of a value that devices share is a sum over them, spoilt for all if one term is.
    if own := varying_axes(flag) - varying_axes(leaf):
        flag = jax.lax.pmax(flag.astype(np.int32), tuple(sorted(own))).astype(bool)
    return leaf, (value, flag)


def _backward(fault: Any, cotangent: Any) -> Any:
    return _plant(cotangent, *fault), None, None


_spoilt_on_the_way_back.defvjp(_forward, _backward)


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
    for path in old:
        if _bits(old[path]) != _bits(new[path]):
            was, now = shortened(repr(old[path]), 200), shortened(repr(new[path]), 200)
            raise AssertionError(f"the step changed state{path}: {was} before, {now} after. Gate it in apply_if.")


def _bits(leaf: Any) -> Any:
    """Returns something that is equal for two leaves only if they are equal bit for bit."""
    if isinstance(cast(object, leaf), (jax.Array, np.ndarray, np.generic)):
        value = np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        return value.shape, leaf.dtype, value.tobytes()
    # NaN is not equal to itself, while 1, 1.0 and True are equal, and so are the two zeros; their texts tell.
    return (type(leaf), repr(leaf)) if isinstance(leaf, (int, float, complex)) else leaf


def assert_replicated(tree: Any) -> None:
    """Raises unless devices that hold the same part of an array hold the same bits.

    A missing `axis_name` under `jax.pmap`, or under `jax.shard_map` with `check_vma=False`, only gives a warning: the
    array calls itself replicated while each device has gone its own way. Call it on the scaler after a step
    that overflowed on one device, or on the whole training state. With several processes all of them have to call it.

    Args:
      tree: a scaler, or any pytree of arrays. Of an array that is sharded along some axes of a mesh and replicated
        along others, the copies of each shard are compared. Where every array has one row for each device, as
        `jax.pmap` returns them, it is the rows.

    Raises:
      AssertionError: two devices differ; names the leaf, the devices and the values.
      TypeError: a leaf is no `jax.Array`.

    >>> import jmpscale
    >>> assert_replicated(jmpscale.dynamic())
    """
    leaves = list(named_leaves(tree))
    by_rows = all(isinstance(leaf, jax.Array) and _has_a_row_for_each_device(leaf) for _, leaf in leaves)
    for path, leaf in leaves:
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"tree{path} must be a jax.Array, got {type(leaf).__name__}. Pass what a step returned.")
        held: dict[str, tuple[Any, Any]] = {}
        for shard in leaf.addressable_shards:
            bits = _bits(shard.data)
            other, first = held.setdefault("" if by_rows else str(shard.index), (shard, bits))
            if bits != first:
                raise AssertionError(
                    f"tree{path} differs between devices: {shortened(other.data, 200)} on {other.device}, "
                    f"{shortened(shard.data, 200)} on {shard.device}. Each device has decided for itself; give "
                    "axis_name to unscale_and_check, update or with_loss_scaling."
                )
        if jax.process_count() > 1:
            sums = [[zlib.crc32(x) for x in (part.encode(), bits[-1])] for part, (_, bits) in held.items()]
            everywhere: Any = multihost_utils.process_allgather(np.array(sums, np.uint32))
            pairs: set[Any] = set(map(tuple, everywhere.reshape(-1, 2).tolist()))
            if len(pairs) > len(dict(pairs)):
                raise AssertionError(f"tree{path} differs between processes.")


def _has_a_row_for_each_device(x: jax.Array) -> bool:
    return (len({str(shard.index[:1]) for shard in x.global_shards}),) == (len(x.global_shards),) == x.shape[:1]
