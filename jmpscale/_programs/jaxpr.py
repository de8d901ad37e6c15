"""Walks through the equations of jaxprs, with what surrounds each of them.

A jaxpr is a list of equations, such as `c = dot_general[params] a b`. An equation may hold jaxprs, such as the body of
a scan.
"""

import inspect
import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jmpscale._algorithm.scaling import jmpscale_scale, jmpscale_unscale
from jmpscale._programs.scopes import is_backward, is_recomputed, named_scopes, runs_as_written
from jmpscale._programs.source import is_library_function, user_lines

Jaxpr = core.Jaxpr | core.ClosedJaxpr  # one class from JAX 0.12 on

MATMULS = {"dot_general", "conv_general_dilated", "ragged_dot_general"}  # and convolutions
RANDOM = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}  # the primitives that draw random bits
HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)  # the precision of a matmul in full float32

# Primitives that call one jaxpr with their operands: first those without, and then those with a derivative rule of it.
_PLAIN_CALLS = {"jit", "closed_call", "remat2", "shard_map", "composite", "compute_on", "custom_vmap_call"}
_PLAIN_CALLS |= {"linear_call", "xla_metadata_call"}
RULES = {"custom_jvp_call", "custom_vjp_call"}
CALLS = _PLAIN_CALLS | RULES
_LOOPS = {jax.lax.scan_p.name, jax.lax.while_p.name, jax.lax.cond_p.name}  # and branches

# Primitives whose jaxprs an interpreter runs by its rule, and a data flow follows.
ENTERED = CALLS | _LOOPS

# Primitives that run the jaxprs among their parameters, and require nothing of them but their inputs and outputs, so
# that these jaxprs may be rewritten. Any other primitive runs as written, with the jaxprs that it holds, which may have
# to agree with something else: a derivative rule, a kernel's memory, the convergence of a solver.
TRANSPARENT = _PLAIN_CALLS | _LOOPS | {"xla_pmap"}

UNKNOWN_LINE = "an unknown line"


class Caller(NamedTuple):
    """What surrounds the equations of a jaxpr.

    JAX keeps the jaxprs of compiled functions. In a function such as `jax.nn.silu`, an equation has no user's line, or
    in JAX 0.7 the line of the first call, whichever call it belongs to. Its line is therefore the line of the call.
    """

    path: tuple[str, ...] = ()  # the user's lines that lead to the equation that holds the jaxpr, outermost first
    function: tuple[str, str] = ("", "")  # the name and the file of the function of the jaxpr
    in_library: bool = False  # whether it is a function of a library
    backward: bool = False  # whether the equations are part of a backward pass
    recomputed: bool = False  # whether `jax.checkpoint` repeats the equations of a forward pass in a backward pass
    holder: str = ""  # the primitive around the jaxpr that `rewrite` does not enter, as in `inner_holder`
    depth: int = 0  # of the lines, as for `user_lines`
    as_written: bool = False  # whether an interpreter runs the equations as they are written
    scopes: tuple[str, ...] = ()  # that a user or a module has named, around the jaxpr, outermost first
    calls: tuple[int, ...] = ()  # the identities of the equations around the jaxpr, because JAX may use it in several

    def key_of(self, eqn: core.JaxprEqn) -> "Key":
        """Returns what identifies an equation of the jaxpr in this call."""
        return id(eqn), self

    def is_backward(self, eqn: core.JaxprEqn) -> bool:
        """Tests whether an equation of the jaxpr is part of a backward pass."""
        return self.backward or is_backward(eqn)

    def is_recomputed(self, eqn: core.JaxprEqn) -> bool:
        """Tests whether `jax.checkpoint` repeats an equation of a forward pass in a backward pass."""
        return self.recomputed or is_recomputed(eqn)

    def runs_as_written(self, eqn: core.JaxprEqn) -> bool:
        """Tests whether an interpreter runs an equation of the jaxpr as it is written, whatever its rule is."""
        return self.as_written or runs_as_written(eqn)

    def scopes_of(self, eqn: core.JaxprEqn) -> tuple[str, ...]:
        """Returns the named scopes of an equation of the jaxpr, outermost first."""
        return named_scopes(eqn, self.scopes)

    def path_of(self, eqn: core.JaxprEqn, *, of_call: bool = False) -> tuple[str, ...]:
        """Returns the user's lines that lead to an equation of the jaxpr, outermost first, as `user_lines`."""
        if self.in_library:
            return self.path
        own = user_lines(eqn, *self.function, self.depth, of_call=of_call)
        lines = own if own[: len(self.path)] == self.path else (*self.path, *own)
        return tuple(line for line, _ in itertools.groupby(lines))

    def line_of(self, eqn: core.JaxprEqn) -> str:
        """Returns the user's line of an equation of the jaxpr, such as `model.py:41 (mlp)`."""
        return (self.path_of(eqn) or (UNKNOWN_LINE,))[-1]

    def inside(self, eqn: core.JaxprEqn) -> "Caller":
        """Returns what surrounds the equations of the jaxprs that an equation holds."""
        info: Any = getattr(next(held_jaxprs(eqn), None), "debug_info", None)
        file, function = getattr(info, "func_filename", None) or "", getattr(info, "func_name", None) or ""
        name = eqn.primitive.name
        in_library = is_library_function(file) if name in CALLS and file else self.in_library
        holder = inner_holder(self.holder, eqn)
        backward, recomputed = self.is_backward(eqn), self.is_recomputed(eqn)
        calls = (*self.calls, id(eqn))
        # A function of this package, such as a gate, calls functions of the user and of optimizers.
        path, depth = self.path_of(eqn, of_call=not in_library), self.depth
        written = self.runs_as_written(eqn)
        scopes = self.scopes_of(eqn)
        return Caller(path, (function, file), in_library, backward, recomputed, holder, depth, written, scopes, calls)


