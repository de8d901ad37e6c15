"""Evaluates a program one operation at a time, in float32 and as written, and compares each result.

Loops run in Python, and branches are the ones that the program takes as written. So each result belongs to one
execution of one operation, and has values, an error, and the results that it was computed from.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.jaxpr import PROGRAM, Caller, called_jaxpr, evaluate_equation, scan_carry_size, split_scan_inputs
from jmpscale._base.source import is_backward, module_path, scopes
from jmpscale._diagnosis.float32 import (
    compiler_options,
    literal_value,
    run_equation_in_float32,
    runs_as_written,
    widen,
)
from jmpscale._diagnosis.measure import Measured, is_number, measure, relative_error

LIMIT = 100_000  # operations; loops that would exceed it continue as compiled programs
LARGE_ERROR = 0.02  # of a result; healthy ones have less than half of it

# The results of these primitives are their operands in another arrangement, with the same error.
_REARRANGEMENTS = {"broadcast_in_dim", "copy", "device_put", "mesh_cast", "name", "pbroadcast"}
_REARRANGEMENTS |= {"pcast", "pvary", "reshape", "reshard", "rev", "sharding_constraint", "squeeze", "stop_gradient"}
_REARRANGEMENTS |= {"tile", "transpose"}
# The results of these primitives consist of values that exist already.
_MOVES = {"all_gather", "all_to_all", "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "pad"}
_MOVES |= {"optimization_barrier", "ppermute", "scan", "scatter", "select_n", "slice", "split", "stack", "unstack"}


_Outputs: TypeAlias = tuple[list[Any], list[Any]]  # in float32, and as written


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """A result of an operation of the program, in all of its executions."""

    line: str
    module: str
    operation: str
    dtype: np.dtype
    backward: bool
    moves: bool  # whether the result consists of values that exist already


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A result of one execution of an operation.

    Attributes:
      number: its position in the order of execution.
      site: the operation.
      steps: the iterations of the loops around it, outermost first.
      measured: how the result differs from float32.
      operands: the results that it was computed from, without arguments and constants of the program.
      amplifies: whether the operation has its error in float32 too, if its operands are rounded.
    """

    number: int
    site: Site
    steps: tuple[int, ...]
    measured: Measured
    operands: tuple["Result", ...]
    amplifies: bool


class Value(NamedTuple):
    """The value of a variable."""

    float32: Any
    written: Any
    result: Result | None  # None for arguments and constants


class Evaluation(NamedTuple):
    """An evaluated program."""

    outputs: list[Value]
    results: list[Result]  # in the order of execution
    not_entered: list[str]  # the operations that were not evaluated in float32, or not one at a time


class _Place(NamedTuple):
    """What surrounds a jaxpr."""

    scopes: tuple[Any, ...] = ()
    caller: Caller = PROGRAM
    calls: tuple[int, ...] = ()  # identifies the equations that hold the jaxpr
    steps: tuple[int, ...] = ()


def evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], progress: Callable[[str], None]
) -> Evaluation:
    """Evaluates a program.

    Args:
      jaxpr: the program.
      consts: its constants.
      inputs: its inputs.
      progress: a function that is called with a description of the work so far.
    """
    evaluator = _Evaluator(progress)
    outputs = evaluator.run(jaxpr, list(map(_given, consts)), list(map(_given, inputs)), _Place())
    return Evaluation(outputs, evaluator.results, list(evaluator.not_entered))


def _given(x: Any) -> Value:
    return Value(widen(x), x, None)


