"""Compiles the programs of a diagnosis, which run a few times: without changes of precision, and fast."""

import time
from collections.abc import Callable
from typing import Any

import jax


def compiled(fun: Callable[..., Any], *, optimize: bool = False) -> Callable[..., Any]:
    """Returns a compiled function; on a CPU, optimizations can take most of the time of compiling."""
    levels = {"xla_backend_optimization_level": 2 if optimize else 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(fun, compiler_options={"xla_allow_excess_precision": False} | levels)


def run_twice(run: Callable[[], Any]) -> tuple[Any, bool]:
    """Returns the results of a step, and whether 30 runs of it take longer than the first one, which compiles it.

    The runs of a diagnosis then take longer than the optimization of its programs.
    """
    start = time.perf_counter()
    jax.block_until_ready(run())
    compiled_at = time.perf_counter()
    results = jax.block_until_ready(run())
    return results, 30 * (time.perf_counter() - compiled_at) > compiled_at - start
