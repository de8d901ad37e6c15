"""The parts of JAX that differ between its versions."""

from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmpscale._base.memory import beside, is_on_host

REF = getattr(jax, "Ref", ())  # JAX before 0.8 has no public references


def _find(name: str) -> Any:
    """Returns a function that JAX has moved from one module to another."""
    for module in (jax.extend.core, jax.core):
        if hasattr(module, name):
            return getattr(module, name)
    raise unknown_jax(name)


def unknown_jax(name: str) -> ImportError:
    """Returns an error for a version of JAX in which this package would silently be wrong."""
    return ImportError(
        f"jmpscale does not support JAX {jax.__version__}, which has no {name}. Install a newer jmpscale, or an "
        "older JAX."
    )


axis_names_in_scope = _find("unsafe_get_axis_names_DO_NOT_USE")


def is_compiling() -> bool:
    """Tests whether JAX is tracing a program to compile it, as in `jax.jit` and `jax.lax.scan`, not in `jax.vmap`.

    Unlike a test of whether a new array is traced, it does not start JAX's backend. Only warnings depend on the result,
    so it is False, and no warning is given, if this version of JAX has no such function.
    """
    try:
        test = _find("unsafe_am_i_under_a_jit_DO_NOT_USE")
    except ImportError:
        return False
    return test()


# The classes of values that JAX differentiates. Inside a function that JAX compiles, values have another class.
_DIFFERENTIATED = {"LinearizeTracer", "JVPTracer"}


def is_differentiated(x: object) -> bool:
    """Tests whether JAX differentiates a value where it is used, in reverse or in forward mode.

    Only warnings depend on the result, so it is False, and no warning is given, if it is not certain.
    """
    return type(x).__name__ in _DIFFERENTIATED


def varying_axes(x: ArrayLike | jax.ShapeDtypeStruct) -> frozenset[str]:
    """Returns the mesh axes over which JAX's types show that `x` may differ between devices."""
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    if hasattr(aval, "vma"):  # JAX before 0.10
        return frozenset(aval.vma)
    raise unknown_jax("manual_axis_type of an array's type")


def as_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns an array whose type says that it may differ between devices along mesh axes of a `jax.shard_map`."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    return vars(jax.lax)["pvary"](x, missing)  # JAX before 0.8


def axes_of_shard_map(eqn: jax.extend.core.JaxprEqn) -> tuple[str, ...]:
    """Returns the mesh axes over which an equation of `jax.shard_map` maps a program."""
    names = ("newly_manual_axes", "manual_axes")  # the second one in older versions
    return tuple(next(eqn.params[name] for name in names if name in eqn.params))


def unreduced_axes(x: ArrayLike) -> frozenset[str]:
    """Returns the mesh axes over which the shards of an array must still be summed; none in JAX before 0.10."""
    # Inside a shard_map the type has these axes; under jit with Explicit axes the sharding has them.
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return frozenset(getattr(manual, "unreduced", ())) | frozenset(getattr(spec, "unreduced", ()))


def in_current_mesh(x: Any) -> Any:
    """Returns an array that operations in the current context accept, replicated if it is from another mesh.

    The bodies of `jax.sharding.auto_axes` and `explicit_axes` are in a mesh of their own, whose axes are of other
    types.
    """
    own, current = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    if own.empty or current.empty or own == current or (own.are_all_axes_auto and current.are_all_axes_auto):
        return x
    if hasattr(jax.sharding, "use_abstract_mesh"):
        return jax.sharding.reshard(x, jax.P())
    # JAX before 0.7.2 moves an array to another mesh only where such a body ends.
    auto_axes, explicit_axes = jax.sharding.auto_axes, jax.sharding.explicit_axes
    body: Any = (
        auto_axes(lambda: x, out_sharding=jax.P()) if own.auto_axes else explicit_axes(lambda: x, in_sharding=())
    )
    return body()


def full_like(like: jax.Array | jax.ShapeDtypeStruct, value: ArrayLike) -> jax.Array:
    """Returns an array with the type of `like`, which is an array or a result of `jax.eval_shape`."""
    if isinstance(like, jax.core.Tracer) and like.ndim and is_on_host(like):
        return jnp.asarray(beside(like, value))
    manual = getattr(like, "manual_axis_type", None) if isinstance(like, jax.ShapeDtypeStruct) else None
    if manual is None or not manual.varying:
        return jax.lax.full_like(like, value)
    # eval_shape drops the mesh, so JAX 0.10 and newer raise where a shard_map leaves other axes to the compiler.
    return jax.lax.pcast(jnp.full(like.shape, value, like.dtype), tuple(manual.varying), to="varying")


def use_variadic_reduce() -> bool:
    """Tests whether a program lowered for CPU should use variadic reductions.

    XLA on CPU vectorizes only variadic reductions, but over several devices its partitioner gathers their operands.
    """
    try:
        return jax.device_count("cpu") == 1
    except RuntimeError:  # JAX was configured without the CPU backend, so nothing is lowered for it
        return False
