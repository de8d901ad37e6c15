"""Compiles the programs of a diagnosis, which run a few times: fast, and without changes of precision."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from jmpscale._base.jaxpr import equations


def compile_lazily(fun: Callable[..., Any], jaxpr: core.Jaxpr | None = None) -> Callable[..., Any]:
    """Returns a compiled function, for whose options the loops of a jaxpr count."""
    # On a CPU, compiling takes most of the time. Loops, which run many times, are five times as fast with level 1.
    has_loops = jaxpr is not None and any(x.eqn.primitive.name in ("scan", "while") for x in equations(jaxpr))
    fast = {"xla_backend_optimization_level": int(has_loops)} if jax.default_backend() == "cpu" else {}
    return jax.jit(fun, compiler_options=fast | {"xla_allow_excess_precision": False})
