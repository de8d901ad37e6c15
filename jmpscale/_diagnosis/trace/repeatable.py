"""Makes a traced training step a program that can be changed, and run many times."""

import numpy as np
from jax.extend import core

from jmpscale._autocast.rules import with_conversions
from jmpscale._programs.jaxpr import equations
from jmpscale._programs.rewrite import rewrite
from jmpscale._programs.source import SCALING, user_lines

_CALLBACKS = {"debug_callback", "debug_print", "io_callback"}
_NEW_REFS = {"array_ref", "empty_ref", "new_ref"}


def repeatable(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns a program that can be changed and run many times."""
    _check_can_repeat(jaxpr)
    jaxpr = rewrite(jaxpr, with_conversions, {})  # a mode applies to each operation with a half result
    return rewrite(jaxpr, _without_effects, {})


def _check_can_repeat(jaxpr: core.Jaxpr) -> None:
    """Raises if a step cannot be changed and run many times. A kernel may create references: it runs as written."""
    for eqn, caller in equations(jaxpr):
        name = eqn.primitive.name
        if name in _NEW_REFS and not caller.holder:
            raise TypeError(
                f"fun must not create a jax.Ref, got {name} at {caller.line_of(eqn)}. diagnose replaces the operations "
                "of the function, which does not work with references. Compute new values instead, and carry them "
                "through loops."
            )
        if name == "io_callback" and eqn.outvars:
            raise TypeError(
                f"fun must not read values with {name}, as it does at {caller.line_of(eqn)}: diagnose runs fun many "
                "times. Pass the values as arguments, or read them with jax.pure_callback."
            )


def _without_effects(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Removes callbacks without results, such as `jax.debug.print`: a step runs many times.

    The warning of `scaled_backward` is a callback, too, and is silent: scales that overflow are part of the search.
    """
    if eqn.primitive.name == "pure_callback" and not eqn.invars and SCALING in user_lines(eqn):
        return [eqn.replace(params=eqn.params | {"callback": lambda: [np.array(True)]})]
    return [] if eqn.primitive.name in _CALLBACKS and not eqn.outvars else [eqn]