class _Evaluator:
    def __init__(self, progress: Callable[[str], None]) -> None:
        self.results: list[Result] = []
        self.not_entered: dict[str, None] = {}  # an ordered set
        self._progress = progress
        self._count = 0
        self._sites: dict[tuple[Any, ...], Site] = {}
        self._created: list[core.JaxprEqn] = []  # kept, because sites are found by the identity of their equation

    def run(self, jaxpr: core.Jaxpr, consts: list[Value], inputs: list[Value], place: _Place) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(x: Any) -> Value:
            return _given(literal_value(x)) if isinstance(x, core.Literal) else values[x]

        for eqn, unused in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
            outputs = self._equation(eqn, [read(x) for x in eqn.invars], place)
            values.update(zip(eqn.outvars, outputs, strict=True))
            for x in unused:  # frees the memory
                del values[x]
        return [read(x) for x in jaxpr.outvars]

    def _equation(self, eqn: core.JaxprEqn, inputs: list[Value], place: _Place) -> list[Value]:
        loops = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if eqn.primitive.name in loops:
            return loops[eqn.primitive.name](eqn, inputs, place)
        called = called_jaxpr(eqn)
        if called is not None and eqn.primitive.name != "shard_map":
            return self.run(called[0], list(map(_given, called[1])), inputs, _inside(place, eqn))
        if called is not None or runs_as_written(eqn):
            self._note(eqn, eqn.primitive.name, place)
        return self._operation(eqn, inputs, place)

    # Loops and branches.

    def _scan(self, eqn: core.JaxprEqn, inputs: list[Value], place: _Place) -> list[Value]:
        body, length, reverse = eqn.params["jaxpr"], eqn.params["length"], eqn.params["reverse"]
        consts, carry, xs = split_scan_inputs(eqn, inputs)
        captured, inside = list(map(_given, body.consts)), _inside(place, eqn)
        done: list[list[Value]] = []  # the results of each iteration
        while len(done) < length and self._count < LIMIT:
            step = length - 1 - len(done) if reverse else len(done)
            at = inside._replace(steps=(*place.steps, step))
            entries = [self._moved(eqn, [x], _entry, at, step) for x in xs]
            outputs = self.run(body.jaxpr, captured, [*consts, *carry, *entries], at)
            carry = outputs[: len(carry)]
            done.append(outputs[len(carry) :])
        ordered = done[::-1] if reverse else done
        stacked = [self._moved(eqn, list(parts), _stack, inside) for parts in zip(*ordered, strict=True)]
        if len(done) < length or not done:
            carry, rest = self._rest_of_scan(eqn, [*consts, *carry], xs, len(done), place)
            pairs = zip(rest, stacked, strict=True) if reverse else zip(stacked, rest, strict=True)
            stacked = [self._moved(eqn, list(pair), _concatenate, inside) for pair in pairs] if done else rest
        return [*carry, *stacked]

    def _rest_of_scan(
        self, eqn: core.JaxprEqn, inputs: list[Value], xs: list[Value], done: int, place: _Place
    ) -> tuple[list[Value], list[Value]]:
        """Runs the remaining iterations of a scan as one operation; returns the carry and the stacked results."""
        length, size = eqn.params["length"], scan_carry_size(eqn)
        first, last = (0, length - done) if eqn.params["reverse"] else (done, length)
        if first < last:
            self._note(eqn, f"scan, iterations {first} to {last - 1}", place)
        remaining = eqn.replace(params=eqn.params | {"length": length - done})
        self._created.append(remaining)
        entries = [self._moved(eqn, [x], functools.partial(_slice, first, last), place) for x in xs]
        outputs = self._operation(remaining, [*inputs, *entries], place)
        return outputs[:size], outputs[size:]

    def _while(self, eqn: core.JaxprEqn, inputs: list[Value], place: _Place) -> list[Value]:
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        first, last = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        carry, captured, inside = inputs[last:], list(map(_given, body.consts)), _inside(place, eqn)
        test = jax.jit(lambda args: jax.core.eval_jaxpr(cond.jaxpr, cond.consts, *args)[0])
        step = 0
        while test([x.written for x in (*inputs[:first], *carry)]):
            if self._count >= LIMIT:
                self._note(eqn, f"while, from iteration {step} on", place)
                return self._operation(eqn, [*inputs[:last], *carry], place)
            at = inside._replace(steps=(*place.steps, step))
            carry = self.run(body.jaxpr, captured, [*inputs[first:last], *carry], at)
            step += 1
        return carry

    def _cond(self, eqn: core.JaxprEqn, inputs: list[Value], place: _Place) -> list[Value]:
        branch = eqn.params["branches"][int(inputs[0].written)]
        return self.run(branch.jaxpr, list(map(_given, branch.consts)), inputs[1:], _inside(place, eqn))

    # Single operations.

    def _operation(self, eqn: core.JaxprEqn, inputs: list[Value], place: _Place) -> list[Value]:
        self._count += 1
        self._progress(f"{self._count} operations")
        run, written_inputs = compiled(_Operation(eqn)), [x.written for x in inputs]
        outputs = run([x.float32 for x in inputs], written_inputs)
        if eqn.primitive.name in _REARRANGEMENTS:
            return [Value(*pair, inputs[0].result) for pair in zip(*outputs, strict=True)]
        return self._values(
            eqn,
            outputs,
            inputs,
            place,
            moves=eqn.primitive.name in _MOVES,
            run_on_rounded=lambda: run(list(map(widen, written_inputs)), written_inputs)[0],
        )

    def _moved(
        self, eqn: core.JaxprEqn, inputs: list[Value], move: Callable[..., Any], place: _Place, index: int = 0
    ) -> Value:
        """Returns values in another arrangement, such as an entry of the sequence of a scan."""
        outputs = compiled_move(move)([x.float32 for x in inputs], [x.written for x in inputs], index)
        return self._values(eqn, outputs, inputs, place, moves=True, run_on_rounded=lambda: outputs[1])[0]

    def _values(
        self,
        eqn: core.JaxprEqn,
        outputs: _Outputs,
        inputs: list[Value],
        place: _Place,
        *,
        moves: bool,
        run_on_rounded: Callable[[], list[Any]],
    ) -> list[Value]:
        """Measures the outputs of an operation, and records the results."""
        operands = tuple(x.result for x in inputs if x.result is not None)
        inherited = max((x.measured.error for x in operands), default=0.0)
        values = []
        for number, (float32, written) in enumerate(zip(*outputs, strict=True)):
            if not is_number(written):
                values.append(Value(float32, written, None))
                continue
            key = (*place.calls, id(eqn), number, moves)
            if key not in self._sites:
                self._sites[key] = _site(eqn, written.dtype, place, moves=moves)
            measured = measure(float32, written)
            begins = measured.error > LARGE_ERROR >= inherited
            amplifies = begins and relative_error(float32, run_on_rounded()[number]) >= measured.error / 2
            result = Result(len(self.results), self._sites[key], place.steps, measured, operands, amplifies)
            self.results.append(result)
            values.append(Value(float32, written, result))
        return values

    def _note(self, eqn: core.JaxprEqn, name: str, place: _Place) -> None:
        self.not_entered[f"{place.caller.line_of(eqn)}: {name}"] = None


