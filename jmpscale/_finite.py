"""Tests whether a tree is finite, on all devices.

Each element is tested. A maximum does not suffice, because XLA's maximum on CPU loses NaN in arrays of 4,096 elements
or more, and neither does a sum, because finite values may add up to infinity.

This module handles arrays, mapped axes and collectives; it never reads a scaler.
"""

import inspect
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._state import describe
from jmpscale._tree import PyTree, check_no_refs, flatten_matching, is_inexact, named_leaves

AxisName = Hashable | Sequence[Hashable] | None

# With fewer elements a single-value reduction is as fast as a variadic one on CPU, and compiles faster
# (`python -m benchmarks --only check`).
_MIN_SIZE_FOR_VARIADIC_REDUCE = 2**12

# A warning names the first line of the stack that is not in one of these packages.
_LIBRARIES = {"jmpscale", "jax", "optax", "flax", "equinox", "chex", "contextlib", "functools"}


def all_finite(tree: PyTree, *, axis_name: AxisName = None) -> jax.Array:
    """Tests whether a pytree contains no infinity and no NaN.

    Args:
      tree: any pytree. Only floating-point and complex leaves are tested; integers, booleans, PRNG keys, float0, other
        objects and empty arrays count as finite.
      axis_name: the mapped axis, or a sequence of mapped axes, over which to combine the result. It is needed only
        under `jax.pmap`, `jax.vmap(axis_name=...)` and `check_vma=False`. Under `jax.jit` the result is global, and
        under `jax.shard_map` with `check_vma=True` JAX's types show the axes. Pass `()` to test only the values on this
        device; that suffices if all devices hold the same values, such as gradients after a `psum`.

    Returns:
      bool[], equal on all devices along the axes.

    Raises:
      TypeError: a leaf is a partial sum that has not been reduced over its devices, or a `jax.Ref`.
      ValueError: `axis_name` names an axis that is not mapped here.

    Warns:
      UserWarning: `axis_name` is missing under `jax.pmap` or `check_vma=False`, where devices could diverge.

    >>> tree = {"w": jnp.ones((2, 3)), "step": 7}
    >>> bool(all_finite(tree)), bool(all_finite(tree | {"b": jnp.array([0.0, jnp.nan])}))
    (True, False)
    """
    check_no_refs(tree)
    check_no_partial_sums(tree)
    warn_if_unsynchronized(axis_name)
    return all_reduce_and(all_finite_here(tree), axis_name=axis_name)[0]


def all_finite_here(tree: PyTree) -> jax.Array:
    """Tests whether a tree is finite on this device."""
    leaves, _ = flatten_matching(tree, lambda _, leaf: is_inexact(leaf))
    return _all_leaves_finite(leaves)


@jax.jit
def _all_leaves_finite(leaves: list[Any]) -> jax.Array:
    if not leaves:
        return jnp.array(True)
    arrays = [jnp.asarray(x) for x in leaves]
    return jax.lax.platform_dependent(arrays, cpu=_all_leaves_finite_cpu, default=_all_leaves_finite_default)


def _all_leaves_finite_default(leaves: list[jax.Array]) -> jax.Array:
    """Counts the non-finite values: a sum of zeros and ones is zero if and only if all of them are.

    XLA partitions plain sums over devices and, on TPU, fuses them with the sums of a global norm; it does neither with
    `all(isfinite(x))`. The zeros are negative because XLA on GPUs merges equal constants: positive zeros would be
    merged with the zeros that an embedding's gradient starts from, and written to memory.
    """
    zero, one = np.float32(-0.0), np.float32(1)
    return jnp.stack([jnp.where(jnp.isfinite(x), zero, one).sum() for x in leaves]).sum() == 0


def _all_leaves_finite_cpu(leaves: list[jax.Array]) -> jax.Array:
    """Combines the flags of all leaves so that thousands of leaves compile quickly.

    XLA on CPU fuses a long `and` of scalars into each of its consumers, with a compile time that grows faster than
    linearly. Reducing in groups of 8 and reading the result at the argmin prevents this fusion.
    """
    flags = [_is_finite_cpu(x) for x in leaves]
    groups = jnp.stack([jnp.stack(flags[i : i + 8]).all() for i in range(0, len(flags), 8)])
    return groups[jnp.argmin(groups)]


