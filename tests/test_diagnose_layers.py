"""A diagnosis says which call of a line is wrong, such as a layer of a loop in Python."""

import re

import jax
import jax.numpy as jnp
import pytest

import jmpscale

from arrays import normal
from diagnosis_programs import H, fault_line
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


@pytest.mark.parametrize("name", names(LOOPS, default={"called"}))
def test_diagnose_names_the_calls_of_a_line_that_are_wrong(name):
    fun, layers, calls = LOOPS[name]
    if jax.__version_info__ < (0, 8):  # with which a diagnosis does not tell the calls of this line apart
        calls = ""
    diagnosis = jmpscale.diagnose(fun)(jmpscale.dynamic(2.0**10), layers, X)
    line = f"test_diagnose_layers.py:{fault_line(layer)} (layer)"
    assert diagnosis.lines == (line,)
    begin = f"The forward pass overflows: integer_pow at {line}"
    words = f", call{'s' if ',' in calls else ''} {calls}, reaches " if calls else " reaches "
    assert diagnosis.summary.startswith(f"{begin}{words}")
    assert {(row.line, row.backward): row.calls for row in diagnosis.rows}[line, False] == calls
    assert ("calls" in diagnosis.describe().split()) == bool(calls)


# --- Programs that do not show which call an operation belongs to: no number is better than a wrong one. ---


def normalized(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x**2) + 1e-6) @ w


def hidden_overflow(x, w):
    """Returns activations that hardly change if the logarithm is infinite; the gradient does."""
    h = normalized(x, w)
    logarithm = jnp.log(1 + (h.astype(H) ** 2).astype(jnp.float32))
    return jnp.tanh(h) + 1e-3 * jnp.minimum(logarithm, 1e3)


def two_forms(layers, x):
    for i, w in enumerate(layers):
        h = normalized(x, w).astype(H)
        squares = (h * H(0.5)) * (h * H(2)) if i < len(layers) // 2 else h * h
        x = h.astype(jnp.float32) / jnp.sqrt(1 + jnp.mean(squares.astype(jnp.float32)))
    return jnp.mean((x - TARGET) ** 2)


@jmpscale.autocast
def gates_in_some_layers(layers, x):
    for i, w in enumerate(layers):
        h = 30 * x * jax.lax.rsqrt(jnp.mean(x**2) + 1e-6)
        z = (h @ w) * jax.nn.sigmoid(h @ w[::-1] * 1e-2) if i % 3 == 0 else h @ (30 * w)
        x = z / jnp.sqrt(1 + jnp.mean(z**2))
    return jnp.mean((x - TARGET) ** 2)


@jmpscale.autocast
def first_layer_without_residual(layers, x):
    for w in layers:
        q, k = 60 * x / jnp.sqrt((x**2).mean() + 1e-6) @ w, x @ w.T
        x = jnp.tanh(q / (1 + jnp.abs(q).mean()) + k / (1 + jnp.abs(k).mean()))
    return jnp.mean((x - TARGET) ** 2)


UNCERTAIN = {  # the loss function, and the factor of the layer that overflows
    "one checkpoint around all layers": (jax.checkpoint(loop(hidden_overflow)), 1.0),
    "two forms of a line": (two_forms, 1.0),
    "gates in some layers": (gates_in_some_layers, 1.0),
    "first layer without a residual": (first_layer_without_residual, 100.0),
}


@pytest.mark.parametrize("name", names(UNCERTAIN, default={"two forms of a line"}))
def test_diagnose_names_no_call_if_calls_cannot_be_told_apart(name):
    fun, factor = UNCERTAIN[name]
    layers = [factor * w if i + 1 == WRONG else w for i, w in enumerate(LAYERS)]
    layers = [*layers[:WRONG], normal(8, 8, 8, scale=0.5), *layers[WRONG:]]
    diagnosis = jmpscale.diagnose(fun)(jmpscale.dynamic(2.0**10), layers, X)
    assert len(diagnosis.lines) == 1
    assert " overflows: " in diagnosis.summary
    assert ("The forward pass, which is computed again, overflows: " in diagnosis.summary) == ("checkpoint" in name)
    assert " of 6" not in diagnosis.summary
    assert {row.calls for row in diagnosis.rows} == {""}


def matmuls(layers, x):
    for w in layers:
        x = jnp.sin(x @ w)  # fault
    return jnp.mean((x - TARGET) ** 2)


@pytest.mark.full
def test_diagnose_names_no_call_if_the_line_is_wrong_without_it():
    layers = [w / 8 for w in LAYERS]
    layers[WRONG - 1] = normal(WRONG, 8, 8, scale=17000.0)  # amplifies the rounding of the layers before it, too
    diagnosis = jmpscale.diagnose(jmpscale.autocast(matmuls))(jmpscale.dynamic(2.0**4), layers, X)
    place = f"test_diagnose_layers.py:{fault_line(matmuls)} (matmuls)"
    assert f" The error begins at {place}. Compute {place} in float32" in diagnosis.summary


@pytest.mark.full
def test_diagnose_names_the_call_that_overflows_and_not_the_calls_whose_rounding_it_amplifies():
    layers = [w / 8 for w in LAYERS]
    layers[WRONG - 1] = normal(WRONG, 8, 8, scale=1e6)
    summary = jmpscale.diagnose(jmpscale.autocast(matmuls))(
        jmpscale.dynamic(2.0**-4, min_scale=2.0**-20), layers, X
    ).summary
    place = f"test_diagnose_layers.py:{fault_line(matmuls)} (matmuls)"
    assert f"overflows: convert_element_type at {place}, call 3 of 5, reaches " in summary


def cast_tree(layers, x):
    half, x = jmpscale.cast((layers, x), H)  # fault
    return jnp.mean(sum(x @ w for w in half).astype(jnp.float32))


def cast_leaves(layers, x):
    half = jax.tree.map(lambda w: w.astype(H), layers)  # fault
    return jnp.mean(sum(x.astype(H) @ w for w in half).astype(jnp.float32))


@pytest.mark.parametrize("fun", [cast_tree, pytest.param(cast_leaves, marks=pytest.mark.full)])
def test_diagnose_names_the_argument_that_a_cast_of_a_tree_makes_infinite(fun):
    layers = [*LAYERS[:2], normal(1, 8, 8, scale=1e6), *LAYERS[2:]]
    diagnosis = jmpscale.diagnose(fun)(jmpscale.dynamic(), layers, X)
    begin = f"The forward pass overflows: convert_element_type at test_diagnose_layers.py:{fault_line(fun)} "
    assert diagnosis.summary.startswith(begin)
    assert ", in the cast of layers[2], reaches " in diagnosis.summary
    assert {row.calls for row in diagnosis.rows} == {"layers[2]", ""}


def test_diagnose_names_no_argument_if_what_is_cast_is_computed():
    summary = jmpscale.diagnose(lambda layers, x: cast_tree([2 * w for w in layers], x))(
        jmpscale.dynamic(), [normal(1, 8, 8, scale=1e6), *LAYERS], X
    ).summary
    assert re.match(r"The forward pass overflows: convert_element_type at [^,]* reaches ", summary)


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
