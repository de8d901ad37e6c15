"""Rounding has three answers, by its size: small, moderate, and wrong; it does not decide which scales fit."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jmpscale

from arrays import normal
from diagnosis_programs import H, fault_line
from messages import FORWARD_ALONE, GRADIENTS_DIFFER, LOSS_DIFFERS, ONLY_A_RUN, OVERFLOW
from tables import rows

pytestmark = pytest.mark.full

B = jnp.bfloat16


def place(fun, module=__name__):
    return f"{module}.py:{fault_line(fun)} ({fun.__name__})"


# --- Moderate errors. ---

FREQUENCIES = np.exp(-np.log(10000) * np.arange(32) / 32).astype(np.float32)
TIMES = np.random.default_rng(5).uniform(0, 1000, 512).astype(np.float32)
NETWORK = {"first": normal(0, 64, 64, scale=0.125), "last": normal(1, 64, 1, scale=0.125)}


def time_steps(params, times):
    """Trains to a loss that is 2,000 times as large as with time steps in float32."""
    angles = times.astype(B).astype(jnp.float32)[:, None] * FREQUENCIES[None]  # fault
    features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(B)
    hidden = jax.nn.silu(features @ params["first"].astype(B))
    return jnp.mean(((hidden @ params["last"].astype(B)).astype(jnp.float32)[:, 0] - jnp.cos(times)) ** 2)


def test_moderate_error_names_its_line_and_the_error_that_remains_without_it():
    diagnosis = jmpscale.diagnose(time_steps)(jmpscale.static(1.0), NETWORK, TIMES)
    line = re.escape(place(time_steps))
    found = re.match(
        rf"{GRADIENTS_DIFFER}([\d.]+)%, in params\['first'\], which has [\d.]+% of their norm: rounding, "
        rf"which may be harmless\. {FORWARD_ALONE}{line} makes an error of ([\d.]+)%"
        rf"; with {line} in float32, it is ([\d.]+)%\. {re.escape(ONLY_A_RUN)} "
        r"Loss scales from ",
        diagnosis.summary,
    )
    error, alone, remaining = map(float, found.groups())
    assert 5 < error < 50
    assert error / 1.5 < alone < 1.5 * error
    assert remaining < 2
    assert diagnosis.lines == ()
    assert diagnosis.scaler is None


class ResNet(linen.Module):
    """A residual network with batch normalization, of which one block may overflow."""

    overflows: bool = False

    @linen.compact
    def __call__(self, x):
        def conv(x, features, stride=1):
            x = linen.Conv(features, (3, 3), (stride, stride), use_bias=False)(x)
            return linen.BatchNorm(use_running_average=False)(x)

        x = linen.relu(conv(x, 8))
        for i, (features, stride) in enumerate([(8, 1), (16, 2), (32, 2), (32, 1), (64, 2)]):
            y = conv(linen.relu(conv(x, features, stride)), features)
            if self.overflows and i == 2:
                y = overflowing(y)
            x = linen.relu(y + (x if x.shape == y.shape else conv(x, features, stride)))
        return linen.Dense(10)(x.mean((1, 2)))


def overflowing(y):
    squares = (y.astype(H) * H(1e3)) ** 2  # fault
    return y / (1 + 1e-8 * squares.astype(jnp.float32).mean())


def residual_network(overflows=False):
    """Returns a loss function in float16 and its arguments."""
    images, labels = normal(3, 8, 16, 16, 3), jnp.arange(8)
    model = ResNet(overflows)
    variables = jax.jit(model.init)(jax.random.key(0), images)

    @jmpscale.autocast
    def loss_fn(params, images):
        logits, _ = model.apply(variables | {"params": params}, images, mutable=["batch_stats"])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))

    return loss_fn, variables["params"], images


@pytest.mark.usefixtures("standard_promotion")
def test_residual_network_that_trains_as_in_float32_has_no_line_that_must_change():
    loss_fn, *args = residual_network()
    diagnosis = jmpscale.diagnose(loss_fn)(jmpscale.dynamic(2.0**10), *args)
    assert 0.05 < diagnosis.gradient_error < 0.5
    assert ": rounding, which may be harmless. Alone, the " in diagnosis.summary
    assert diagnosis.lines == ()
    low, high = map(math.log2, diagnosis.fitting_scales)
    assert low <= -6
    assert high >= 14


@pytest.mark.usefixtures("standard_promotion")
def test_overflow_in_a_residual_network_is_the_cause_and_not_its_rounding():
    loss_fn, *args = residual_network(overflows=True)
    diagnosis = jmpscale.diagnose(loss_fn)(jmpscale.dynamic(2.0**10), *args)
    assert diagnosis.summary.startswith(f"{OVERFLOW}integer_pow at {place(overflowing)} reaches ")
    assert diagnosis.lines == (place(overflowing),)


def hidden_overflow(w, x):
    h = x @ w
    squares = h.astype(H) * h.astype(H)  # fault
    return jnp.mean(h**2) + jnp.mean(jnp.minimum(30 * squares.astype(jnp.float32), 3e6) * 5e-4 * h)


def test_overflow_that_changes_a_gradient_by_less_than_half_is_a_fault():
    diagnosis = jmpscale.diagnose(hidden_overflow)(jmpscale.static(2.0**4), 14 * normal(0, 8, 8), 14 * normal(1, 16, 8))
    assert 0.05 < diagnosis.gradient_error < 0.5
    assert diagnosis.summary.startswith(f"{OVERFLOW}mul at {place(hidden_overflow)} reaches ")
    assert diagnosis.lines == (place(hidden_overflow),)


# --- Near a minimum of the loss, where the gradients are small compared with their rounding errors. ---


def small_residual(w, x):
    return jnp.mean(((x * w).astype(jnp.float32) - 1) ** 2)


def regression(params, batch):
    hidden = jnp.tanh(batch[0].astype(B) @ params["a"].astype(B))
    return jnp.mean(((hidden @ params["b"].astype(B)).astype(jnp.float32) - batch[1]) ** 2)


def near_minimum(distance):
    """Returns parameters at a distance from those that fit a batch, and the batch."""
    params, x = {"a": normal(0, 16, 32, scale=0.25), "b": normal(1, 32, 4, scale=0.2)}, normal(2, 64, 16)
    batch = x, jnp.tanh(x @ params["a"]) @ params["b"]
    return {name: p + distance * normal(3, *p.shape, scale=0.2) for name, p in params.items()}, batch


def test_error_near_a_minimum_names_its_size_elsewhere_and_no_line():
    diagnosis = jmpscale.diagnose(small_residual)(jmpscale.static(1024.0), jnp.full(3, 1.01, H), jnp.full(3, 0.99, H))
    assert diagnosis.summary.endswith(
        f"fit; yours is 2^10. {GRADIENTS_DIFFER}100%, in w (0.321% if the parameters change by 10%), near a "
        f"minimum of the loss, which differs by 100%. {ONLY_A_RUN}"
    )


@pytest.mark.parametrize("distance", [0.02, 0.002])
def test_error_of_a_step_near_a_minimum_is_not_a_fault(distance):
    def step(params, batch):
        loss, grads = jax.value_and_grad(regression)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    diagnosis = jmpscale.diagnose_step(step)(*near_minimum(distance))
    found = re.fullmatch(
        rf"{GRADIENTS_DIFFER}([\d.]+)%, in params\['[ab]'\] \(([\d.]+)% if the parameters change by 10%\), near a "
        rf"minimum of the loss(, which differs by ([\d.]+)%)?\. {re.escape(ONLY_A_RUN)}",
        diagnosis.summary,
    )
    error, elsewhere = float(found[1]), float(found[2])
    assert error > 5
    assert elsewhere < 5
    assert diagnosis.lines == ()
    loss_error = abs(diagnosis.loss / diagnosis.loss_float32 - 1)
    assert (float(found[4] or 0) > 3) == (loss_error > 0.03)


def test_scale_fits_near_a_minimum_if_the_backward_pass_is_right():
    params, batch = near_minimum(1e-4)
    loss_fn = jmpscale.autocast(lambda p, b: jnp.mean((jnp.tanh(b[0] @ p["a"]) @ p["b"] - b[1]) ** 2))
    diagnosis = jmpscale.diagnose(loss_fn)(jmpscale.static(2.0**12), params, batch)
    low, high = diagnosis.fitting_scales
    assert diagnosis.gradient_error > 0.5
    assert " if the parameters change by 10%), near a minimum of the loss" in diagnosis.summary
    assert ONLY_A_RUN in diagnosis.summary
    assert diagnosis.summary.startswith("Loss scales from ")
    assert 2.0**-24 < low < 2.0**12 < high
    assert dict(diagnosis.scale_errors)[2.0**12] == diagnosis.gradient_error
    small = jmpscale.diagnose(loss_fn)(jmpscale.static(low / 2**12), params, batch)  # all gradients are zero
    assert " It is too small: the gradients differ from float32 by " in small.summary
    assert small.fitting_scales == (low, high)


def test_error_of_the_update_follows_an_error_near_a_minimum():
    def step(params, average, batch):
        loss, grads = jax.value_and_grad(regression)(params, batch)
        average = jax.tree.map(lambda m, g: (0.9 * m.astype(jnp.float32) + 0.1 * g).astype(B), average, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m.astype(jnp.float32), params, average), average, loss

    params, batch = near_minimum(0.005)
    diagnosis = jmpscale.diagnose_step(step)(params, jmpscale.cast(params, B), batch)
    assert re.search(rf"{re.escape(ONLY_A_RUN)} The update differs from float32 by [\d.]+%\.$", diagnosis.summary)


def distances(params, x):
    """A loss that is at its minimum if all points move equally; its coordinates are rounded everywhere."""
    moved = (100 + x + params["shift"]).astype(B)  # fault
    squares = jnp.sum((moved[:, None] - moved[None]) ** 2, -1).astype(jnp.float32)
    return jnp.mean((jnp.sqrt(squares + 1e-3) - jnp.sqrt(jnp.sum((x[:, None] - x[None]) ** 2, -1) + 1e-3)) ** 2)


def close_to_the_data(w, x):
    """Has gradients of one size, whose signs are wrong while the parameters are close to the data."""
    difference = (x.astype(B) - w.astype(B)).astype(jnp.float32)  # fault
    return -jnp.mean(jnp.sqrt(difference**2 + 1e-12))


def underflowing(w, x):
    return 0.004 * jnp.mean(((x.astype(H) @ w.astype(H)).astype(jnp.float32) - x) ** 2)


X = normal(0, 64)
FAULTS_NEAR_A_MINIMUM = {  # a loss function, and its arguments near the minimum
    "coordinates": (distances, ({"shift": 1e-2 * normal(0, 32, 3)}, normal(1, 32, 3))),
    "time steps": (time_steps, (NETWORK, 20 * TIMES)),
    "close to the data": (close_to_the_data, (X * (1 + 1e-4 * normal(1, 64)), X)),
}


@pytest.mark.parametrize("row", rows(FAULTS_NEAR_A_MINIMUM))
def test_fault_near_a_minimum_names_its_line(row):
    fun, args = row
    diagnosis = jmpscale.diagnose(fun)(*args)
    assert "minimum" not in diagnosis.summary
    assert place(fun) in diagnosis.lines


def test_underflow_near_a_minimum_is_one():
    diagnosis = jmpscale.diagnose(underflowing)(jnp.eye(16) * (1 + 2.0**-10), jnp.sign(normal(1, 64, 16)))
    assert "minimum" not in diagnosis.summary
    assert [x.kind.name for x in diagnosis.findings] == ["UNDERFLOW"]


# --- The words for an error. ---


def sums_of_segments(w, x):
    messages = jax.nn.softplus(x.astype(H) @ w.astype(H) + H(1))
    sums = jax.ops.segment_sum(messages, jnp.arange(len(x)) % 2, 2)  # fault
    return jnp.mean((sums.astype(jnp.float32) / len(x)) ** 2)


def phases_of_squares(w, x):
    h = (x @ w).astype(H)
    squares = h * h  # fault
    return jnp.mean(jnp.sin(1e-2 * jnp.minimum(squares.astype(jnp.float32), 1e5)))


WORDS = {  # the loss function, its arguments, the first words, and words that are not in the summary
    "a sum that has grown": (
        sums_of_segments,
        (normal(0, 8, 8, scale=0.35), normal(2, 7000, 8)),
        rf"{LOSS_DIFFERS}[\d.]+%: rounding, not range\. The error begins at ",
        "cancel|end of training",
    ),
    "an overflow and rounding": (
        phases_of_squares,
        (200 * normal(0, 8, 8), normal(1, 16, 8)),
        r"The forward pass overflows: mul at ",
        "not range",
    ),
}


@pytest.mark.parametrize("row", rows(WORDS))
def test_summary_has_the_words_of_an_error(row):
    fun, args, begin, absent = row
    summary = jmpscale.diagnose(fun)(jmpscale.dynamic(2.0**10), *args).summary
    assert re.match(begin + re.escape(place(fun)), summary)
    assert not re.search(absent, summary)


# --- The scale of the rows. ---


def test_rows_are_at_the_present_scale_if_it_fits_with_the_lines_in_float32():
    diagnosis = jmpscale.diagnose(time_steps)(jmpscale.static(1.0), NETWORK, 20 * TIMES)
    assert diagnosis.lines == (place(time_steps),)
    assert max(row.max_abs for row in diagnosis.rows if row.pass_ == "backward") < 1
