"""Healthy steps and loss functions: whatever a diagnosis finds in one of them is a false alarm."""

import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_diagnose_entering as entering
import test_diagnose_scalers as scalers
import test_diagnose_step as steps
import test_diagnose_step_frameworks as frameworks
import test_diagnose_update as update

import jmpscale

import diagnosis_programs as programs
from arrays import normal
from diagnosis_programs import MASKS, W, X
from messages import GRADIENTS_DIFFER
from tables import names

pytestmark = pytest.mark.usefixtures("standard_promotion_and_ranks")

B, F, H = jnp.bfloat16, jnp.float32, jnp.float16
tree_map = jax.tree.map


class Healthy(NamedTuple):
    """A function that returns the diagnosis of a healthy step, and one that checks more than that nothing is found."""

    diagnosis: Callable[[], jmpscale.Diagnosis]
    check: Callable[[jmpscale.Diagnosis], None] = lambda diagnosis: None


# --- loss functions in float16 ---


def has_fitting_scale(diagnosis):
    words = rf"Loss scales from 2\^[-\d]+ to 2\^[-\d]+ fit; yours is 2\^12\. {GRADIENTS_DIFFER}.*%(, in .*)?\."
    assert re.fullmatch(words, diagnosis.summary)
    assert diagnosis.gradient_error < 0.05
    assert diagnosis.loss == pytest.approx(diagnosis.loss_float32, rel=0.02)


def loss(fun, *args):
    return Healthy(lambda: jmpscale.diagnose(fun)(jmpscale.static(2.0**12), *args), has_fitting_scale)


ATTENTION = normal(8, 2, 16, 8)
LOSSES = {
    "casts by hand": loss(programs.mlp_by_hand, W, X),
    "autocast": loss(jmpscale.autocast(programs.mlp), W, X),
    "bias before normalization": loss(programs.bias_before_normalization, {"w": W, "b": jnp.zeros(8)}, X),
    "quantizer": loss(programs.quantizer, {"w": W, "unit": jnp.float32(3)}, X),
    "saturated softmax": loss(jmpscale.autocast(programs.saturated_softmax), {"q": 10 * W, "k": 10 * W.T, "v": W}, X),
    "saturated activation": loss(programs.saturated_activation, W, X),
    "while loop": loss(programs.while_loop, W, X),
    "zero derivative": loss(jmpscale.autocast(programs.zero_derivative), {"w": W, "unused": X}, X),
    "critic": loss(jmpscale.autocast(programs.critic), W, X),
    "CTC": loss(jmpscale.autocast(programs.ctc), W, X),
    "checkpoint": loss(jmpscale.autocast(programs.checkpointed), W, X),
    **{f"mask {name}": loss(programs.attention(mask), W, ATTENTION) for name, mask in MASKS.items()},
}


# --- parameters and averages ---


def says_one_sentence(diagnosis):
    words = rf"{GRADIENTS_DIFFER}[\d.]+%, in [^, ]+(, and the update by [\d.]+%)?\."
    assert re.fullmatch(words, diagnosis.summary)
    assert diagnosis.gradient_error < 0.02
    assert all(x.error < (0.5 if x.dtype == "bfloat16" else 0.2) for x in diagnosis.changes)


def says_one_sentence_of_the_gradients(diagnosis):
    says_one_sentence(diagnosis)
    assert diagnosis.changes == ()


def step(fun, *args, check=lambda diagnosis: None):
    return Healthy(lambda: jmpscale.diagnose_step(fun)(*args), check)


def said(fun, *args, check=says_one_sentence):
    """Returns a row with a compiled step, of which a diagnosis says one sentence."""
    return step(jax.jit(fun), *args, check=check)


def optimized(tx, dtype, check=says_one_sentence):
    params = steps.parameters(dtype)
    return said(steps.optimized(tx), params, tx.init(params), steps.BATCH, check=check)