def _is_finite_cpu(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return _is_finite_cpu(x.real) & _is_finite_cpu(x.imag)
    size: object = x.size  # not an int if a shape is symbolic
    if not (isinstance(size, int) and size >= _MIN_SIZE_FOR_VARIADIC_REDUCE and use_variadic_reduce()):
        return jnp.isfinite(x).all()
    x = x.astype(np.float32) if x.dtype.itemsize < 4 else x  # some float8 types have no infinity
    below, above = (x < np.inf).astype(np.int32), (x > -np.inf).astype(np.int32)  # NaN is neither

    def both(a: Any, b: Any) -> Any:
        return a[0] & b[0], a[1] & b[1]

    one = np.ones((), np.int32)
    below, above = jax.lax.reduce((below, above), (one, one), both, tuple(range(x.ndim)))
    return (below & above).astype(bool)


def use_variadic_reduce() -> bool:
    """Tests whether a program lowered for CPU should use variadic reductions.

    XLA on CPU vectorizes a variadic reduction, while a reduction of a single value takes two to fifty times as long.
    Over several devices, however, its partitioner gathers each operand of a variadic reduction.
    """
    try:
        return jax.device_count("cpu") == 1
    except RuntimeError:  # JAX was configured without the CPU backend, so nothing is lowered for it
        return False


def all_reduce_and(*flags: jax.Array, axis_name: AxisName = None) -> tuple[jax.Array, ...]:
    """Combines each flag over devices by a logical AND, in at most one collective for all flags.

    Args:
      *flags: bool[] each.
      axis_name: as in `all_finite`.

    Returns:
      The flags, bool[] each, equal on all devices along the axes.
    """
    axes = [axes_to_reduce(flag, axis_name) for flag in flags]
    varying = [flag for flag, names in zip(flags, axes, strict=True) if names]
    if not varying:
        return flags
    union = tuple(dict.fromkeys(name for names in axes for name in names))
    # As integers, because the libraries that carry collectives (NCCL, Gloo, MPI) have no booleans.
    packed = (varying[0] if len(varying) == 1 else jnp.stack(varying)).astype(jnp.int32)
    reduced = iter(jnp.atleast_1d(jax.lax.pmin(packed, union).astype(bool)))
    return tuple(next(reduced) if names else flag for flag, names in zip(flags, axes, strict=True))


def axes_to_reduce(x: jax.Array, axis_name: AxisName) -> tuple[Any, ...]:
    """Returns the mapped axes over which a value must be combined to be equal on all devices."""
    varying = varying_axes(x)
    if axis_name is None:
        return tuple(sorted(varying))
    # Along a typed axis JAX's types show whether the value varies, and JAX may raise if a value that does not vary is
    # reduced. Along an untyped axis the types show nothing, so the value is always reduced.
    return tuple(name for name in as_axes(axis_name) if not varying_axes(_axis_index(name)) or name in varying)


def as_axes(axis_name: AxisName) -> tuple[Any, ...]:
    """Returns the names of axes as a tuple."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, (tuple, list, set, frozenset)) else (axis_name,)


def _axis_index(name: Any) -> jax.Array:
    try:
        return jax.lax.axis_index(name)
    except (NameError, TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"axis_name {describe(name)} is not the name of a mapped axis here. Use an axis name of the jax.shard_map "
            "mesh, jax.pmap or jax.vmap around this call; under plain jax.jit omit axis_name."
        ) from error


def warn_if_unsynchronized(axis_name: AxisName, other_axes: AxisName = ()) -> None:
    """Warns if devices would decide independently although the user has not requested it."""
    if axis_name is not None:
        return
    if missing := tuple(name for name in manual_axes(typed=False) if name not in as_axes(other_axes)):
        warn_user(
            f"each device decides independently whether its step was finite: along the mapped axes {missing} JAX's "
            "types do not show what differs between devices (jax.pmap, or check_vma=False). Pass "
            f"axis_name={missing!r} to combine the decisions, or axis_name=() if all devices hold the same values."
        )


def manual_axes(typed: bool) -> tuple[str, ...]:
    """Returns the manual mesh axes around this call along which JAX's types show, or do not show, variation."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in axes if bool(varying_axes(jax.lax.axis_index(name))) == typed)


def warn_user(message: str) -> None:
    """Warns at the innermost line of the stack that belongs to the user."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which JAX's types show that `x` may differ between devices."""
    # JAX 0.10 replaced the set `aval.vma` by `aval.manual_axis_type`.
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if manual is None else manual.varying)


def _unreduced_axes(leaf: Any) -> frozenset[str]:
    if not is_inexact(leaf):
        return frozenset()
    # Inside a shard_map the type has these axes; under jit with Explicit axes the sharding has them. JAX before 0.10
    # has neither attribute.
    aval = jax.typeof(leaf)
    manual = getattr(aval, "manual_axis_type", None)
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return frozenset(getattr(manual, "unreduced", ())) | frozenset(getattr(spec, "unreduced", ()))


def check_no_partial_sums(tree: PyTree) -> None:
    """Raises, naming the leaf, if the shards of a leaf have not been summed yet."""
    if not any(_unreduced_axes(leaf) for leaf in jax.tree.leaves(tree)):
        return  # finding the paths of a large tree takes longer than the check
    path, axes = next((path, axes) for path, leaf in named_leaves(tree) if (axes := _unreduced_axes(leaf)))
    raise TypeError(
        f"the leaf at tree{path} is a partial sum over the mesh axes {sorted(axes)}: its shards have not been summed, "
        "so it is not known whether it is finite. Reduce it first, with jax.lax.psum under jax.shard_map or "
        "jax.sharding.reshard under jax.jit."
    )
