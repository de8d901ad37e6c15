"""Mapped axes: which of them a value varies over, and over which of them devices combine their decisions."""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from jmpscale._base.compat import axis_names_in_scope, varying_axes
from jmpscale._base.text import describe
from jmpscale._base.tree import is_traced

AxisName = Hashable | Sequence[Hashable] | None


def as_axes(axis_name: AxisName) -> tuple[Hashable, ...]:
    if axis_name is None:
        return ()
    if isinstance(axis_name, (set, frozenset)):
        return tuple(sorted(axis_name, key=str))  # in one order on all processes, which hash strings differently
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def manual_axes(typed: bool) -> tuple[str, ...]:
    """Returns the manual mesh axes around this call along which JAX's types show, or do not show, variation."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in axes if bool(varying_axes(jax.lax.axis_index(name))) == typed)


def untyped_axes() -> set[Hashable]:
    """Returns the mapped axes around this call along which JAX's types do not show variation."""
    return set(axis_names_in_scope()) - set(manual_axes(typed=True))


def map_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `x`, mapped by `jax.vmap` if the scalar `like` is; compiles to nothing.

    If the residuals of a custom derivative rule are mapped and its operand is not, the rule receives the sum of the
    cotangents over the batch, and returns it once for each element of the batch.
    """
    return jax.lax.select(like == like, x, x) if is_traced(like) else x


def axes_to_reduce(x: jax.Array, axis_name: AxisName) -> tuple[Hashable, ...]:
    """Returns the mapped axes over which a value must be combined to be equal on all devices."""
    varying = varying_axes(x)
    if axis_name is None:
        return tuple(sorted(varying))
    names = as_axes(axis_name)
    if unknown := [name for name in names if name not in axis_names_in_scope()]:
        raise ValueError(
            f"axis_name {describe(unknown[0])} is not the name of a mapped axis here. Use an axis name of the "
            "jax.shard_map mesh, jax.pmap or jax.vmap around this call; under plain jax.jit omit axis_name."
        )
    # Along a typed axis JAX's types show whether the value varies, and JAX may raise if a value that does not vary is
    # reduced. Along an untyped axis the types show nothing, so the value is always reduced.
    reduced = varying | untyped_axes()
    return tuple(name for name in names if name in reduced)


def all_reduce_and(*flags: jax.Array, axis_name: AxisName = None) -> tuple[jax.Array, ...]:
    """Combines each flag, bool[], over devices by a logical AND, in at most one collective for all flags."""
    axes = [axes_to_reduce(flag, axis_name) for flag in flags]
    varying = [flag for flag, names in zip(flags, axes, strict=True) if names]
    if not varying:
        return flags
    union = tuple(dict.fromkeys(name for names in axes for name in names))
    # As integers, because the libraries that carry collectives (NCCL, Gloo, MPI) have no booleans.
    packed = (varying[0] if len(varying) == 1 else jnp.stack(varying)).astype(jnp.int32)
    reduced = iter(jnp.atleast_1d(jax.lax.pmin(packed, union).astype(bool)))
    return tuple(next(reduced) if names else flag for flag, names in zip(flags, axes, strict=True))