def copied(dtype):
    """Returns a step whose parameters in half precision are a copy of float32 ones, which the optimizer updates."""

    def step(copy, params, batch):
        loss, grads = jax.value_and_grad(steps.regression)(copy, batch)
        params = tree_map(lambda p, g: p - 1e-4 * g.astype(F), params, grads)
        return jmpscale.cast(params, dtype), params, loss

    return step


def masters_in_the_state(state, x, y):
    """Masters with a half copy in the state, as for Megatron's main parameters."""
    loss, grads = jax.value_and_grad(update.loss_fn)(state["half"], x.astype(B), y)
    master = tree_map(lambda p, g: p - 1e-4 * g.astype(F), state["master"], grads)
    average = tree_map(lambda a, p: 0.999 * a + 0.001 * p, state["average"], master)
    return {"half": jmpscale.cast(master, B), "master": master, "average": average}, loss


def compensated(params, lost, batch):
    """Kahan summation."""
    loss, grads = jax.value_and_grad(steps.regression)(params, batch)
    change = tree_map(lambda g, c: B(-1e-3) * g - c, grads, lost)
    new = tree_map(lambda p, u: p + u, params, change)
    return new, tree_map(lambda n, p, u: (n - p) - u, new, params, change), loss


def in_halves(high, low, batch):
    """Parameters that are stored as a sum of two."""
    params = tree_map(lambda x, y: x.astype(F) + y.astype(F), high, low)
    loss, grads = jax.value_and_grad(steps.regression)(params, batch)
    new = tree_map(lambda p, g: p - 1e-3 * g, params, grads)
    high = tree_map(lambda p: p.astype(B), new)
    return high, tree_map(lambda p, x: (p - x.astype(F)).astype(B), new, high), loss


def residual(state, x, y):
    """bfloat16 parameters with a float32 residual."""
    loss, grads = jax.value_and_grad(update.loss_fn)(state["p"], x.astype(B), y)
    total = tree_map(lambda p, r, g: p.astype(F) + r - 1e-4 * g.astype(F), state["p"], state["r"], grads)
    params = jmpscale.cast(total, B)
    return {"p": params, "r": tree_map(lambda t, p: t - p.astype(F), total, params)}, loss


def error_feedback(params, error, batch):
    """Gradients that are sent in bfloat16; what rounding removes is added to the next ones."""
    loss, grads = jax.value_and_grad(steps.regression)(params, batch)
    exact = tree_map(jnp.add, grads, error)
    sent = jmpscale.cast(exact, B)
    error = tree_map(lambda x, y: x - y.astype(F), exact, sent)
    return tree_map(lambda p, g: p - 0.1 * g.astype(F), params, sent), error, loss


def key_of_the_count(state, x, y):
    key = jax.random.fold_in(jax.random.key(0), state["n"])

    def rounded(p):
        last_place = jnp.exp2(jnp.floor(jnp.log2(jnp.abs(p) + 1e-30)) - 7)
        return (p + (jax.random.uniform(key, p.shape) - 0.5) * last_place).astype(B)

    loss, grads = jax.value_and_grad(update.loss_fn)(state["p"], x.astype(B), y)
    params = tree_map(lambda p, g: rounded(p.astype(F) - 1e-4 * g.astype(F)), state["p"], grads)
    return {"p": params, "n": state["n"] + 1}, loss


def stochastic_by_bits(state, x, y):
    key, draw = jax.random.split(state["k"])

    def rounded(p):
        bits = jax.lax.bitcast_convert_type(p, jnp.uint32) + (jax.random.bits(draw, p.shape) & 0xFFFF)
        return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), F).astype(B)

    loss, grads = jax.value_and_grad(update.loss_fn)(state["p"], x.astype(B), y)
    return {"p": tree_map(lambda p, g: rounded(p.astype(F) - 1e-4 * g.astype(F)), state["p"], grads), "k": key}, loss


