"""diagnose_step diagnoses a training step as it is: its gradients, as diagnose does, and its update."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale

import meshes
from arrays import normal
from diagnosis_programs import H, fault_line
from messages import GRADIENTS_DIFFER, HALVED, IGNORED_SCALER, LOSS_DIFFERS
from tables import names

pytestmark = pytest.mark.usefixtures("standard_promotion")

B, F = jnp.bfloat16, jnp.float32
Kind = jmpscale.FindingKind
W, X, Y = normal(0, 16, 4), normal(1, 32, 16), normal(2, 32, 4)
TX = jmpscale.with_loss_scaling(optax.adam(1e-3))


# --- The gradients, with a scaler. ---


def mean_square(w, x, y):
    return 1e-9 * jnp.mean((jnp.tanh(x.astype(H) @ w.astype(H)).astype(F) - y) ** 2)


def train_step(w, opt_state, batch):
    x, y = jax.tree.map(lambda x: x * 1.0, batch)

    def loss_fn(w):
        return mean_square(w, x, y)

    loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, w)
    updates, opt_state = TX.update(grads, opt_state, w, value=loss)
    return optax.apply_updates(w, updates), opt_state, loss


def functional(w, scaler, batch):
    loss, grads = jax.value_and_grad(lambda w: jmpscale.scale(scaler, mean_square(w, *batch)))(w)
    grads, finite = jmpscale.unscale_and_check(scaler, grads)
    w = jmpscale.apply_if(finite, lambda w: w - 1e-3 * grads, w)
    return w, jmpscale.update(scaler, finite), loss / scaler.loss_scale


def accumulated(w, opt_state, batch):
    def add(total, part):
        loss, grads = jmpscale.value_and_grad(mean_square)(opt_state, w, *part)
        return total + grads, loss

    parts = jax.tree.map(lambda x: x.reshape(1, *x.shape), batch)
    grads, losses = jax.lax.scan(add, jnp.zeros_like(w), parts)
    updates, opt_state = TX.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state, losses.mean()


def several_steps(w, opt_state, batch):
    def body(carry, _):
        w, opt_state, loss = train_step(*carry, batch)
        return (w, opt_state), loss

    (w, opt_state), losses = jax.lax.scan(body, (w, opt_state), None, length=2)
    return w, opt_state, losses[0]


def in_branch(w, opt_state, batch):
    return jax.lax.cond(batch[0][0, 0] < 1e6, train_step, lambda w, s, b: (w, s, jnp.float32(0)), w, opt_state, batch)


def by_hand(w, opt_state, batch):
    grads = jax.grad(jmpscale.scaled_backward(mean_square, opt_state))(w, *batch)
    updates, opt_state = TX.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state


STEPS = {
    "plain": train_step,
    "compiled": jax.jit(train_step),
    "donated": jax.jit(train_step, donate_argnums=(0, 1)),
    "nested": jax.jit(lambda *args: jax.jit(train_step)(*args)),
    "accumulated": jax.jit(accumulated),
    "in a branch": jax.jit(in_branch),
    "scaled_backward": by_hand,
    "functional": functional,
}


@pytest.mark.parametrize("name", names(STEPS, default={"accumulated"}))
def test_diagnose_step_returns_the_diagnosis_of_its_gradient(name):
    scaler = jmpscale.dynamic()
    expected = jmpscale.diagnose(lambda w: mean_square(w, X, Y))(scaler, W)
    w, opt_state = jnp.array(W), jmpscale.dynamic() if name == "functional" else TX.init(W)
    before = jax.tree.map(np.asarray, opt_state)
    found = jmpscale.diagnose_step(STEPS[name])(w, opt_state, (X, Y))
    assert found.fitting_scales == expected.fitting_scales
    assert found.summary.replace(", in args[0]", ", in w") == expected.summary
    assert found.loss == (None if name == "scaled_backward" else expected.loss)
    assert [row.pass_ for row in found.rows] == ["forward", "backward"]
    assert found.changes == ()
    assert not w.is_deleted()
    assert jax.tree.all(jax.tree.map(np.array_equal, before, opt_state))


@pytest.mark.full
def test_diagnose_step_does_not_compare_a_gradient_that_the_loss_contains():
    """The backward pass of an inner gradient unscales its cotangents, which therefore depend on the scale."""

    def loss_fn(w, scaler):
        inner = jax.grad(
            jmpscale.scaled_backward(lambda x: jnp.mean(jnp.tanh(x.astype(H) @ w.astype(H)).astype(F)), scaler)
        )(X)
        return jnp.mean((1e2 * inner) ** 2)

    def step(w, scaler):
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, w, scaler)
        return w - 1e-3 * grads, jmpscale.update(scaler, jmpscale.all_finite(grads)), loss

    diagnosis = jmpscale.diagnose_step(step)(W, jmpscale.dynamic(2.0**8))
    assert diagnosis.gradient_error < 0.01
    assert diagnosis.lines == ()
    low, high = diagnosis.fitting_scales
    assert low < 2.0**8 < high


@pytest.mark.full
def test_diagnose_step_names_a_line_that_makes_gradients_and_losses_infinite_once():
    def loss_fn(w, x):
        return jnp.mean((1e4 * x.astype(H) @ w.astype(H)).astype(F) ** 2)

    def step(w, opt_state, x):
        losses, grads = jax.vmap(jmpscale.value_and_grad(loss_fn), (None, None, 0))(opt_state, w, x)
        updates, opt_state = TX.update(grads.mean(0), opt_state, w)
        return optax.apply_updates(w, updates), opt_state, losses

    diagnosis = jmpscale.diagnose_step(step)(W, TX.init(W), X)
    (line,) = diagnosis.lines
    assert diagnosis.summary.count(line) == 2  # the reason, and the remedy
    assert math.inf in {x.error for x in diagnosis.changes if x.name == "result[2]"}


@pytest.mark.full
@jax.custom_vjp
def _track(x, amax, gradient_amax):
    """Returns x; the "gradients" are the largest magnitudes in x, and in the gradient of x."""
    return x


_track.defvjp(
    lambda x, *_: (x, jnp.max(jnp.abs(x))), lambda amax, gradient: (gradient, amax, jnp.max(jnp.abs(gradient)))
)


def _tracked_step(name, **options):
    """Returns a step that stores one of the two magnitudes, and its state."""

    def loss_fn(w, stats, x, y):
        tracked = _track(x, stats.get("amax", F(1)), stats.get("gradient_amax", F(1)))
        return jnp.mean((jnp.tanh(tracked.astype(H) @ w.astype(H)).astype(F) - y) ** 2)

    def step(w, stats, opt_state):
        grad_fn = jmpscale.value_and_grad(loss_fn, argnums=(0, 1), **options)
        loss, (grads, stats) = grad_fn(opt_state, w, stats, X, Y)
        updates, opt_state = TX.update(grads, opt_state, w, value=loss)
        return {"w": optax.apply_updates(w, updates), "stats": stats, "opt_state": opt_state, "loss": loss}

    return step, (W, {name: F(1)}, TX.init(W))


TRACKED = {  # the value that the step stores, and options
    "unscaled": ("amax", {}),
    "named": ("amax", {"overwrite_with_gradient": "[1]['amax']"}),
    "of the gradient": ("gradient_amax", {}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", names(TRACKED, default={"unscaled", "named"}))
def test_diagnose_step_names_values_that_the_scale_does_not_multiply(name):
    stored, options = TRACKED[name]
    step, state = _tracked_step(stored, **options)
    diagnosis = jmpscale.diagnose_step(step)(*state)
    assert diagnosis.summary.startswith(f"In the gradient of float32[], {HALVED}") == (name == "unscaled")
    assert (HALVED in diagnosis.summary) == (name == "unscaled")
    assert diagnosis.gradient_error < 0.01
    assert diagnosis.fitting_scales[1] >= 2.0**16
    assert diagnosis.scaler is None


@pytest.mark.full
def test_diagnose_names_values_that_the_scale_does_not_multiply_if_there_are_no_others():
    def loss_fn(amax, x):
        return jnp.mean((_track(x, amax, F(1)).astype(H) * H(2)).astype(F))

    diagnosis = jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), F(1), X)
    assert diagnosis.summary == f"In amax, {HALVED}"
    assert diagnosis.scaler is None


@pytest.mark.full
def test_diagnose_step_names_gradients_that_are_unscaled_without_a_scaled_loss():
    def step(w, opt_state):
        loss, grads = jax.value_and_grad(mean_square)(w, X, Y)
        updates, opt_state = TX.update(jmpscale.unscale(opt_state, grads), opt_state, w, value=loss)
        return optax.apply_updates(w, updates), opt_state, loss

    diagnosis = jmpscale.diagnose_step(step)(W, TX.init(W))
    assert diagnosis.summary.startswith(f"In w, {HALVED}")
    assert "loss scales from" not in diagnosis.summary.lower()


@pytest.mark.full
def test_diagnose_step_of_several_steps_sums_their_gradients():
    found = jmpscale.diagnose_step(jax.jit(several_steps))(W, TX.init(W), (X, Y))
    expected = jmpscale.diagnose(lambda w: mean_square(w, X, Y))(jmpscale.dynamic(), W)
    assert found.loss == expected.loss
    assert found.fitting_scales == expected.fitting_scales
    assert found.gradient_error == pytest.approx(expected.gradient_error, rel=0.5)


@pytest.mark.full
def test_diagnose_step_names_the_gradients_after_the_parameters_that_they_change():
    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params["a"] @ params["b"]) ** 2) + jnp.mean(_cancelling(x @ params["c"]))

    def step(params, average, x):
        grads = jax.grad(loss_fn)(params, x)
        norm = optax.global_norm(grads)
        params = jax.tree.map(lambda p, g: p - 1e-3 * g / norm, params, grads)
        return params, jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, average, params)

    params = {name: normal(seed, 8, 8) for seed, name in enumerate("abc")}
    diagnosis = jmpscale.diagnose_step(step)(params, params, normal(4, 16, 8))
    assert "in params['c'], which has " in diagnosis.summary
    assert diagnosis.state == ("params", "average")


def _cancelling(x):
    return ((x + 256).astype(B).astype(F) - 256) ** 2


# --- What the update makes of the gradients. ---


def regression(params, batch, dtype=B):
    x, y = batch
    hidden = jnp.tanh(x.astype(dtype) @ params["a"].astype(dtype))
    return jnp.mean(((hidden @ params["b"].astype(dtype)).astype(F) - y) ** 2)


BATCH = normal(5, 64, 16), jnp.sin(normal(5, 64, 16)[:, :1])


def parameters(dtype=F):
    return {"a": normal(6, 16, 32, scale=0.25).astype(dtype), "b": normal(7, 32, 1, scale=0.2).astype(dtype)}


def optimized(tx):
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(regression)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)  # fault
        return params, opt_state, loss

    return step


def averaged(decay):
    def step(params, average, batch):
        loss, grads = jax.value_and_grad(regression)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        average = jax.tree.map(lambda e, p: e * B(decay) + p.astype(B) * B(1 - decay), average, params)  # fault
        return params, average, loss

    return step


def second_moment(params, nu, batch):
    loss, grads = jax.value_and_grad(regression)(params, batch)
    nu = jax.tree.map(lambda v, g: (0.999 * v + 0.001 * g**2).astype(B), nu, grads)  # fault
    params = jax.tree.map(lambda p, g, v: p - 1e-3 * g / (jnp.sqrt(v.astype(F)) + 1e-8), params, grads, nu)
    return params, nu, loss


def accumulating(params, batches):
    def body(total, batch):
        loss, grads = jax.value_and_grad(regression)(params, batch)
        return jax.tree.map(lambda t, g: t + g.astype(B), total, grads), loss  # fault

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, B), params)
    total, losses = jax.lax.scan(body, zeros, batches)
    return jax.tree.map(lambda p, t: p - 1e-4 * t.astype(F), params, total), losses.mean()


def clipped(params, batch):
    loss, grads = jax.value_and_grad(regression)(params, batch)
    grads = jax.tree.map(lambda g: g * 1e3, grads)
    norm = jnp.sqrt(sum(jnp.sum(g.astype(H) ** 2) for g in jax.tree.leaves(grads)))  # fault
    return jax.tree.map(lambda p, g: p - g / (norm.astype(F) + 1.0), params, grads), loss


def recurrent(params, state, batch):
    def loss_fn(params):
        new = state["h"] * B(0.999) + (B(0.001) * batch[0].astype(B).mean(0))  # fault
        return regression(params, batch) + 1e-3 * jnp.sum(new.astype(F)), {"h": new}

    (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, loss


def ratio(params, batch):
    loss, grads = jax.value_and_grad(regression)(params, batch)
    after = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    values = [1e2 + jnp.sum(p["a"] ** 2) for p in (params, after)]
    before, now = [x.astype(B) for x in values]  # fault
    return after, {"loss": loss, "ratio": before.astype(F) - now.astype(F)}


def counter(state, batch):
    loss, grads = jax.value_and_grad(regression)(state["params"], batch)
    count = state["count"] + 1  # fault
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "count": count}, loss


def noisy(width):
    """Stochastic rounding, if noise is as wide as the distance between two numbers of bfloat16."""

    def noise(key, x):
        last_place = jnp.exp2(jnp.floor(jnp.log2(jnp.abs(x) + 1e-30)) - 7)
        return width * last_place * (jax.random.uniform(key, x.shape) - 0.5)

    def step(params, key, batch):
        loss, grads = jax.value_and_grad(regression)(params, batch)
        key, draw = jax.random.split(key)
        new = jax.tree.map(lambda p, g: p - 1e-3 * g.astype(F), params, grads)
        return jax.tree.map(lambda p: (p + noise(draw, p)).astype(B), new), key, loss  # fault

    return step


def momentum_and_decay(params, momentum, batch):
    """Each of two leaves reads the other one, but does not take what rounding removes."""
    loss, grads = jax.value_and_grad(regression)(params, batch)
    momentum = jax.tree.map(lambda m, g, p: B(0.9) * m + g + B(1e-4) * p, momentum, grads, params)
    return jax.tree.map(lambda p, m: p - B(1e-3) * m, params, momentum), momentum, loss  # fault


ZEROS = jax.tree.map(jnp.zeros_like, parameters(B))
SAME_BATCH = jax.tree.map(lambda x: np.broadcast_to(x, (600, *x.shape))[:, :4], BATCH)
ADAM = optax.adam(1e-4)
NEAR = jax.tree.map(lambda p: (p + 0.02 * normal(8, *p.shape)).astype(B), parameters())
FAULTS = {  # a step, its arguments, the name of the leaf or result, and its dtype if it is a leaf in half precision
    "parameters": (
        optimized(optax.adam(1e-4)),
        (parameters(B), optax.adam(1e-4).init(parameters(B)), BATCH),
        "params['",
        B,
    ),
    "average": (averaged(0.999), (parameters(), NEAR, BATCH), "average['", B),
    "average of 0.99": (averaged(0.99), (parameters(), NEAR, BATCH), "average['", B),
    "late second moment": (second_moment, (parameters(), jax.tree.map(jnp.ones_like, parameters(B)), BATCH), "nu['", B),
    "accumulation": (accumulating, (parameters(), SAME_BATCH), "params['", None),
    "norm": (clipped, (parameters(), BATCH), "params['", None),
    "recurrent state": (recurrent, (parameters(), {"h": jnp.ones(16, B)}, BATCH), "state['h']", B),
    "counter": (counter, ({"params": parameters(), "count": jnp.array(256, B)}, BATCH), "state['count']", B),
    "result": (ratio, (parameters(), BATCH), "result[1]['ratio']", None),
    "momentum and decay": (momentum_and_decay, (parameters(B), ZEROS, BATCH), "params['", B),
    "narrow noise": (noisy(0.1), (parameters(B), jax.random.key(0), BATCH), "params['", B),
}


@pytest.mark.parametrize("name", names(FAULTS, default={"momentum and decay"}))
def test_diagnose_step_names_the_leaf_and_the_line_of_an_update_that_loses_digits(name):
    step, args, leaf, dtype = FAULTS[name]
    diagnosis = jmpscale.diagnose_step(jax.jit(step))(*args)
    line = fault_line(step)
    worst = max((x for x in diagnosis.changes if x.name.startswith(leaf)), key=lambda x: x.error)
    assert worst.error > (0.5 if dtype else 0.2)
    assert worst.name in diagnosis.summary.partition(":")[0]
    (found,) = diagnosis.lines
    assert f"test_diagnose_step.py:{line} (" in found
    assert found in diagnosis.summary
    keeps = re.search(r": keep \w+ in float32, not bfloat16\. The change is made at ", diagnosis.summary)
    assert bool(keeps) == (dtype is not None)
    assert "oss scale" not in diagnosis.summary
    assert diagnosis.fitting_scales is None
    assert {row.line for row in diagnosis.rows if row.in_lines} == {found}


def small_changes(params, average, batch):
    grads = jax.grad(regression)(params, batch)
    params = jax.tree.map(lambda p, g: p - B(1e-5) * g, params, grads)
    return params, jax.tree.map(lambda e, p: e + B(1e-3) * (p - e), average, params)


@pytest.mark.full
def test_diagnose_step_names_each_part_of_the_state_that_loses_digits():
    diagnosis = jmpscale.diagnose_step(small_changes)(parameters(B), NEAR, BATCH)
    in_one = jmpscale.diagnose_step(lambda state, batch: small_changes(*state, batch))((parameters(B), NEAR), BATCH)
    for summary, parts in ((diagnosis.summary, ("params", "average")), (in_one.summary, ("state[0]", "state[1]"))):
        first = next(part for part in parts if f"of the change of {part}[" in summary)
        (other,) = set(parts) - {first}
        assert f" (and 3 other leaves, also of {other}): keep them in float32, not bfloat16." in summary


@pytest.mark.full
def test_diagnose_step_names_a_result_that_is_wrong_beside_the_state():
    def step(total, x):
        return total + jnp.mean(x).astype(H), jnp.sum((100 * x.astype(H)) ** 2)

    summary = jmpscale.diagnose_step(step)(jnp.asarray(30000, H), X).summary
    assert summary.startswith(
        "The step loses 100% of the change of total: keep it in float32, not float16. result[1] is not finite, but is "
        "in float32. They are made at test_diagnose_step.py:"
    )


@pytest.mark.full
def test_diagnose_step_names_the_line_that_calls_a_wrapped_optimizer():
    tx = jmpscale.with_loss_scaling(optax.chain(optax.ema(1 - 2.0**-8, accumulator_dtype=B), optax.sgd(0.1)))

    def step(w, opt_state, x, y):
        loss, grads = jmpscale.value_and_grad(mean_square)(opt_state, w, x, y)
        updates, opt_state = tx.update(grads, opt_state, w, value=loss)  # fault
        return w + updates, opt_state

    opt_state = tx.init(W)
    average, *rest = opt_state.inner_state
    average = average._replace(ema=jnp.full_like(W, 1.25, B))  # whose change is 0.6 of its last place
    opt_state = opt_state._replace(inner_state=(average, *rest))
    diagnosis = jmpscale.diagnose_step(step)(W, opt_state, X, Y)
    assert diagnosis.lines == (f"test_diagnose_step.py:{fault_line(step)} (step)",)


@pytest.mark.full
def test_diagnose_step_reports_an_average_without_decay_once():
    def step(w, opt_state, x, y):
        loss, grads = jmpscale.value_and_grad(mean_square)(opt_state, w, x, y)
        updates, opt_state = TX.update(grads, opt_state, w, value=loss)
        return w + updates, opt_state

    opt_state = TX.init(W)
    adam, *rest = opt_state.inner_state
    narrow = adam._replace(nu=jnp.full_like(W, 1e-3, B))  # after many steps, when it does not change in float32, too
    opt_state = opt_state._replace(inner_state=(narrow, *rest))
    diagnosis = jmpscale.diagnose_step(step)(W, opt_state, X, Y)
    assert [x.kind for x in diagnosis.findings if x.names == ("opt_state.inner_state[0].nu",)] == [Kind.STALLED]


@pytest.mark.full
def test_diagnose_step_measures_the_update_apart_from_the_rounding_of_the_gradients():
    def step(params, average, batch):
        loss, grads = jax.value_and_grad(regression)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, jax.tree.map(lambda e, p: 0.999 * e + 0.001 * p, average, params), loss

    diagnosis = jmpscale.diagnose_step(step)(parameters(), parameters(), BATCH)
    assert diagnosis.gradient_error > 0
    assert diagnosis.changes == ()  # nothing but the gradients rounds


@pytest.mark.full
def test_diagnose_step_finds_the_loss_among_results_with_other_names():
    def step(params, batch):
        (loss, norm), grads = jax.value_and_grad(lambda p, b: (regression(p, b), optax.global_norm(p)), has_aux=True)(
            params, batch
        )
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, {"accuracy": norm, "loss": loss, "gradient_norm": optax.global_norm(grads)}

    assert jmpscale.diagnose_step(step)(parameters(), BATCH).loss == pytest.approx(
        float(regression(parameters(), BATCH))
    )
    no_loss = jmpscale.diagnose_step(lambda p, b: step(p, b)[0])(parameters(), BATCH)
    assert no_loss.loss is None
    assert no_loss.loss_float32 is None


def test_diagnose_step_without_a_scaler_says_to_scale_a_loss_whose_gradients_underflow():
    def step(w, batch):
        loss, grads = jax.value_and_grad(mean_square)(w, *batch)
        return w - grads, loss

    summary = jmpscale.diagnose_step(step)(W, (X, Y)).summary
    assert summary.startswith("The backward pass underflows: ")
    assert "Scale the loss, with jmpscale.value_and_grad and a scaler, or by a larger number if" in summary


@pytest.mark.full
def test_diagnose_step_names_the_line_whose_backward_pass_underflows_most():
    def loss_fn(w, x):
        small = jnp.mean((x.astype(H) @ w["a"].astype(H)).astype(F)) * 2e-6
        smaller = jnp.mean((x.astype(H) @ w["b"].astype(H)).astype(F)) * 1e-7
        larger = jnp.mean((x.astype(H) @ w["c"].astype(H)).astype(F)) * 1e-5
        return small + smaller + larger

    def step(w, x):
        loss, grads = jax.value_and_grad(loss_fn)(w, x)
        return jax.tree.map(lambda w, g: w - g, w, grads), loss

    summary = jmpscale.diagnose_step(step)(dict.fromkeys("abc", W), X).summary
    line = loss_fn.__code__.co_firstlineno + 2
    assert f" Alone, the backward pass of test_diagnose_step.py:{line} (loss_fn) makes an error of 100%." in summary


def scaled_by_a_number(scale, scaler):
    """Returns a step whose loss is scaled by a number, with the state of its optimizer."""
    tx = jmpscale.with_loss_scaling(optax.sgd(1e-3), scaler)

    def step(w, opt_state, batch):
        loss, grads = jax.value_and_grad(jmpscale.scaled_backward(mean_square, scale))(w, *batch)
        updates, opt_state = tx.update(grads, opt_state, w, value=loss)
        return optax.apply_updates(w, updates), opt_state, loss

    return step, tx.init(W)


@pytest.mark.full
def test_diagnose_step_of_a_loss_that_is_scaled_by_a_number_is_one_without_a_scaler():
    step, opt_state = scaled_by_a_number(2.0**30, jmpscale.static(1.0))
    found = jmpscale.diagnose_step(jax.jit(step))(W, opt_state, (X, Y))
    assert re.match(rf"{GRADIENTS_DIFFER}0\.\d+%, in w\.", found.summary)
    assert (found.loss_scale, found.fitting_scales, found.scaler) == (1.0, None, None)


@pytest.mark.full
def test_diagnose_step_names_a_dynamic_scaler_whose_scale_changes_no_gradient():
    step, opt_state = scaled_by_a_number(2.0**30, jmpscale.dynamic())
    found = jmpscale.diagnose_step(step)(W, opt_state, (X, Y))
    assert re.fullmatch(rf"{GRADIENTS_DIFFER}0\.\d+%, in w\. {IGNORED_SCALER}.*", found.summary)
    assert found.scaler is None


@pytest.mark.full
def test_diagnose_step_says_to_scale_by_a_larger_number_if_gradients_underflow():
    step, opt_state = scaled_by_a_number(2.0, jmpscale.static(1.0))
    summary = jmpscale.diagnose_step(step)(W, opt_state, (X, Y)).summary
    assert summary.startswith("The backward pass underflows: ")
    assert "Scale the loss, with jmpscale.value_and_grad and a scaler, or by a larger number if" in summary


def clipped_objective(w, x, actions, advantages, old):
    """Is near zero, because the advantages nearly cancel; the ratios depend on small differences."""
    logits = jnp.tanh(x.astype(B) @ w["a"].astype(B)) @ w["b"].astype(B)
    log_ratio = (jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0] - old.astype(B)).astype(F)
    ratio = jnp.exp(log_ratio)
    chosen = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return -jnp.mean(chosen) + 0.1 * jnp.mean(jnp.exp(-log_ratio) - 1 + log_ratio)


@pytest.mark.full
def test_diagnose_step_reports_the_error_of_a_loss_that_rounded_arguments_change_as_much():
    w, x = {"a": normal(0, 16, 64, scale=0.25), "b": normal(1, 64, 128, scale=0.25)}, normal(2, 512, 16)
    actions = np.random.default_rng(3).integers(0, 128, 512)
    old = jax.nn.log_softmax(jnp.tanh(x @ w["a"]) @ w["b"])[np.arange(512), actions] + normal(4, 512, scale=0.01)
    batch = x, actions, np.where(actions < 64, 0.1, -0.1).astype(F), old

    def step(w, batch):
        loss, grads = jax.value_and_grad(clipped_objective)(w, *batch)
        return jax.tree.map(lambda w, g: w - 1e-2 * g, w, grads), {"loss": loss}

    found = jmpscale.diagnose_step(step)(w, batch)
    error = abs(found.loss - found.loss_float32) / abs(found.loss_float32)
    told = re.search(rf"{LOSS_DIFFERS}([\d.]+)%; rounding only the arguments changes it by ([\d.]+)%\.", found.summary)
    assert found.lines == ()
    assert found.summary.startswith(GRADIENTS_DIFFER)
    assert error > 0.05
    assert float(told[1]) == pytest.approx(100 * error, rel=0.02)
    assert float(told[2]) > 3


@pytest.mark.full
def test_diagnose_step_names_a_leaf_that_changes_only_as_written():
    def step(state, x):
        return state * 3 / 3, x.mean()

    state = 1 + jnp.arange(64, dtype=B) / 128
    summary = jmpscale.diagnose_step(step)(state, jnp.ones(4)).summary
    assert summary.startswith("The step changes state, and does not in float32: keep it in float32, not bfloat16. ")


@pytest.mark.full
def test_diagnose_step_compares_the_update_in_a_loop_whose_condition_reads_the_parameters():
    step = optimized(optax.adam(1e-4))

    def is_finite(carry):
        return (carry[0] < 2) & jnp.isfinite(carry[1]["a"]).all()

    def run(params, opt_state, batch):
        def body(carry):
            params, opt_state, _ = step(*carry[1:3], batch)
            return carry[0] + 1, params, opt_state

        return jax.lax.while_loop(is_finite, body, (0, params, opt_state))[1:]

    params = parameters(B)
    diagnosis = jmpscale.diagnose_step(run)(params, optax.adam(1e-4).init(params), BATCH)
    errors = {x.name: x.error for x in diagnosis.changes}
    assert min(errors["params['a']"], errors["params['b']"]) > 0.5


@pytest.mark.full
@pytest.mark.parametrize("form", ["float32", "half", "infinite"])
def test_diagnose_step_runs_a_loop_before_the_gradients_once(form):
    runs = []

    def count(x):
        runs.append(1)
        return x

    def rollout(x):
        dtype = B if form == "half" else F

        def move(x, _):
            x = jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return jnp.tanh(1.1 * x.astype(dtype)).astype(F), x

        last, states = jax.lax.scan(move, x, None, length=3)
        return last + states.mean() * 0, last

    @jax.jit
    def step(w, opt_state, x, y):
        x, last = rollout(x)
        loss, grads = jmpscale.value_and_grad(mean_square)(opt_state, w, jnp.clip(x, -1, 1), y)
        updates, opt_state = TX.update(grads, opt_state, w, value=loss)
        return optax.apply_updates(w, updates), opt_state, loss, last

    x = X.at[0, 0].set(jnp.inf if form == "infinite" else 1.0)
    diagnosis = jmpscale.diagnose_step(step)(W, TX.init(W), x, Y)
    if form == "float32":
        assert len(runs) == 3
        assert diagnosis.lines == ()
    elif form == "half":
        assert len(runs) > 3
    else:
        assert "x" in diagnosis.summary
    assert ("Infinities or NaN in x " in diagnosis.summary) == (form == "infinite")


def test_diagnose_step_says_that_no_argument_is_returned():
    def step(params, batch):
        return jax.value_and_grad(regression)(params, batch)

    diagnosis = jmpscale.diagnose_step(step)(parameters(), BATCH)
    assert diagnosis.state == ()
    assert " No argument is returned with its structure and types, so no update was compared. " in diagnosis.summary
    update = jmpscale.diagnose_step(lambda params, batch: jax.tree.map(jnp.subtract, params, step(params, batch)[1]))
    assert "No argument is returned" not in update(parameters(), BATCH).summary


@pytest.mark.full
def test_diagnose_step_without_a_gradient_compares_the_update():
    def step(state, x):
        return state * B(0.999) + B(0.001) * x.astype(B), x.mean()

    summary = jmpscale.diagnose_step(step)(jnp.ones(4, B), jnp.full(4, 2.0)).summary
    assert summary.startswith("The step loses 100% of the change of state: keep it in float32, not bfloat16. ")


def test_diagnose_step_without_a_gradient_says_one_sentence_of_a_healthy_update():
    def step(w, x):
        noise = normal(9, *w.shape)
        losses = [jnp.mean((x.astype(B) @ (w + d * noise).astype(B)).astype(F) ** 2) for d in (0.1, -0.1)]
        return w - 1e-2 * (losses[0] - losses[1]) * noise, losses[0]

    summary = jmpscale.diagnose_step(step)(W, X).summary
    assert re.fullmatch(r"The step computes no gradient, and its update differs from float32 by [\d.]+%\.", summary)


def in_four(tx):
    return optax.MultiSteps(tx, 4)


def warmed_up(tx):
    return optax.chain(tx, optax.scale_by_schedule(optax.linear_schedule(0.0, 1.0, 10)))


@pytest.mark.parametrize("change", [pytest.param(in_four, marks=pytest.mark.full), warmed_up])
def test_diagnose_step_names_leaves_that_do_not_change_in_this_step(change):
    tx = change(optax.sgd(0.3))
    params = parameters(B)
    diagnosis = jmpscale.diagnose_step(optimized(tx))(params, tx.init(params), BATCH)
    assert diagnosis.summary.endswith("do not change in this step: diagnose one in which they change.")
    [finding] = diagnosis.findings
    assert (finding.kind, finding.names) == (Kind.NOT_COMPARED, ("params['a']", "params['b']"))


# --- What no comparison of two runs shows. ---


@pytest.mark.full
def test_diagnose_step_names_a_decay_that_hyperparameters_hold_in_half_precision():
    tx = optax.inject_hyperparams(optax.adam)(1e-2)
    params = parameters(B)
    summary = jmpscale.diagnose_step(optimized(tx))(params, tx.init(params), BATCH).summary
    assert summary.startswith("opt_state.inner_state[0].nu['a'] (and 1 other leaf) will stop moving: ")
    assert "multiplies it by opt_state.hyperparams['b2'], which is 1 in bfloat16, as 0.999 is. " in summary
    assert "Keep them and opt_state.hyperparams['b2'] in float32. " in summary


def decayed(factor, dtype=B):
    def step(params, batch):
        loss, grads = jax.value_and_grad(regression)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return jax.tree.map(lambda p: (p.astype(dtype) * dtype(factor)).astype(F), params), loss  # fault

    return step


@pytest.mark.parametrize(("factor", "dtype"), [(0.999, B), (0.9999, H)], ids=["bfloat16", "float16"])
def test_diagnose_step_names_a_decay_that_rounds_to_1(factor, dtype):
    step, name = decayed(factor, dtype), np.dtype(dtype).name
    diagnosis = jmpscale.diagnose_step(step)(parameters(), BATCH)
    line = f"test_diagnose_step.py:{fault_line(step)} (step)"
    assert diagnosis.summary.startswith(
        f"params['a'] (and 1 other leaf) does not decay: each step multiplies it by a constant that is 1 in {name}, as "
        f"{factor} is. Compute {line} in float32. "
    )
    [finding] = diagnosis.findings
    assert finding == jmpscale.DiagnosisFinding(Kind.LOST_DECAY, ("params['a']", "params['b']"), (line,), name)


def bfloat16_average(decay, form):
    def step(state, batch):
        loss, grads = jax.value_and_grad(regression)(state["params"], batch)
        square = jax.tree.map(lambda g: (g**2).astype(B), grads)
        if form == "sum":
            nu = jax.tree.map(lambda v, g: decay * v + (1 - decay) * g, state["nu"], square)
        elif form == "difference":
            nu = jax.tree.map(lambda v, g: v + (1 - decay) * (g - v), state["nu"], square)
        else:
            new = jax.tree.map(lambda v, g: (decay * v.astype(F) + (1 - decay) * g).astype(B), state["nu"], square)
            nu = jmpscale.select_tree(jnp.isfinite(loss), new, state["nu"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "nu": nu}, loss

    return step


@pytest.mark.parametrize(
    "form", ["sum", *(pytest.param(form, marks=pytest.mark.full) for form in ("difference", "in float32, gated"))]
)
def test_diagnose_step_names_an_average_that_will_stop_moving_at_the_first_step(form):
    state = {"params": parameters(), "nu": jax.tree.map(jnp.zeros_like, parameters(B))}
    diagnosis = jmpscale.diagnose_step(bfloat16_average(0.999, form))(state, BATCH)
    assert diagnosis.summary.startswith(
        "state['nu']['a'] (and 1 other leaf) will stop moving: each step multiplies it by "
    )
    assert "Keep them in float32. " in diagnosis.summary
    names = ("state['nu']['a']", "state['nu']['b']")
    assert diagnosis.findings == (jmpscale.DiagnosisFinding(Kind.STALLED, names, dtype="bfloat16"),)


@pytest.mark.full
def test_diagnose_step_names_an_average_that_will_stop_moving_in_a_loop():
    step = bfloat16_average(0.999, "sum")
    state = {"params": parameters(), "nu": ZEROS}

    def run(state, batches):
        return jax.lax.scan(step, state, batches)

    summary = jmpscale.diagnose_step(run)(state, jax.tree.map(lambda x: jnp.stack([x, x]), BATCH)).summary
    assert "state['nu']['a'] (and 1 other leaf) will stop moving: each step multiplies it by a constant " in summary


@pytest.mark.parametrize("decay", [1e-5, 1e-2])
def test_diagnose_step_names_a_weight_decay_that_is_lost(decay):
    def step(params, batch):
        loss, grads = jax.value_and_grad(regression)(params, batch)
        return jax.tree.map(lambda p, g: p - g - B(decay) * p, params, grads), loss

    summary = jmpscale.diagnose_step(step)(parameters(B), BATCH).summary
    assert ("The weight decay of params['a'] (and 1 other leaf) is lost where gradients " in summary) == (decay < 1e-3)
    assert "will stop moving" not in summary


def corrected(decay):
    """A bias correction in bfloat16, and a warm-up that begins at zero."""

    def step(params, count, batch):
        loss, grads = jax.value_and_grad(regression)(params, batch)
        count = count + 1
        correction = 1 - B(decay) ** count.astype(B)  # fault
        rate = B(0.1) * (count - 1).astype(B) / B(10)
        grads = jax.tree.map(lambda g: rate.astype(F) * g / (correction.astype(F) + 0.1), grads)
        return jax.tree.map(lambda p, g: p - g * (correction > 0), params, grads), count, loss

    return step


def test_diagnose_step_names_a_constant_that_keeps_parameters_from_changing():
    step = corrected(0.999)
    diagnosis = jmpscale.diagnose_step(step)(parameters(), jnp.int32(4), BATCH)
    (line,) = diagnosis.lines
    assert f":{fault_line(step)} (" in line
    assert diagnosis.summary.startswith(
        f"params['a'] (and 1 other leaf) do not change, in float32 either, because a constant at {line} is rounded to "
        "bfloat16. Compute with constants in float32 there."
    )


@pytest.mark.full
def test_diagnose_step_names_the_one_leaf_that_a_constant_keeps_from_changing():
    def step(w, count):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(w**2))(w.astype(F))
        correction = 1 - B(0.999) ** count.astype(B)
        return w - (grads * correction.astype(F)).astype(B), count + 1, loss

    summary = jmpscale.diagnose_step(step)(jnp.ones(8, B), jnp.int32(4)).summary
    assert summary.startswith("w does not change, in float32 either, because a constant at test_diagnose_step.py:")
    assert " is rounded to bfloat16. Keep it in float32, or compute with constants in float32 there." in summary


@pytest.mark.full
def test_diagnose_step_does_not_name_a_constant_at_the_start_of_a_warm_up():
    diagnosis = jmpscale.diagnose_step(corrected(0.9))(parameters(), jnp.int32(0), BATCH)
    assert diagnosis.lines == ()
    assert "constant" not in diagnosis.summary


# --- Errors. ---


@pytest.mark.full
def test_diagnose_of_a_loss_with_collectives_has_a_remedy():
    def loss_fn(w, x, y):
        return jax.lax.pmean(mean_square(w, x, y), "data")

    with pytest.raises(NameError) as caught:
        jmpscale.diagnose(loss_fn)(TX.init(W), W, X, Y)
    (note,) = (note for note in caught.value.__notes__ if "jax.vmap(loss_fn, " in note)
    mapped = jax.vmap(loss_fn, in_axes=None, out_axes=None, axis_name="data", axis_size=1)
    assert 'jax.vmap(loss_fn, in_axes=None, out_axes=None, axis_name="data", axis_size=1)' in note
    expected = jmpscale.diagnose(mean_square)(TX.init(W), W, X, Y)
    assert jmpscale.diagnose(mapped)(TX.init(W), W, X, Y).summary == expected.summary


@pytest.mark.full
def test_diagnose_step_of_arrays_on_explicit_axes_without_their_mesh_has_a_remedy():
    mesh = meshes.make_mesh(jax.sharding.AxisType.Explicit, data=4)
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))

    def step(w, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x.astype(B) @ w.astype(B)).astype(F) ** 2))(w)
        return w - 0.1 * grads, loss

    with pytest.raises(ValueError, match=r"got an array on a mesh with Explicit axes at x\.") as caught:
        jmpscale.diagnose_step(step)(W, x)
    assert str(caught.value).endswith("Call diagnose_step in the context of jax.set_mesh(mesh).")
    with jax.set_mesh(mesh):
        assert jmpscale.diagnose_step(step)(jax.device_put(W, jax.NamedSharding(mesh, jax.P())), x).state == ("w",)


@pytest.mark.full
def test_diagnose_step_does_not_take_a_computed_scale_for_the_loss():
    def loss_fn(w, x):
        return jnp.mean((x.astype(B) @ w.astype(B)).astype(F) ** 2)

    def step(w, scaler, xs):
        def body(w, x):
            halved = scaler._replace(loss_scale=scaler.loss_scale / 2)
            loss, grads = jmpscale.value_and_grad(loss_fn)(halved, w, x)
            return w - 1e-3 * grads, loss

        w, losses = jax.lax.scan(body, w, xs)
        return w, jmpscale.update(scaler, jmpscale.all_finite(losses))

    args = W, jmpscale.dynamic(8.0), jnp.stack([X, X])
    assert jmpscale.diagnose_step(step)(*args).loss == pytest.approx(2 * float(loss_fn(W, X)), rel=1e-2)


def test_diagnose_step_of_something_else_raises():
    message = "step must be the training step, got 3.0. Call diagnose_step(step)(*args)."
    with pytest.raises(TypeError, match=re.escape(message)):
        jmpscale.diagnose_step(3.0)(W)


READ_VALUES = {  # functions with which Python reads a loss
    "if": lambda loss: 1 if loss > 0 else 2,
    "float": float,
    "NumPy": np.asarray,
    "index": lambda loss: [1, 2][loss.astype(jnp.int32)],
    "mask": lambda loss: W[0][W[0] > loss],
    "format": lambda loss: f"{loss:.3f}",
    "shape": lambda loss: jnp.zeros(loss.astype(jnp.int32)),
}


@pytest.mark.parametrize("name", READ_VALUES)
def test_diagnose_step_of_a_step_whose_values_python_reads_has_a_remedy(name):
    def step(w, batch):
        loss, grads = jax.value_and_grad(mean_square)(w, *batch)
        READ_VALUES[name](loss)
        return w - grads, loss

    with pytest.raises((TypeError, IndexError)) as caught:
        jmpscale.diagnose_step(step)(W, (X, Y))
    *_, note = caught.value.__notes__
    assert note.startswith("diagnose_step traces the step, as jax.jit does, so Python must not read the values of")
    assert ", as it does at test_diagnose_step.py:" in note
    assert "Pass the part of the step that jax.jit accepts" in note


def test_diagnose_step_of_a_step_with_an_unmapped_axis_has_a_remedy():
    with pytest.raises(NameError) as caught:
        jmpscale.diagnose_step(lambda w: jax.lax.psum(w, "data"))(W)
    assert any("pass the function that maps it" in note for note in caught.value.__notes__)


def test_diagnose_step_of_a_step_that_was_compiled_ahead_of_time_has_a_remedy():
    compiled = jax.jit(lambda w: 2 * w).lower(W).compile()
    with pytest.raises(TypeError) as caught:
        jmpscale.diagnose_step(lambda w: compiled(w))(W)
    assert any("Pass the function that was compiled to diagnose_step." in note for note in caught.value.__notes__)


@pytest.mark.full
def test_diagnosis_lists_the_matmuls_that_autocast_leaves_in_float32():
    """Also if the step has been compiled or diagnosed before."""

    @jax.custom_vjp
    def layer(w, x):
        return jnp.tanh(x @ w)

    def forward(w, x):
        return layer(w, x), (w, x)

    def backward(residuals, cotangent):
        w, x = residuals
        before = cotangent * (1 - jnp.tanh(x @ w) ** 2)
        return x.T @ before, before @ w.T

    layer.defvjp(forward, backward)

    @jmpscale.autocast(dtype=jnp.bfloat16)
    def loss_fn(w, x):
        wide = jnp.concatenate([x, x, x, x])
        return jnp.mean((wide @ w) @ w) + jnp.mean(layer(w, x))

    @jax.jit
    def step(w, x):
        loss, grad = jax.value_and_grad(loss_fn)(w, x)
        return w - 0.1 * grad, loss

    w, x = jax.random.normal(jax.random.key(0), (16, 16)), jnp.ones((4, 16))
    step(w, x)
    _, start = inspect.getsourcelines(layer.fun)
    line = f"test_diagnose_step.py:{start + 2} (layer)"
    of_step = jmpscale.diagnose_step(step)
    for diagnosis in (of_step(w, x), of_step(w, x), jmpscale.diagnose(loss_fn)(w, x)):
        (kept,) = diagnosis.kept
        assert kept.startswith(f"1 of 3 matmuls, at {line}")
        assert "custom_vjp" in kept
        assert "autocast leaves in float32:\n  1 of 3 matmuls" in diagnosis.describe()
    assert jmpscale.diagnose(jmpscale.autocast(lambda w, x: jnp.mean(x @ w)))(w, x).kept == ()
