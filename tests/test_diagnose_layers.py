"""A diagnosis says which call of a line is wrong, such as a layer of a loop in Python."""

import re

import jax
import jax.numpy as jnp
import pytest

import jmpscale

from diagnosis_programs import H, fault_line, normal
from tables import names

X, TARGET = normal(0, 16, 8), normal(9, 16, 8)
COUNT, WRONG = 5, 3
LAYERS = [normal(i, 8, 8, scale=300.0 if i == WRONG else 0.5) for i in range(1, COUNT + 1)]


def layer(x, w):
    h = x * jax.lax.rsqrt(jnp.mean(x**2) + 1e-6) @ w
    squares = h.astype(H) ** 2  # fault
    return h / jnp.sqrt(1 + jnp.mean(squares.astype(jnp.float32)))


def loop(call):
    def loss_fn(layers, x):
        for w in layers:
            x = call(x, w)
        return jnp.mean((x - TARGET) ** 2)

    return loss_fn


def in_scan(layers, x):
    return jnp.mean((jax.lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(layers))[0] - TARGET) ** 2)


LOOPS = {
    "called": (loop(layer), LAYERS, "3 of 5"),
    "compiled": (loop(jax.jit(layer)), LAYERS, "3 of 5"),
    "checkpoint": (loop(jax.checkpoint(layer)), LAYERS, "3 of 5"),
    "two layers": (loop(layer), [*LAYERS, LAYERS[WRONG - 1]], "3, 6 of 6"),
    "all layers": (loop(layer), [LAYERS[WRONG - 1]] * 2, ""),
    "many layers": (loop(layer), [LAYERS[WRONG - 1]] * 5 + [LAYERS[0]], ""),
    "one layer": (loop(layer), [LAYERS[WRONG - 1]], ""),
    "scan": (in_scan, LAYERS, ""),
}


@pytest.mark.parametrize("name", names(LOOPS, default={"compiled"}))
def test_diagnose_names_the_calls_of_a_line_that_are_wrong(name):
    fun, layers, calls = LOOPS[name]
    diagnosis = jmpscale.diagnose(fun)(jmpscale.dynamic(2.0**10), layers, X)
    line = f"test_diagnose_layers.py:{fault_line(layer)} (layer)"
    assert diagnosis.lines == (line,)
    begin = f"The forward pass overflows: integer_pow at {line}"
    words = f", call{'s' if ',' in calls else ''} {calls}, reaches " if calls else " reaches "
    assert diagnosis.summary.startswith(f"{begin}{words}")
    assert {(row.line, row.backward): row.calls for row in diagnosis.rows}[line, False] == calls
    assert ("calls" in diagnosis.describe().split()) == bool(calls)


def matmuls(layers, x):
    for w in layers:
        x = jnp.sin(x @ w)  # fault
    return jnp.mean((x - TARGET) ** 2)


@pytest.mark.full
def test_diagnose_names_the_call_of_a_line_with_casts_and_matmuls():
    layers = [w / 8 for w in LAYERS]
    layers[WRONG - 1] = normal(WRONG, 8, 8, scale=10000.0)  # amplifies the rounding of the layers before it, too
    diagnosis = jmpscale.diagnose(jmpscale.autocast(matmuls))(jmpscale.dynamic(2.0**4), layers, X)
    place = f"test_diagnose_layers.py:{fault_line(matmuls)} (matmuls)"
    assert f" The error begins at {place}, calls 1, 2, 3 of 5. Compute {place} in float32" in diagnosis.summary


@pytest.mark.full
def test_diagnose_names_the_call_that_overflows_and_not_the_calls_whose_rounding_it_amplifies():
    layers = [w / 8 for w in LAYERS]
    layers[WRONG - 1] = normal(WRONG, 8, 8, scale=1e6)
    summary = jmpscale.diagnose(jmpscale.autocast(matmuls))(
        jmpscale.dynamic(2.0**-4, min_scale=2.0**-20), layers, X
    ).summary
    place = f"test_diagnose_layers.py:{fault_line(matmuls)} (matmuls)"
    assert f"overflows: convert_element_type at {place}, call 3 of 5, reaches " in summary


def cast_by_hand(layers, x):
    half, x = jmpscale.cast((layers, x), H)  # fault
    return jnp.mean(sum(x @ w for w in half).astype(jnp.float32))


def test_diagnose_counts_a_cast_of_several_arrays_as_one_call():
    layers = [normal(1, 8, 8, scale=1e6), *LAYERS]
    summary = jmpscale.diagnose(cast_by_hand)(jmpscale.dynamic(), layers, X).summary
    place = f"test_diagnose_layers.py:{fault_line(cast_by_hand)} (cast_by_hand)"
    assert summary.startswith(f"The forward pass overflows: convert_element_type at {place} reaches ")


@jax.custom_vjp
def small_cotangent(x, factor):
    return x


def _small(factor, g):
    g = (g / jnp.max(jnp.abs(g))).astype(H)
    return (g * factor * factor / factor / factor).astype(jnp.float32), None


small_cotangent.defvjp(lambda x, factor: (x, factor), _small)


@pytest.mark.full
def test_diagnose_counts_the_calls_of_the_backward_pass_in_the_order_of_the_layers():
    def loss_fn(layers, x):
        for i, w in enumerate(layers):
            x = small_cotangent(jnp.tanh(x @ w), H(2.0**-13 if i + 1 == 2 else 1.0))  # fault
        return jnp.mean((x - TARGET) ** 2)

    summary = jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), [w / 8 for w in LAYERS], X).summary
    place = f"test_diagnose_layers.py:{fault_line(loss_fn)} ({loss_fn.__name__})"
    assert re.search(rf" the backward pass underflows: \w+ at {re.escape(place)}, call 2 of 5, has ", summary)