def accumulated(params, x, y):
    """Gradients that are accumulated in float32, in a loop."""

    def body(total, batch):
        loss, grads = jax.value_and_grad(update.loss_fn)(jmpscale.cast(params, B), *batch)
        return tree_map(lambda t, g: t + g.astype(F), total, grads), loss

    zeros = tree_map(jnp.zeros_like, params)
    total, losses = jax.lax.scan(body, zeros, (x.reshape(4, 16, 16).astype(B), y.reshape(4, 16, 4)))
    return update.sgd(params, total), losses.mean()


def factors_of_1(params, batch):
    def loss_fn(params):
        return steps.regression(tree_map(lambda p: p.astype(B) * B(1), params), batch)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return tree_map(lambda p, g: 1.0 * p - 0.1 * (g.astype(B) * B(1)).astype(F), params, grads), loss


def stopped(dtype):
    """Returns a step in which the gradient of a parameter is stopped."""

    def step(params, batch):
        def loss_fn(params):
            return steps.regression({"a": params["a"], "b": jax.lax.stop_gradient(params["b"])}, batch)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return tree_map(lambda p, g: p - dtype(0.3) * g, params, grads), loss

    return step


def frozen_by_zeros(tx):
    labels = {"a": "train", "b": "freeze"}
    return optax.multi_transform({"train": tx, "freeze": optax.set_to_zero()}, labels)


def frozen_by_a_mask(tx):
    return optax.chain(tx, optax.masked(optax.set_to_zero(), {"a": False, "b": True}))


def average_with_a_smaller_decay(form):
    state = {"params": steps.parameters(), "nu": steps.ZEROS}
    return step(steps.bfloat16_average(0.99, form), state, steps.BATCH)


WIDE, NARROW, BATCH = steps.parameters(), steps.parameters(B), steps.BATCH
DATA = update.X, update.Y
STATES = {
    "float32 parameters": optimized(optax.adam(1e-4), F, says_one_sentence_of_the_gradients),
    "float32 parameters, decays in float32": optimized(
        optax.inject_hyperparams(optax.adam, hyperparam_dtype=F)(1e-2), F, says_one_sentence_of_the_gradients
    ),
    "bfloat16 copy of float32 parameters": said(copied(B), NARROW, WIDE, BATCH),
    "float16 copy of float32 parameters": said(copied(H), steps.parameters(H), WIDE, BATCH),
    "bfloat16 copy in the state": said(
        masters_in_the_state,
        {"half": update.NARROW, "master": update.ROUNDED, "average": update.ROUNDED},
        *DATA,
        check=lambda diagnosis: None,
    ),
    "bfloat16 parameters, large rate": optimized(optax.sgd(0.3), B),
    "bfloat16 momentum": optimized(optax.adam(1e-4, mu_dtype=B), F),
    "bfloat16 average of 0.9": said(steps.averaged(0.9), WIDE, steps.NEAR, BATCH),
    **{
        f"bfloat16 average of 0.99, {form}": average_with_a_smaller_decay(form)
        for form in ("sum", "difference", "in float32, gated")
    },
    "Kahan summation": said(compensated, NARROW, steps.ZEROS, BATCH),
    "Kahan summation, momentum of zeros": step(jax.jit(update.kahan(-1)), update.KAHAN, *DATA),
    "two halves": said(in_halves, NARROW, steps.ZEROS, BATCH),
    "float32 residual": step(jax.jit(residual), {"p": update.NARROW, "r": jmpscale.cast(update.ZEROS, F)}, *DATA),
    "error feedback": said(error_feedback, WIDE, tree_map(lambda p: 1e-3 * p, WIDE), BATCH),
    "stochastic rounding": said(steps.noisy(1.0), NARROW, jax.random.key(0), BATCH),
    "stochastic rounding, key of integers": said(steps.noisy(1.0), NARROW, jax.random.PRNGKey(0), BATCH),
    "stochastic rounding, key of the count": step(
        jax.jit(key_of_the_count), {"p": update.NARROW, "n": jnp.int32(0)}, *DATA
    ),
    "stochastic rounding by bits": step(
        jax.jit(stochastic_by_bits), {"p": update.NARROW, "k": jax.random.key(3)}, *DATA
    ),
    "accumulation in float32": step(jax.jit(accumulated), update.PARAMS, *DATA),
    "critic and actor": step(jax.jit(update.critic_and_actor), {"c": update.PARAMS, "a": update.PARAMS}, *DATA),
    "members that all change": step(
        update.of_members, tree_map(lambda p: jnp.asarray(np.stack([p] * 8)), update.NARROW), *DATA, jnp.ones(8, B)
    ),
    "factors of 1": said(factors_of_1, WIDE, BATCH),
    "decay that bfloat16 holds": step(steps.decayed(0.99), WIDE, BATCH),
    "constant near 1": step(steps.corrected(0.9), WIDE, jnp.int32(4), BATCH),
    **{
        f"{how} in {np.dtype(dtype).name}": row
        for dtype in (F, B)
        for how, row in {
            "frozen by zeros": optimized(frozen_by_zeros(optax.sgd(0.3)), dtype),
            "frozen by a mask": optimized(frozen_by_a_mask(optax.sgd(0.3)), dtype),
            "stopped gradient": said(stopped(dtype), steps.parameters(dtype), BATCH),
        }.items()
    },
}