class _Operation:
    """An equation, which equals all equations that compute the same."""

    def __init__(self, eqn: core.JaxprEqn) -> None:
        self.eqn = eqn
        types = tuple(x.aval for x in (*eqn.invars, *eqn.outvars))
        context: Any = eqn.ctx
        try:
            self._key: object = (eqn.primitive, frozenset(eqn.params.items()), types, context.cur_abstract_mesh)
        except TypeError:  # a parameter is not hashable
            self._key = id(eqn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Operation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=10_000)
def compiled(operation: _Operation) -> Callable[[list[Any], list[Any]], _Outputs]:
    """Compiles an operation in float32 and as written."""
    eqn = operation.eqn

    def run(float32: list[Any], written: list[Any]) -> _Outputs:
        return run_equation_in_float32(eqn, float32), evaluate_equation(eqn, eqn.params, written)

    return jax.jit(run, compiler_options=compiler_options())


@functools.lru_cache(maxsize=100)
def compiled_move(move: Callable[..., Any]) -> Callable[[list[Any], list[Any], int], _Outputs]:
    def run(float32: list[Any], written: list[Any], index: Any) -> _Outputs:
        return [move(float32, index)], [move(written, index)]

    return jax.jit(run, compiler_options=compiler_options())


def _entry(values: list[Any], index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(values[0], index, keepdims=False)


def _stack(values: list[Any], index: Any) -> Any:
    return jnp.stack(values)


def _slice(first: int, last: int, values: list[Any], index: Any) -> Any:
    return values[0][first:last]


def _concatenate(values: list[Any], index: Any) -> Any:
    return jnp.concatenate(values)


def last_uses(jaxpr: core.Jaxpr) -> list[list[Any]]:
    """Returns for each equation the variables that no later equation reads, and that are not outputs."""
    last = {x: i for i, eqn in enumerate(jaxpr.eqns) for x in (*eqn.invars, *eqn.outvars) if isinstance(x, core.Var)}
    for x in jaxpr.outvars:
        if isinstance(x, core.Var):
            last.pop(x, None)
    unused: list[list[Any]] = [[] for _ in jaxpr.eqns]
    for x, i in last.items():
        unused[i].append(x)
    return unused


def _inside(place: _Place, eqn: core.JaxprEqn) -> _Place:
    """Returns the place of the jaxprs that an equation holds."""
    return place._replace(
        scopes=(*place.scopes, *scopes(eqn)), caller=place.caller.inside(eqn), calls=(*place.calls, id(eqn))
    )


def _site(eqn: core.JaxprEqn, dtype: np.dtype, place: _Place, *, moves: bool) -> Site:
    around = (*place.scopes, *scopes(eqn))
    return Site(
        line=place.caller.line_of(eqn),
        module=module_path(around),
        operation=eqn.primitive.name,
        dtype=dtype,
        backward=is_backward(around),
        moves=moves,
    )
