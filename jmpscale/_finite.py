"""Is this tree finite, on every device? The answer is exact, and the same on all devices that take part.

Knows leaves, the axes over which values differ between devices, and collectives; knows no scaler. The answer never
comes from a maximum (on CPU, XLA's reduce-max drops NaN from arrays of 4,096 elements on) nor from a sum (finite
values may add up to infinity), but from a test of each element.
"""

import warnings
from collections.abc import Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._state import shown
from jmpscale._tree import is_inexact, named_leaves, partition

AxisName = str | tuple[str, ...] | Hashable | None

_LARGE = 2**12  # elements, from which on a reduction that runs faster is worth its longer compilation


def all_finite(tree: Any, *, axis_name: AxisName = None) -> jax.Array:
    """Tells whether every element of every leaf is neither infinite nor NaN.

    Args:
      tree: any pytree. Leaves of other than inexact dtypes (integers, booleans, PRNG keys, float0, Python objects)
        are finite, as are empty leaves and empty trees.
      axis_name: the mapped axis, or a tuple of them, over whose devices to agree. Not needed under `jax.jit`, nor
        under `jax.shard_map` with `check_vma=True`, where the types tell over which axes the answer varies. Needed
        under `jax.pmap`, `jax.vmap(axis_name=...)` and `check_vma=False`. `()` asks for the answer of this device
        alone, which is right there too if all devices hold the same values, as gradients do after a `psum`.

    Returns:
      bool[], the same on all devices.

    Raises:
      TypeError: a leaf is a partial sum that has not been reduced over its devices yet.
      ValueError: `axis_name` names an axis that is not mapped here.

    Warns:
      UserWarning: without `axis_name` under `jax.pmap` or `check_vma=False`, where devices could drift apart.

    >>> tree = {"w": jnp.ones((2, 3)), "step": 7}
    >>> bool(all_finite(tree)), bool(all_finite(tree | {"b": jnp.array([0.0, jnp.nan])}))
    (True, False)
    """
    refuse_partial_sums(tree)
    warn_if_alone(axis_name)
    leaves, _ = partition(tree, is_inexact)
    return agree(cast(jax.Array, _finite_here(leaves)), axis_name=axis_name)[0]


@jax.jit
def _finite_here(leaves: list[Any]) -> jax.Array:
    if not leaves:
        return jnp.array(True)
    return cast(
        Any, jax.lax.platform_dependent([jnp.asarray(x) for x in leaves], cpu=_finite_on_cpu, default=_finite_elsewhere)
    )


def _finite_elsewhere(leaves: list[jax.Array]) -> jax.Array:
    """Counts what is not finite: a sum of zeros and ones is zero only if all of them are.

    XLA divides plain sums over devices, and on TPU merges them with those of a global norm, unlike `all(isfinite)`.
    """
    zero, one = np.float32(0), np.float32(1)
    return jnp.stack([jnp.where(jnp.isfinite(x), zero, one).sum() for x in leaves]).sum() == 0


def _finite_on_cpu(leaves: list[jax.Array]) -> jax.Array:
    """Combines the flags of all leaves, in a way that many leaves compile as fast as they run.

    Of one long conjunction XLA on CPU makes a chain of scalars, which it repeats in each kernel that uses the answer,
    and compiles in more than linear time. It leaves the place of a minimum as it is.
    """
    flags = [_is_finite(x) for x in leaves]
    some = jnp.stack([jnp.stack(flags[i : i + 8]).all() for i in range(0, len(flags), 8)])
    return some[jnp.argmin(some)]