# --- steps of other libraries, and on several devices ---


def framework(name):
    create = frameworks.STEPS[name]
    state = None

    def diagnosis():
        nonlocal state
        fun, args, state = create(F)
        return jmpscale.diagnose_step(fun)(*args)

    def check(diagnosis):
        assert diagnosis.state == state
        assert diagnosis.gradient_error < 0.05
        assert diagnosis.summary.count(". ") == 0
        assert diagnosis.summary.startswith(GRADIENTS_DIFFER)
        assert all(x.error < 0.05 for x in diagnosis.changes)

    return Healthy(diagnosis, check)


FRAMEWORKS = {f"{name}, float32 parameters": framework(name) for name in frameworks.STEPS}


# --- inputs in half precision ---


def adapters(params, backbone, x):
    """Has low-rank adapters beside parameters in bfloat16."""

    def layer(h, w):
        w, a, b = w
        return h + jnp.tanh(h @ w + (h @ a.astype(B)) @ b.astype(B)) * B(0.5), None

    h, _ = jax.lax.scan(layer, x, (backbone, params["a"], params["b"]))
    return jnp.mean((h.astype(F) - entering.X) ** 2)


def masked(params, x, mask, weights):
    probability = jnp.sqrt(1 - mask.astype(F)) + weights.astype(F)[:, None]
    return jnp.mean(probability * (entering.model(params, x) - jnp.sin(entering.X)) ** 2)


def fine(loss_fn, *args, params=entering.PARAMS, after=0):
    """Returns a row with a step, perhaps after many others."""
    fun = entering.sgd(loss_fn)

    def diagnosis():
        trained = jax.jit(lambda s: jax.lax.scan(lambda s, _: (fun(s, *args)[0], None), s, None, after)[0])
        return jmpscale.diagnose_step(fun)(trained(params) if after else params, *args)

    return Healthy(diagnosis)


TIMES = entering.TIMES
HALF_BATCH = entering.X.astype(B), jnp.sin(entering.X).astype(B)
MASK = (jnp.arange(128) % 2).astype(B)[:, None]
BACKBONE = normal(4, 24, 16, 16, scale=0.35).astype(B)
ADAPTERS = {"a": normal(5, 24, 16, 4, scale=0.25), "b": jnp.zeros((24, 4, 16))}
COSINES = jnp.cos(TIMES.astype(F)[:, None] * np.ones((1, 16), np.float32))
INPUTS = {
    "images": fine(entering.regression, *HALF_BATCH),
    "images, later": fine(entering.regression, *HALF_BATCH, after=20000),
    "table of cosines": fine(entering.regression, COSINES.astype(B), entering.X),
    "exact mask": fine(masked, entering.X, MASK, MASK[:, 0] * B(0.5)),
    "small integers": fine(entering.time_steps, jnp.arange(128).astype(B)),
    "large integers whose digits do not matter": fine(entering.time_steps, TIMES.astype(H)),
    "backbone": fine(adapters, BACKBONE, entering.X.astype(B), params=ADAPTERS),
    "backbone, later": fine(adapters, BACKBONE, entering.X.astype(B), params=ADAPTERS, after=100),
    "schedule in float32": fine(entering.denoising, entering.SCHEDULE, entering.LATE),
}


