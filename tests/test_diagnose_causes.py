"""diagnose finds where an error begins among the results that an output was computed from, and why it begins there."""

import numpy as np
import pytest

from jmpscale._diagnosis.causes import Kind, float32_origins, kind_of, lines_to_change, origins
from jmpscale._diagnosis.evaluate import Result, Site
from jmpscale._diagnosis.measure import Measured

INFINITE = {"error": np.inf, "finite": 0.0}  # as written only
INFINITE_EVERYWHERE = {"finite": 0.0, "float32_finite": 0.0}
NAN_EVERYWHERE = INFINITE_EVERYWHERE | {"float32_nan": 1.0}


def result(number, *operands, operation="mul", dtype="float16", moves=False, amplifies=False, **measured):
    """Returns a result on the line of its number."""
    site = Site(f"model.py:{number} (f)", "", operation, np.dtype(dtype), backward=False, moves=moves)
    return Result(number, site, (), Measured(**measured), operands, amplifies)


def numbers(results):
    return [x.number for x in results]


# --- Where errors begin. ---


def chain(*measured):
    """Returns the last of several results, each of which is computed from the one before."""
    last = result(0, **measured[0])
    for number, fields in enumerate(measured[1:], 1):
        last = result(number, last, **fields)
    return last


def diamond():
    first = result(0, error=0.5)
    return [result(3, result(2, first, error=0.5), result(1, first, error=0.5), error=0.5)]


def two_branches():
    first, second = result(0, error=0.5), result(1, error=0.5)
    return [result(2, second, result(3, error=0.0), first, error=0.5)]


def mask():
    """An infinity that a later operation removes."""
    removed = result(1, result(0, **INFINITE), error=0.001)
    return [result(3, removed, result(2, error=0.001), error=0.4)]


ORIGINS = {  # the outputs, and the results at which their errors begin
    "in the middle": ([chain({"error": 0.001}, {"error": 0.5}, {"error": 0.6})], [1]),
    "at the first result": ([chain({"error": 0.5}, {"error": 0.6})], [0]),
    "an operand with 1.9%": ([chain({"error": 0.019}, {"error": 0.9})], [1]),
    "an operand with 2.1%": ([chain({"error": 0.021}, {"error": 0.9})], [0]),
    "more than a third of a small error": ([chain({"error": 0.015}, {"error": 0.03})], [0]),
    "less than a third of a small error": ([chain({"error": 0.009}, {"error": 0.03})], [1]),
    "two outputs": ([chain({"error": 0.009}, {"error": 0.015}), result(7, error=0.03)], [1, 7]),
    "diamond": (diamond(), [0]),
    "two branches": (two_branches(), [0, 1]),
    "mask": (mask(), [3]),
    "overflow": ([chain({"error": 0.001}, INFINITE, INFINITE)], [1]),
    "overflow after a useless result": ([chain({"error": 0.51}, INFINITE)], [0]),
    "overflow after an inaccurate result": ([chain({"error": 0.49}, INFINITE)], [1]),
    "overflow of one output": ([chain({"error": 0.9}, {"error": 0.9}), chain({}, {}, INFINITE)], [2]),
    "infinite in float32 too": ([chain({"error": 0.1}, INFINITE_EVERYWHERE | {"error": 0.1})], [0]),
    "no output": ([], []),
}


@pytest.mark.parametrize(("outputs", "expected"), ORIGINS.values(), ids=ORIGINS)
def test_origins_of_errors(outputs, expected):
    assert numbers(origins(outputs)) == expected


FLOAT32_ORIGINS = {  # the outputs, and the results at which they begin to be infinite or NaN
    "NaN": ([chain({}, NAN_EVERYWHERE, NAN_EVERYWHERE)], [1]),
    "infinity": ([chain({}, INFINITE_EVERYWHERE, INFINITE_EVERYWHERE)], [1]),
    "NaN after an infinity": ([chain(INFINITE_EVERYWHERE, NAN_EVERYWHERE)], [0]),
    "NaN after a given infinity": ([result(1, result(0, moves=True, **INFINITE_EVERYWHERE), **NAN_EVERYWHERE)], [1]),
    "infinity that stays infinite after a given one": (
        [result(1, result(0, moves=True, **INFINITE_EVERYWHERE), **INFINITE_EVERYWHERE)],
        [0],
    ),
    "NaN after a converted argument": (
        [result(1, result(0, operation="convert_element_type", **INFINITE_EVERYWHERE), **NAN_EVERYWHERE)],
        [1],
    ),
    "NaN after a converted result": (
        [
            result(
                2,
                result(1, result(0), operation="convert_element_type", **INFINITE_EVERYWHERE),
                **NAN_EVERYWHERE,
            )
        ],
        [1],
    ),
    "finite output": ([result(0), chain({}, {}, NAN_EVERYWHERE)], [2]),
    "half precision only": ([result(0, **INFINITE)], []),
}


@pytest.mark.parametrize(("outputs", "expected"), FLOAT32_ORIGINS.values(), ids=FLOAT32_ORIGINS)
def test_origins_of_values_that_are_not_finite_in_float32(outputs, expected):
    assert numbers(float32_origins(outputs)) == expected


# --- Why they begin. ---

LOST, INTACT = result(0, underflow=0.01), result(0)
KINDS = {
    "overflow": (result(1, INTACT, operation="log", **INFINITE), Kind.OVERFLOW),
    "pole": (result(1, INTACT, LOST, operation="log", dtype="float32", **INFINITE), Kind.POLE),
    "lost operand of a matmul": (result(1, LOST, operation="dot_general", **INFINITE), Kind.OVERFLOW),
    "infinite in float32 as written": (result(1, dtype="float32", **INFINITE), Kind.ROUNDING),
    "underflow": (result(1, error=0.4, underflow=0.11), Kind.UNDERFLOW),
    "subnormal values": (result(1, error=0.4, underflow=0.06, subnormal=0.05), Kind.UNDERFLOW),
    "less than a quarter is lost": (result(1, error=0.4, underflow=0.05, subnormal=0.05), Kind.ROUNDING),
    "infinite everywhere": (result(1, **INFINITE_EVERYWHERE), Kind.ROUNDING),
}


@pytest.mark.parametrize(("found", "kind"), KINDS.values(), ids=KINDS)
def test_kind_of_a_difference(found, kind):
    assert kind_of(found) is kind


def amplified(*operands):
    return result(9, *operands, dtype="float32", amplifies=True)


LINES = {  # an origin, and the numbers of the lines to change
    "the operation itself": (result(9, result(0)), [9]),
    "the matmul before it": (amplified(result(1, result(0), dtype="float32")), [0]),
    "the last one before it": (amplified(result(1, result(0))), [1]),
    "through a move": (amplified(result(1, result(0), moves=True)), [0]),
    "two of them": (amplified(result(1), result(0)), [0, 1]),
    "no half precision before it": (amplified(result(0, dtype="float32")), [9]),
}


@pytest.mark.parametrize(("origin", "expected"), LINES.values(), ids=LINES)
def test_lines_to_change(origin, expected):
    assert lines_to_change(origin) == [f"model.py:{number} (f)" for number in expected]


def test_a_line_to_change_is_named_once():
    line = result(1)
    copies = [Result(number, line.site, (), Measured(), (), amplifies=False) for number in range(3)]
    assert lines_to_change(amplified(*copies)) == ["model.py:1 (f)"]
