"""Compiles the programs of a diagnosis, which run a few times: without changes of precision, and fast."""

import time
from collections.abc import Callable
from typing import Any

import jax


def compiled(fun: Callable[..., Any], *, optimize: bool = False) -> Callable[..., Any]:
    """Returns a compiled function; on a CPU, optimizations can take most of the time of compiling."""
    levels = {"xla_backend_optimization_level": 2 if optimize else 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(fun, compiler_options={"xla_allow_excess_precision": False} | levels)


def is_slow(run: Callable[[], Any]) -> bool:
    """Tests whether 30 runs of a step take longer than the first run, which compiles it.

    The runs of a diagnosis then take longer than the optimization of its programs.
    """
    first, later = _seconds(run), _seconds(run)
    return 30 * later > first


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