# --- random numbers in half precision ---


def draws(weights):
    """Returns a row with a step whose loss has weights that are made of a random key and the parameters."""
    return step(entering.with_weights(weights), entering.PARAMS, jax.random.key(1))


def noisy(key, params):
    hidden = entering.X.astype(B) + B(0.1) * jax.random.normal(key, entering.X.shape, B)
    return jax.nn.relu(hidden - B(2.8)).astype(F)


def choices(key, scores, count, size):
    return entering.one_hot_of(jax.random.categorical(key, scores, shape=(size,)), count)


SHAPE = entering.X.shape
DRAWS = {
    "categorical in float32": draws(lambda key, _: choices(key, jnp.zeros(512), 512, 64)),
    "few actions": draws(lambda key, _: choices(key, jnp.zeros(16, B), 128, 512)),
    "dropout": draws(lambda key, _: (jax.random.uniform(key, SHAPE, B) < B(0.9)).astype(F)),
    "dropout by bernoulli": draws(lambda key, _: jax.random.bernoulli(key, 0.999, SHAPE).astype(F)),
    "dropout without dropping": draws(lambda key, _: (jax.random.uniform(key, SHAPE, B) < B(1)).astype(F)),
    "one rare number of a few": draws(lambda key, _: (jax.random.uniform(key, (128, 1), B) < B(0.02)).astype(F)),
    "noise": draws(noisy),
    "noise before a matmul and an argmax": draws(
        lambda key, _: jnp.argmax(jax.random.normal(key, (128, 16), B).astype(F) @ normal(6, 16, 512), 1)[
            :, None
        ].astype(F)
    ),
    "permutation": draws(lambda key, _: jax.random.permutation(key, 512)[:128, None] / 512),
}


# --- counters in half precision, and what looks like one ---


def counter(count, n, **others):
    return step(*entering.with_counter(count, n, **others), entering.X)


def kahan(state, grads, loss, x):
    y = 1 - state["c"]
    n = state["n"] + y
    return {"n": n, "c": (n - state["n"]) - y}


COUNTERS = {
    "float32 counter": counter(entering.plus_one, F(0)),
    "integer counter": counter(entering.plus_one, jnp.int32(0)),
    "counter that begins again": counter(lambda s, *_: {"n": jnp.where(s["n"] < 10, s["n"] + 1, 0)}, B(0)),
    "counter that saturates": counter(lambda s, *_: {"n": jnp.minimum(s["n"] + 1, 100)}, B(0)),
    "counts down": counter(lambda s, *_: {"n": jnp.maximum(s["n"] - 1, 0)}, B(100)),
    "counts down below zero": counter(lambda s, *_: {"n": s["n"] - 1}, B(100)),
    "Kahan summation of ones": counter(kahan, B(0), c=B(0)),
    "sum of losses": counter(lambda s, grads, loss, x: {"n": s["n"] + loss.astype(B)}, B(0)),
    "sum of gradients": counter(lambda s, grads, *_: {"n": s["n"] + grads["a"].sum().astype(B)}, B(0)),
    "sum of data": counter(lambda s, grads, loss, x: {"n": s["n"] + x[0, 0].astype(B)}, B(0)),
    "average of ones": counter(lambda s, *_: {"n": B(0.9) * s["n"] + B(0.1)}, B(0)),
}


# --- integers that may differ ---

LONG, TABLE, ONES = entering.LONG, entering.TABLE, entering.ONES
ROUTER = normal(8, 16, 1) + normal(9, 16, 4, scale=0.01)  # whose scores are nearly equal


