"""Compiles programs whose precision is measured."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def compiled(fun: Callable[..., Any], *, optimize: bool = False) -> Callable[..., Any]:
    """Compiles a function without changes of precision; on a CPU, optimizing it would take longer than a few runs."""
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
        options |= {"xla_backend_optimization_level": 2 if optimize else 0} | _older_compiler()
    return jax.jit(fun, compiler_options=options)


def compiled_when_called(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function as `compiled` does, when it is first called: the options depend on the backend of JAX."""
    compile_once = functools.cache(lambda: compiled(fun))

    @functools.wraps(fun)
    def call(*args: Any) -> Any:
        return compile_once()(*args)

    return call


@functools.cache
def _older_compiler() -> dict[str, bool]:
    """Returns the option for the older one of XLA's compilers of element-wise operations for CPUs, where it has two.

    Of the time of compiling 12 transformer layers, it saves a fifth with optimization and a third without.
    """
    option = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda x: x, compiler_options=option).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # XLA has removed it
        return {}
    return option
