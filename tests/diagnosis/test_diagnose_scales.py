"""diagnose measures the scales that fit, and the errors, as float16 runs at every power of two do."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale

from diagnosis_programs import H, W, X
from tables import rows

# XLA may otherwise keep the precision of float32 between two operations in float16.
EXACT = {"xla_allow_excess_precision": False}
POWERS = range(-40, 41)
TOLERANCE = 0.01  # by which an error may exceed the error at the best scale


def two_sizes(dtype, params, x):
    """Two parameters, of which one has much smaller gradients."""
    large, small = (params[name].astype(dtype) for name in ("large", "small"))
    h = jnp.tanh(x.astype(dtype) @ large) * dtype(2.0**-6)
    return jnp.mean((h @ small).astype(jnp.float32) ** 2) + 8 * jnp.mean(h.astype(jnp.float32))


def product(dtype, w, x):
    return jnp.sum((x.astype(dtype) @ w.astype(dtype) * dtype(2.0**-9)).astype(jnp.float32)) * 2.0**-9


def scan(dtype, w, x):
    w = w.astype(dtype)
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x.astype(dtype), None, length=3)
    return jnp.mean(h.astype(jnp.float32) ** 2)


def remat(dtype, w, x):
    w = w.astype(dtype)
    block = jax.checkpoint(lambda h: jnp.sin(h @ w) * dtype(3))
    return jnp.mean(block(block(x.astype(dtype))).astype(jnp.float32))


def attention(dtype, w, x):
    q, k, v = jnp.split(x.astype(dtype) @ jnp.tile(w.astype(dtype), (1, 3)), 3, axis=-1)
    scores = jnp.where(np.tri(len(x), dtype=bool), q @ k.T, -jnp.inf)
    return jnp.mean((jax.nn.softmax(scores) @ v).astype(jnp.float32) ** 2)


def convolution(dtype, w, x):
    image = x.reshape(2, 8, 8, 1).astype(dtype)
    kernel = w.reshape(4, 4, 1, 4).astype(dtype)
    layout = ("NHWC", "HWIO", "NHWC")
    h = jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=layout)
    return jnp.mean(jax.nn.relu(h).astype(jnp.float32))


def branch(dtype, w, x):
    h = x.astype(dtype) @ w.astype(dtype)
    h = jax.lax.cond(h[0, 0] > 100, lambda h: h * dtype(100), lambda h: h * dtype(2.0**-6), h)
    return jnp.mean(h.astype(jnp.float32) ** 2)


PROGRAMS = {  # functions of a dtype, of parameters and of a batch
    "product": (product, W),
    "two sizes": (two_sizes, {"large": W, "small": W[:, :2]}),
    "scan": (scan, W),
    "remat": (remat, W),
    "attention": (attention, W),
    "convolution": (convolution, W),
    "cond": (branch, W),
}
DEFAULT = {"product"}


def leaves(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def relative_error(expected, actual):
    return np.linalg.norm(expected - actual) / np.linalg.norm(expected)


def run_in_float32(program, params):
    """Returns the loss and the gradients of the program that is written in float32."""
    loss, grads = jax.value_and_grad(functools.partial(program, jnp.float32))(params, X)
    return float(loss), leaves(grads)


def run_at_every_power(program, params):
    """Returns the loss in float16, and for each exponent the error of each gradient, or None if one is not finite."""
    fun = jmpscale.value_and_grad(functools.partial(program, H))

    def run(scale):
        return fun(jmpscale.static(1.0)._replace(loss_scale=scale), params, X)

    compiled = jax.jit(run).lower(jnp.float32(1)).compile(EXACT)
    expected = run_in_float32(program, params)[1]
    errors = {}
    for k in POWERS:
        loss, grads = compiled(jnp.float32(2.0**k))
        found = leaves(grads)
        finite = all(np.isfinite(x).all() for x in found)
        errors[k] = np.array([*map(relative_error, expected, found)]) if finite else None
    return float(loss), errors


@pytest.mark.full
@pytest.mark.parametrize("program", rows(PROGRAMS, default=DEFAULT))
def test_diagnose_finds_the_scales_that_float16_runs_find(program):
    fun, params = program
    loss, errors = run_at_every_power(fun, params)
    diagnosis = jmpscale.diagnose(functools.partial(fun, H))(jmpscale.static(2.0**8), params, X)

    finite = [k for k in POWERS if errors[k] is not None]
    assert finite == list(range(POWERS[0], finite[-1] + 1))
    assert finite[-1] < POWERS[-1]
    low, high = map(math.log2, diagnosis.fitting_scales)
    assert high == finite[-1]

    best = np.min([errors[k] for k in finite], axis=0)
    accurate = [k for k in finite if (errors[k] <= best + TOLERANCE).all()]
    assert abs(low - accurate[0]) <= 1
    assert accurate[0] > POWERS[0]

    # The compiler may sum in another order, so that sums in float16 round differently.
    assert diagnosis.loss == pytest.approx(loss, rel=1e-5)
    assert diagnosis.loss_float32 == pytest.approx(run_in_float32(fun, params)[0], rel=1e-5)
    assert diagnosis.gradient_error == pytest.approx(errors[8].max(), abs=1e-3)
    for scale, error in diagnosis.scale_errors:
        k = round(math.log2(scale))
        assert scale == 2.0**k
        if k in errors:
            assert error == (math.inf if errors[k] is None else pytest.approx(errors[k].max(), rel=0.4, abs=1e-3))
    assert [scale for scale, _ in diagnosis.scale_errors] == sorted({scale for scale, _ in diagnosis.scale_errors})


# --- A program of element-wise operations, whose results NumPy computes bit for bit. ---

FACTOR = 2.0**-20


def weighted_sum(w, x):
    return jnp.sum((w.astype(H) * x.astype(H)).astype(jnp.float32)) * FACTOR


def numpy_gradient(x, scale):
    with np.errstate(over="ignore", under="ignore"):
        cotangent = np.float16(np.float32(scale * FACTOR))
        return (cotangent * x.astype(np.float16)).astype(np.float32) / np.float32(scale)


VALUES = np.float32([[1.0, -3.1, 0.02], [1e-3, 2e-7, 700.0]])
WEIGHTS = np.float32([[0.1, 1.7, 300.0], [5e-5, 1e-3, 0.011]])


@pytest.mark.parametrize(
    "scale", [1.0, 2.0**24, *(pytest.param(x, marks=pytest.mark.full) for x in (2.0**-4, 3.0, 2.0**30))]
)
def test_diagnose_has_the_errors_of_numpy(scale):
    diagnosis = jmpscale.diagnose(weighted_sum)(jmpscale.static(scale), jnp.asarray(WEIGHTS), jnp.asarray(VALUES))

    def error(scale):
        found = numpy_gradient(VALUES, scale)
        return relative_error(VALUES * FACTOR, found) if np.isfinite(found).all() else math.inf

    half = (WEIGHTS.astype(np.float16) * VALUES.astype(np.float16)).astype(np.float32)
    assert diagnosis.loss_scale == scale
    assert diagnosis.loss == pytest.approx(half.sum() * FACTOR)
    assert diagnosis.loss_float32 == pytest.approx((WEIGHTS * VALUES).sum() * FACTOR)
    assert diagnosis.gradient_error == pytest.approx(error(scale), rel=1e-5)
    assert dict(diagnosis.scale_errors) == pytest.approx({k: error(k) for k, _ in diagnosis.scale_errors}, rel=1e-5)

    low, high = diagnosis.fitting_scales
    fits = [2.0**k for k in range(-40, 41) if error(2.0**k) <= error(high) + TOLERANCE]
    assert (low, high) == (fits[0], fits[-1])


def test_diagnose_measures_each_line():
    diagnosis = jmpscale.diagnose(weighted_sum)(jmpscale.static(1.0), jnp.asarray(WEIGHTS), jnp.asarray(50 * VALUES))
    forward, backward = sorted(diagnosis.rows, key=lambda row: row.pass_ == "backward")
    expected = WEIGHTS * (50 * VALUES)
    assert forward.operation == "convert_element_type"
    assert forward.max_abs == np.abs(50 * VALUES).max()
    assert forward.headroom == pytest.approx(np.log2(65504 / forward.max_abs))
    assert forward.overflow == 0
    below = [np.mean(np.abs(x) < 2.0**-14) for x in (WEIGHTS, 50 * VALUES, expected)]
    assert forward.tiny == pytest.approx(max(below))
    assert backward.max_abs == pytest.approx(np.abs(FACTOR * 50 * VALUES).max())
    assert backward.tiny == 1
    assert (forward.in_lines, backward.in_lines) == (False, False)


def extremes(w, x):
    return jnp.sum(jnp.where(x > 1e5, H(0), w.astype(H) * x.astype(H)).astype(jnp.float32))


@pytest.mark.full
def test_diagnose_measures_overflow_and_tiny_values():
    x = np.float32([2e5, -3e5, 3.0, 1e-8, 1e-7, 1.0])
    diagnosis = jmpscale.diagnose(extremes)(jmpscale.static(1.0), jnp.ones(6), jnp.asarray(x))
    row = next(row for row in diagnosis.rows if row.pass_ != "backward")
    assert row.max_abs == 3e5
    assert row.overflow == pytest.approx(2 / 6)
    assert row.tiny == pytest.approx(2 / 6)
    assert row.headroom == pytest.approx(np.log2(65504 / 3e5))
    assert row.in_lines
    assert row.alone == math.inf


@pytest.mark.full
def test_error_alone_is_the_error_of_a_program_with_one_line_in_half_precision():
    def loss(first, second, w, x):
        h = jnp.sin(64 * x.astype(first) @ w.astype(first)).astype(jnp.float32)
        return jnp.mean((h.astype(second) @ w.astype(second)).astype(jnp.float32) ** 2)

    def gradient(*dtypes):
        scale = jmpscale.static(2.0**8)
        return np.asarray(jmpscale.value_and_grad(functools.partial(loss, *dtypes))(scale, W, X)[1])

    exact = gradient(jnp.float32, jnp.float32)
    rows = jmpscale.diagnose(functools.partial(loss, H, H))(jmpscale.static(2.0**8), W, X).rows
    for row, dtypes in zip(rows, [(H, jnp.float32), (jnp.float32, H)], strict=False):
        assert row.pass_ != "backward"
        assert 0 < row.alone <= relative_error(exact, gradient(*dtypes)) + 1e-3