def indices(lookup):
    """Returns a row with a step that adds what a function of the parameters looks up."""
    return step(entering.sgd(entering.with_indices(lookup)), entering.PARAMS)


def routed(params, dtype):
    """Returns the tokens of experts that nearly equal scores choose, by the positions of the tokens in an expert."""
    scores = LONG.astype(B) @ ROUTER.astype(B)
    chosen = jax.nn.one_hot(jnp.argmax(scores, 1), 4, dtype=dtype)
    position = jnp.sum((jnp.cumsum(chosen, 0) - 1) * chosen, 1).astype(int)
    return TABLE[position]


def fake_quantized(params):
    hidden = LONG.astype(B) @ params["a"].astype(B)
    scale = jnp.abs(hidden).max() / 127
    rounded = jnp.round(hidden / scale).astype(jnp.int8).astype(B) * scale
    return (hidden + jax.lax.stop_gradient(rounded - hidden)).astype(F)[:, :16]


def interpolated(params):
    position = (jnp.abs(jnp.sin(LONG[:, 0])) * 62).astype(B)
    index = jnp.floor(position).astype(int)
    weight = (position - jnp.floor(position)).astype(F)[:, None]
    return TABLE[index] * (1 - weight) + TABLE[index + 1] * weight


def exact_positions(params):
    return TABLE[(jnp.cumsum(ONES.astype(B)[:200], 0) - 1).astype(int)[:, 0]].sum(0)[None]


def nearest_code(params):
    return TABLE[jnp.argmin(((LONG[:, None] - TABLE[None, :64]) ** 2).astype(B).sum(2), 1)]


INDICES = {
    "exact positions": indices(exact_positions),
    "positions in float32 of chosen experts": indices(lambda params: routed(params, F)),
    "exact positions of chosen experts": indices(lambda params: routed(params, B)),
    "fake quantization": indices(fake_quantized),
    "interpolation": indices(interpolated),
    "nearest code": indices(nearest_code),
    "few bins": indices(lambda params: TABLE[jnp.floor(jax.nn.sigmoid(LONG[:, 0].astype(B)) * 16).astype(int)]),
    "one index": indices(lambda params: TABLE[(LONG[0, 0].astype(B) * B(0.4) + B(300)).astype(int)][None]),
}


# --- losses with scales that fit ---


def several_scalers(name):
    fun, create, *paths = scalers.SEVERAL[name]

    def check(diagnosis):
        assert diagnosis.scaler is None
        assert [path in scalers.without_copies(diagnosis.summary) for path in paths] == [True, True]
        assert diagnosis.gradient_error < 0.01

    return Healthy(lambda: jmpscale.diagnose_step(fun)(create(4, 36)), check)


def number(name):
    fun, args = scalers.SPELLINGS[name](2.0**20)
    return step(fun, *args)


SCALES = {f"two scalers, {name}": several_scalers(name) for name in scalers.SEVERAL}
SCALES |= {f"scaled by a number, {name}": number(name) for name in scalers.SPELLINGS}


TABLES = LOSSES, STATES, FRAMEWORKS, INPUTS, DRAWS, COUNTERS, INDICES, SCALES
HEALTHY = {name: row for table in TABLES for name, row in table.items()}
DEFAULT = {
    "float32 parameters",
    "bfloat16 copy of float32 parameters",
    "stopped gradient in float32",
    "dropout",
    "counter that begins again",
    "sum of losses",
    "sum of gradients",
    "scaled by a number, multiplied",
}


def test_each_healthy_step_has_a_name_of_its_own():
    assert len(HEALTHY) == sum(map(len, TABLES))


@pytest.mark.parametrize("name", names(HEALTHY, default=DEFAULT))
def test_diagnosis_finds_nothing_in_a_healthy_step(name):
    row = HEALTHY[name]
    diagnosis = row.diagnosis()
    assert diagnosis.findings == ()
    assert diagnosis.lines == ()
    row.check(diagnosis)
