"""Compiles programs whose precision is measured."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.core
from jax.extend import core

from jmpscale._programs.jaxpr import held_jaxprs

# A loop with this number of iterations takes longer to run several times than to optimize, and so may a loop whose
# number of iterations is unknown. `benchmarks.diagnosis` has a recurrence of 2,000 steps, for which optimization saves
# time, and a scan over 24 transformer layers, for which it does not.
_LONG_LOOP = 100
# Where XLA has two compilers for element-wise operations, the older one is faster. Code generation in several threads
# takes more time for a small program than it saves.
_FAST = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


def compiled(fun: Callable[..., Any], *, optimize: bool = False) -> Callable[..., Any]:
    """Compiles a function without changes of precision, each call of which waits for its results.

    On a CPU, optimization takes longer than a few runs, unless the function has a long loop. If several programs are
    queued on simulated devices, XLA may run one on some devices and another on others, which then wait for each other.
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
        options |= {"xla_backend_optimization_level": 2 if optimize else 0} | _fast_compilation()
    run = jax.jit(fun, compiler_options=options)
    return lambda *args: jax.block_until_ready(run(*args))


def compiled_for_many_runs(fun: Callable[..., Any], out_shardings: Any) -> Callable[..., Any]:
    """Compiles a function as `compiled`, but with all optimizations of XLA, which pay if it runs some hundred times."""
    run = jax.jit(fun, compiler_options={"xla_allow_excess_precision": False}, out_shardings=out_shardings)
    return lambda *args: jax.block_until_ready(run(*args))


def compiled_when_called(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a small function that runs often, when it is first called: the options depend on the backend of JAX."""
    compile_once = functools.cache(lambda: compiled(fun, optimize=True))

    @functools.wraps(fun)
    def call(*args: Any) -> Any:
        return compile_once()(*args)

    return call


def compiled_jaxpr(jaxpr: core.Jaxpr) -> Callable[..., list[Any]]:
    """Compiles a jaxpr as a function of a list of its constants, and of its inputs."""
    optimize = has_long_loop(jaxpr.eqns)
    return compiled(lambda consts, *inputs: jax.core.eval_jaxpr(jaxpr, consts, *inputs), optimize=optimize)


def has_long_loop(equations: Iterable[core.JaxprEqn], iterations: int = 1) -> bool:
    """Tests whether any of the equations, which run `iterations` times, is or contains a long loop."""
    for eqn in equations:
        count = iterations * eqn.params["length"] if eqn.primitive.name == "scan" else iterations
        if eqn.primitive.name == "while" or count >= _LONG_LOOP:
            return True
        if any(has_long_loop(held.eqns, count) for held in held_jaxprs(eqn)):
            return True
    return False


@functools.cache
def _fast_compilation() -> dict[str, Any]:
    """Returns the options, of those that this version of XLA has, with which it compiles fastest for CPUs."""
    return {name: value for name, value in _FAST.items() if _has_option(name, value)}


def _has_option(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