def _is_finite(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return _is_finite(x.real) & _is_finite(x.imag)
    size = cast(object, x.size)  # no int where a shape is symbolic
    if not (isinstance(size, int) and size >= _LARGE and joint_reductions_pay()):
        return jnp.isfinite(x).all()
    wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x  # some float8 types have no infinity
    sides = [side.astype(np.int32) for side in (wide < np.inf, wide > -np.inf)]  # NaN is on neither
    one = np.ones((), np.int32)

    def both(a: Any, b: Any) -> Any:
        return a[0] & b[0], a[1] & b[1]

    below, above = jax.lax.reduce(tuple(sides), (one, one), both, tuple(range(x.ndim)))
    return (below & above).astype(bool)


def joint_reductions_pay() -> bool:
    """Tells whether a program that is lowered for CPU should reduce several values of each element together.

    There XLA does it in one vectorised pass, where a reduction of a single value takes two to fifty times as long. Over
    several devices, though, its partitioner makes an all-gather of each operand of a joint reduction.
    """
    try:
        return jax.device_count("cpu") == 1
    except RuntimeError:  # JAX was told to leave the CPU out, so nothing will be lowered for it here
        return False


def agree(*flags: jax.Array, axis_name: AxisName = None) -> tuple[jax.Array, ...]:
    """Combines each flag with those of the other devices by a logical and, all of them in at most one collective.

    Args:
      *flags: bool[] each.
      axis_name: as in `all_finite`.

    Returns:
      The flags, bool[] each, the same on all devices along the axes.
    """
    axes = [axes_to_reduce(flag, axis_name) for flag in flags]
    varying = [flag for flag, names in zip(flags, axes, strict=True) if names]
    if not varying:
        return flags
    union = tuple(dict.fromkeys(name for names in axes for name in names))
    # As integers, since the libraries that carry collectives (NCCL, Gloo, MPI) have no booleans.
    packed = (varying[0] if len(varying) == 1 else jnp.stack(varying)).astype(jnp.int32)
    agreed = iter(jnp.atleast_1d(jax.lax.pmin(packed, union).astype(bool)))
    return tuple(next(agreed) if names else flag for flag, names in zip(flags, axes, strict=True))


def axes_to_reduce(flags: jax.Array, axis_name: AxisName) -> tuple[Any, ...]:
    """Returns the mapped axes over which values must be combined for all devices to hold the same."""
    varying = varying_axes(flags)
    if axis_name is None:
        return tuple(sorted(varying))
    names: tuple[Any, ...] = tuple(cast(Any, axis_name)) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    # Along a typed axis the device's own index varies. A value that does not is equal on all devices already, and
    # JAX may refuse to reduce it. Along an untyped axis nothing is known to vary, so only a collective can tell.
    return tuple(name for name in names if not varying_axes(_axis_index(name)) or name in varying)


def _axis_index(name: Any) -> jax.Array:
    try:
        return jax.lax.axis_index(name)
    except (NameError, TypeError) as error:
        raise ValueError(
            f"axis_name {shown(name)} is not the name of a mapped axis here. Use a name given to jax.shard_map's mesh, "
            "jax.pmap or jax.vmap around this call; under plain jax.jit leave axis_name out."
        ) from error


def warn_if_alone(axis_name: AxisName) -> None:
    """Warns where each device is going to decide for itself though nobody has said that it should."""
    if axis_name is None:
        manual: tuple[str, ...] = jax.sharding.get_abstract_mesh().manual_axes
        if untyped := tuple(name for name in manual if not varying_axes(jax.lax.axis_index(name))):
            warnings.warn(
                f"each device decides for itself whether its step was finite: along the mapped axes {untyped} values "
                "have no types that tell what differs between devices (jax.pmap, or check_vma=False). Pass "
                f"axis_name={untyped!r} to agree, or axis_name=() if all devices hold the same values.",
                stacklevel=3,
            )


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which JAX's types say that `x` may differ between devices."""
    # JAX 0.10 replaced the set `aval.vma` with `aval.manual_axis_type`.
    aval = jax.typeof(x)
    manual: Any = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if manual is None else manual.varying)


def _unreduced_axes(leaf: Any) -> frozenset[str]:
    if not is_inexact(leaf):
        return frozenset()
    # Inside a shard_map the type says so, under jit with explicit axes the sharding; JAX before 0.10 has neither.
    aval = jax.typeof(leaf)
    manual: Any = getattr(aval, "manual_axis_type", None)
    spec: Any = getattr(getattr(aval, "sharding", None), "spec", None)
    return frozenset(getattr(manual, "unreduced", ())) | frozenset(getattr(spec, "unreduced", ()))


def refuse_partial_sums(tree: Any) -> None:
    """Raises if the shards of a leaf have yet to be added; JAX would too, but not say which leaf, or what to do."""
    if not any(_unreduced_axes(leaf) for leaf in jax.tree.leaves(tree)):
        return  # the paths of a large tree take longer to spell than all else here
    path, axes = next((path, axes) for path, leaf in named_leaves(tree) if (axes := _unreduced_axes(leaf)))
    raise TypeError(
        f"the leaf at tree{path} is a partial sum over the mesh axes {sorted(axes)}: its shards have yet to be added, "
        "so whether it is finite is not known. Reduce it first, with jax.lax.psum under jax.shard_map or "
        "jax.sharding.reshard under jax.jit."
    )
