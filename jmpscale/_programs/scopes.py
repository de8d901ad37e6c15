"""What the scopes of an equation show: by which transformation of JAX it was made.

The equations of a compiled function have the scopes of its own trace only; `Caller` adds those around them.
"""

import itertools
from typing import Any

from jax.extend import core

from jmpscale._base.as_written import SCOPE

_RECOMPUTED = "rematted_computation"


def runs_as_written(eqn: core.JaxprEqn) -> bool:
    """Tests whether an equation is in the scope of operations that an interpreter runs as they are written."""
    return any(scope.name == SCOPE for scope in _scopes(eqn))


def is_backward(eqn: core.JaxprEqn) -> bool:
    """Tests whether an equation is part of a backward pass."""
    return "transpose" in _transformations(eqn)


def is_differentiated(eqn: core.JaxprEqn) -> bool:
    """Tests whether an equation is part of a function that is differentiated, or of its backward pass."""
    return not {"jvp", "transpose"}.isdisjoint(_transformations(eqn))


def is_in_inner_gradient(eqn: core.JaxprEqn) -> bool:
    """Tests whether an equation is in the backward pass of a gradient that a differentiated function contains."""
    found = _transformations(eqn)
    # The scopes of the outer transformation come first: jvp, or transpose and jvp.
    return "jvp" in found and "transpose" in found[found.index("jvp") :]


def is_recomputed(eqn: core.JaxprEqn) -> bool:
    """Tests whether `jax.checkpoint` repeats an equation in the backward pass."""
    return any(scope.name == _RECOMPUTED for scope in _scopes(eqn))


def named_scopes(eqn: core.JaxprEqn, around: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns the scopes that a user or a module has named, outermost first, with those around the jaxpr.

    The name of a transformation stands before the scopes that it transforms. JAX repeats the scopes around
    `jax.checkpoint` in the backward pass, as in `transpose(jvp(Model))/jvp(Model)`.
    """
    found = around
    for is_named, group in itertools.groupby(_scopes(eqn), lambda scope: type(scope).__name__ == "Scope"):
        names = tuple(scope.name for scope in group if scope.name not in (SCOPE, _RECOMPUTED))
        if is_named:
            found = names if names[: len(found)] == found else (*found, *names)
    return found


def _transformations(eqn: core.JaxprEqn) -> list[str]:
    """Returns the names of the transformations, outermost first; the other scopes come from `jax.named_scope`."""
    return [scope.name for scope in _scopes(eqn) if type(scope).__name__ != "Scope"]


def _scopes(eqn: core.JaxprEqn) -> Any:
    name_stack: Any = eqn.source_info.name_stack
    return name_stack.stack