Key = tuple[int, Caller]  # of an equation in one of its calls
PROGRAM = Caller()  # of the equations that no other equation holds


def equations(
    jaxpr: core.Jaxpr, entered: Container[str] | None = None, caller: Caller = PROGRAM
) -> Iterator[tuple[core.JaxprEqn, Caller]]:
    """Yields the equations, and those in the jaxprs that equations hold; if `entered` is given, of these primitives."""
    for eqn in jaxpr.eqns:
        yield eqn, caller
        if entered is None or eqn.primitive.name in entered:
            for held in held_jaxprs(eqn):
                yield from equations(held, entered, caller.inside(eqn))


def inner_holder(holder: str, eqn: core.JaxprEqn) -> str:
    """Returns the primitive that `rewrite` does not enter around the jaxprs of an equation, or "" if it enters all.

    `holder` is the one around the equation. A kernel or a solver counts, rather than a derivative rule around it.
    """
    name = eqn.primitive.name
    return holder if name in TRANSPARENT or holder not in {"", *RULES} else name


def held_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    for value in eqn.params.values():
        for held in value if isinstance(value, tuple) else (value,):
            if isinstance(held, Jaxpr):
                yield held.jaxpr if isinstance(held, core.ClosedJaxpr) else held


def called_jaxpr(eqn: core.JaxprEqn) -> core.ClosedJaxpr:
    """Returns the jaxpr that an equation of `CALLS` calls with its operands."""
    return closed(next(value for value in eqn.params.values() if isinstance(value, Jaxpr)))


def scales(eqn: core.JaxprEqn) -> bool:
    """Tests whether an equation calls the compiled function that scales losses."""
    return _calls_compiled(eqn, inspect.unwrap(jmpscale_scale).__name__)


def unscales(eqn: core.JaxprEqn) -> bool:
    """Tests whether an equation calls the compiled function that unscales gradients."""
    return _calls_compiled(eqn, inspect.unwrap(jmpscale_unscale).__name__)


def _calls_compiled(eqn: core.JaxprEqn, name: str) -> bool:
    """Tests whether an equation calls a function with this name that `jax.jit` compiles."""
    return eqn.primitive.name == "jit" and eqn.params["name"] == name


def type_of(x: Any) -> Any:
    """Returns the type of a variable or literal: an object with a shape and a dtype, if the value is an array."""
    return x.aval


def closed(held: Jaxpr) -> core.ClosedJaxpr:
    """Returns a jaxpr that an equation holds, with its constants."""
    return held if isinstance(held, core.ClosedJaxpr) else core.ClosedJaxpr(held, ())


def split_scan_inputs(eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits the inputs of a scan into constants, the carry, and sequences.

    The parameters with these numbers differ between versions of JAX. Inside the body, sequences have one axis less.
    """
    body = eqn.params["jaxpr"].jaxpr

    def count(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        """Counts the values that are not sequences."""
        return sum(len(type_of(x).shape) == len(type_of(y).shape) for x, y in zip(outer, inner, strict=True))

    last = count(eqn.invars, body.invars)
    first = last - count(eqn.outvars, body.outvars)
    return inputs[:first], inputs[first:last], inputs[last:]


def split_while_inputs(eqn: core.JaxprEqn, inputs: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits the inputs of a while loop into constants of its condition, constants of its body, and the carry."""
    first, last = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return inputs[:first], inputs[first:last], inputs[last:]
