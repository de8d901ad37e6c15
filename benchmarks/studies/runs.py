"""Whether a diagnosis of a run is right about healthy runs and about faults: `python -m benchmarks.studies.runs`.

Small networks learn for some hundred steps. `diagnose_run` compares each run with float32: right steps from the first
state and from a late one, and steps with one fault each, most of which no single step shows.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"

import argparse
import itertools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import jmpscale
from benchmarks import record, table

RESULTS = table.STUDIES / "runs.json"
B, F, H = jnp.bfloat16, jnp.float32, jnp.float16
STEPS, LATE = 200, 600
tree_map = jax.tree.map


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X = normal(0, 256, 16)
Y = jnp.sin(2 * X[:, :1]) + 0.05 * normal(1, 256, 1)
BATCH = X, Y
PARAMS = {"a": normal(2, 16, 64) / 4, "b": normal(3, 64, 1) / 8}
HALF = jmpscale.cast(PARAMS, B)


def predict(params, x, dtype=B):
    params = jmpscale.cast(params, dtype)
    return (jnp.tanh(x.astype(dtype) @ params["a"]) @ params["b"]).astype(F)


def loss_fn(params, batch, dtype=B):
    return jnp.mean((predict(params, batch[0], dtype) - batch[1]) ** 2)


def zeros_like(params):
    """Returns an array for each parameter; no two of them are the same array."""
    return tree_map(lambda x: jnp.zeros_like(x), params)


def optimized(tx, params=PARAMS, loss=loss_fn, **extra):
    """Returns the step of an optimizer, and its state."""

    def step(state, batch):
        loss_value, grads = jax.value_and_grad(loss)(state["p"], batch)
        grads = tree_map(lambda g, p: g.astype(p.dtype), grads, state["p"])
        more = {name: value(loss_value, grads, batch) for name, value in extra.items()}
        updates, opt_state = tx.update(grads, state["o"], state["p"], **more)
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state}, loss_value

    return step, {"p": params, "o": tx.init(params)}


# --- Right steps: each function returns a step and its state. ---


def stochastic_by_bits(x, key):
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (jax.random.bits(key, x.shape, jnp.uint32) & 0xFFFF)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), F).astype(B)


def stochastic_by_floats(x, key):
    place = jnp.exp2(jnp.floor(jnp.log2(jnp.abs(x) + 1e-30)) - 7)
    return (jnp.floor(x / place + jax.random.uniform(key, x.shape)) * place).astype(B)


def stochastic_by_noise(x, key):
    return (x + (jax.random.uniform(key, x.shape) - 0.5) * jnp.abs(x) * 2.0**-7).astype(B)


def stochastic(rounding, lr=1e-3, decay=0.0, fixed_key=None):
    tx = optax.adam(lr)

    def step(state, batch):
        key, *keys = jax.random.split(state["key"], 3)
        keys = fixed_key or keys
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
        updates, opt_state = tx.update(jmpscale.cast(grads, F), state["o"])
        wide = tree_map(lambda p, u: p.astype(F) * (1 - decay) + u, state["p"], updates)
        params = {name: rounding(wide[name], k) for name, k in zip(wide, keys, strict=True)}
        return {"p": params, "o": opt_state, "key": key}, loss

    return step, {"p": HALF, "o": tx.init(PARAMS), "key": jax.random.key(1)}


def kahan(sign=-1, lr=1e-3):
    """Adam with compensated sums in bfloat16; the right sign is -1."""
    tx = optax.adam(lr)

    def add(p, c, u):
        change = u.astype(B) + sign * c
        total = p + change
        return total, (total - p) - change

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
        updates, opt_state = tx.update(jmpscale.cast(grads, F), state["o"])
        pairs = {name: add(state["p"][name], state["c"][name], updates[name]) for name in PARAMS}
        first, second = ({name: pair[i] for name, pair in pairs.items()} for i in range(2))
        return {"p": first, "c": second, "o": opt_state}, loss

    return step, {"p": HALF, "c": zeros_like(HALF), "o": tx.init(PARAMS)}


def accumulated():
    """Gradients of micro-batches in bfloat16, summed in float32."""
    tx = optax.adam(1e-3)

    def step(state, batch):
        def add(total, micro):
            loss, grads = jax.value_and_grad(loss_fn)(jmpscale.cast(state["p"], B), micro)
            return tree_map(lambda t, g: t + g.astype(F), total, grads), loss

        micros = tree_map(lambda x: x.reshape(8, 32, *x.shape[1:]), batch)
        total, losses = jax.lax.scan(add, zeros_like(PARAMS), micros)
        updates, opt_state = tx.update(tree_map(lambda t: t / 8, total), state["o"])
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state}, losses.mean()

    return step, {"p": PARAMS, "o": tx.init(PARAMS)}


def lora():
    base = HALF["a"]
    tx = optax.adam(1e-3)
    adapters = {"down": normal(5, 16, 8) / 4, "up": jnp.zeros((8, 64)), "b": PARAMS["b"]}

    def loss(params, batch):
        down, up, b = (params[name].astype(B) for name in ("down", "up", "b"))
        x = batch[0].astype(B)
        return jnp.mean(((jnp.tanh(x @ base + x @ down @ up) @ b).astype(F) - batch[1]) ** 2)

    return optimized(tx, adapters, loss)


def averaged(dtype, decay=0.99):
    step, state = optimized(optax.adam(1e-3))

    def with_average(state, batch):
        new, loss = step({"p": state["p"], "o": state["o"]}, batch)
        mean = tree_map(lambda m, p: (decay * m + (1 - decay) * p).astype(dtype), state["m"], new["p"])
        return {**new, "m": mean}, loss

    return with_average, {**state, "m": jmpscale.cast(PARAMS, dtype)}


def muon():
    return optimized(contrib.muon(1e-3, ns_steps=5, mu_dtype=B))


def unsigned_low_bits():
    """bfloat16 parameters whose lower 16 bits are integers."""
    tx = optax.adam(1e-3)

    def join(high, low):
        bits = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
        return jax.lax.bitcast_convert_type(bits | low.astype(jnp.uint32), F)

    def split(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        high = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), B)
        return high, (bits & 0xFFFF).astype(jnp.uint16)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["hi"], batch)
        updates, opt_state = tx.update(jmpscale.cast(grads, F), state["o"])
        pairs = {k: split(join(state["hi"][k], state["lo"][k]) + updates[k]) for k in PARAMS}
        high, low = ({name: pair[i] for name, pair in pairs.items()} for i in range(2))
        return {"hi": high, "lo": low, "o": opt_state}, loss

    high, low = ({name: split(x)[i] for name, x in PARAMS.items()} for i in range(2))
    return step, {"hi": high, "lo": low, "o": tx.init(PARAMS)}


def pair():
    """Parameters as the sum of two numbers in bfloat16."""
    tx = optax.adam(1e-3)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["hi"], batch)
        updates, opt_state = tx.update(jmpscale.cast(grads, F), state["o"])
        wide = tree_map(lambda h, low, u: h.astype(F) + low.astype(F) + u, state["hi"], state["lo"], updates)
        high = jmpscale.cast(wide, B)
        low = tree_map(lambda w, h: (w - h.astype(F)).astype(B), wide, high)
        return {"hi": high, "lo": low, "o": opt_state}, loss

    return step, {"hi": HALF, "lo": tree_map(lambda p, h: (p - h.astype(F)).astype(B), PARAMS, HALF), "o": tx.init(PARAMS)}


def reduced():
    """Gradients of four parts of a batch, averaged in bfloat16."""
    tx = optax.adam(1e-3)

    def step(state, batch):
        def part(x, y):
            loss, grads = jax.value_and_grad(loss_fn)(state["p"], (x, y))
            return jax.lax.pmean((loss, jmpscale.cast(grads, B)), "d")

        parts = [x.reshape(4, 64, *x.shape[1:]) for x in batch]
        loss, grads = tree_map(lambda x: x[0], jax.vmap(part, axis_name="d")(*parts))
        updates, opt_state = tx.update(jmpscale.cast(grads, F), state["o"])
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state}, loss

    return step, {"p": PARAMS, "o": tx.init(PARAMS)}


def diloco():
    """Four inner steps, whose total change in bfloat16 is the gradient of an outer step."""
    inner, outer = optax.sgd(0.02), optax.sgd(0.7, momentum=0.9, nesterov=True)

    def step(state, batch):
        def one(params, micro):
            loss, grads = jax.value_and_grad(loss_fn)(params, micro)
            return optax.apply_updates(params, inner.update(grads, inner.init(params))[0]), loss

        micros = tree_map(lambda x: x.reshape(4, 64, *x.shape[1:]), batch)
        last, losses = jax.lax.scan(one, state["p"], micros)
        change = tree_map(lambda p, q: (p - q).astype(B).astype(F), state["p"], last)
        updates, opt_state = outer.update(change, state["o"])
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state}, losses.mean()

    return step, {"p": PARAMS, "o": outer.init(PARAMS)}


def batch_norm():
    tx = optax.adam(1e-3)

    def loss(params, stats, batch):
        h = (batch[0].astype(B) @ params["a"].astype(B)).astype(F)
        mean, var = h.mean(0), h.var(0)
        z = jnp.tanh((h - mean) / jnp.sqrt(var + 1e-5)).astype(B)
        stats = {"m": 0.9 * stats["m"] + 0.1 * mean, "v": 0.9 * stats["v"] + 0.1 * var}
        return jnp.mean(((z @ params["b"].astype(B)).astype(F) - batch[1]) ** 2), stats

    def step(state, batch):
        (loss_value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["p"], state["s"], batch)
        updates, opt_state = tx.update(grads, state["o"])
        return {"p": optax.apply_updates(state["p"], updates), "s": stats, "o": opt_state}, loss_value

    return step, {"p": PARAMS, "s": {"m": jnp.zeros(64), "v": jnp.ones(64)}, "o": tx.init(PARAMS)}


def scaled():
    """float16 with loss scaling; the first steps are skipped."""
    tx = jmpscale.with_loss_scaling(optax.adam(1e-3), jmpscale.dynamic(2.0**20))

    def step(state, batch):
        loss, grads = jmpscale.value_and_grad(loss_fn)(state["o"], state["p"], batch, H)
        updates, opt_state = tx.update(grads, state["o"], state["p"], value=loss)
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state}, loss

    return step, {"p": PARAMS, "o": tx.init(PARAMS)}


def sharpness_aware():
    tx = optax.adam(1e-3)

    def step(state, batch):
        grads = jax.grad(loss_fn)(state["p"], batch)
        size = optax.global_norm(grads)
        other = tree_map(lambda p, g: p + 0.05 * g / (size + 1e-12), state["p"], grads)
        loss, grads = jax.value_and_grad(loss_fn)(other, batch)
        updates, opt_state = tx.update(grads, state["o"])
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state}, loss

    return step, {"p": PARAMS, "o": tx.init(PARAMS)}


def noisy(size):
    """Noise in the gradients, as of Langevin dynamics or of differential privacy."""
    tx = optax.sgd(1e-2)

    def step(state, batch):
        key, *keys = jax.random.split(state["key"], 3)
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
        noise = {k: size * jax.random.normal(key, state["p"][k].shape) for k, key in zip(PARAMS, keys, strict=True)}
        updates, opt_state = tx.update(tree_map(jnp.add, grads, noise), state["o"])
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state, "key": key}, loss

    return step, {"p": PARAMS, "o": tx.init(PARAMS), "key": jax.random.key(1)}


def compressed(dtype):
    """Gradients that are sent in fewer bits, with feedback of the error."""
    tx = optax.adam(1e-3)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
        wanted = tree_map(jnp.add, grads, state["e"])
        sent = tree_map(lambda g: g.astype(dtype).astype(F), wanted)
        updates, opt_state = tx.update(sent, state["o"])
        rest = tree_map(jnp.subtract, wanted, sent)
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state, "e": rest}, loss

    return step, {"p": PARAMS, "o": tx.init(PARAMS), "e": zeros_like(PARAMS)}


def alternating():
    """Two networks, of which each step trains one."""
    params = {"one": PARAMS, "two": tree_map(lambda x: 0.5 * x, PARAMS)}

    def step(state, batch):
        loss, grads = jax.value_and_grad(
            lambda p: jnp.mean((predict(p["one"], batch[0]) + predict(p["two"], batch[0]) - batch[1]) ** 2)
        )(state["p"])
        new = tree_map(lambda p, g: p - 0.05 * g, state["p"], grads)
        even = state["n"] % 2 == 0
        one, two = new | {"two": state["p"]["two"]}, new | {"one": state["p"]["one"]}
        return {"p": jax.lax.cond(even, lambda: one, lambda: two), "n": state["n"] + 1}, loss

    return step, {"p": params, "n": jnp.int32(0)}


def serving_copy():
    """float32 parameters, with a copy in bfloat16 for the next forward pass."""
    tx = optax.adam(1e-3)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["half"], batch)
        updates, opt_state = tx.update(jmpscale.cast(grads, F), state["o"])
        params = optax.apply_updates(state["p"], updates)
        return {"p": params, "half": jmpscale.cast(params, B), "o": opt_state}, loss

    return step, {"p": PARAMS, "half": HALF, "o": tx.init(PARAMS)}


def residual():
    """bfloat16 parameters with what they lack in float32."""
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
        total = tree_map(lambda p, r, g: p.astype(F) + r - 0.05 * g.astype(F), state["p"], state["r"], grads)
        params = jmpscale.cast(total, B)
        return {"p": params, "r": tree_map(lambda t, p: t - p.astype(F), total, params)}, loss

    return step, {"p": HALF, "r": zeros_like(PARAMS)}


WSD = optax.join_schedules([optax.linear_schedule(0, 1e-3, 50), optax.linear_schedule(1e-3, 1e-4, 800)], [50])
RIGHT = {
    "float32 parameters": lambda: optimized(optax.adam(1e-3)),
    "Adam, mu in bfloat16": lambda: optimized(optax.adam(3e-4, mu_dtype=B)),
    "stochastic rounding by bits": lambda: stochastic(stochastic_by_bits),
    "stochastic rounding by floats": lambda: stochastic(stochastic_by_floats),
    "stochastic rounding by noise": lambda: stochastic(stochastic_by_noise),
    "Kahan summation": kahan,
    "accumulation in float32": accumulated,
    "LoRA on a bfloat16 base": lora,
    "average in float32": lambda: averaged(F),
    "Muon, momentum in bfloat16": muon,
    "Adafactor, momentum in bfloat16": lambda: optimized(optax.adafactor(1e-2, momentum=0.9, dtype_momentum=B)),
    "schedule and decoupled decay": lambda: optimized(optax.adamw(WSD, weight_decay=0.1, mu_dtype=B)),
    "Lion, momentum in bfloat16": lambda: optimized(optax.lion(3e-4, mu_dtype=B)),
    "bfloat16 and 16 bits": unsigned_low_bits,
    "pairs of bfloat16": pair,
    "pmean in bfloat16": reduced,
    "DiLoCo, pseudo-gradient in bfloat16": diloco,
    "batch normalization": batch_norm,
    "loss scaling in float16": scaled,
    "sharpness-aware": sharpness_aware,
    "SGD, momentum in bfloat16": lambda: optimized(optax.sgd(0.02, momentum=0.9, accumulator_dtype=B)),
    "AdaMax": lambda: optimized(optax.adamax(1e-3)),
    "AMSGrad": lambda: optimized(optax.amsgrad(1e-3)),
    "Adadelta": lambda: optimized(optax.adadelta(1.0)),
    "RMSProp": lambda: optimized(optax.rmsprop(1e-3, momentum=0.9)),
    "NAdam, mu in bfloat16": lambda: optimized(optax.nadam(1e-3, mu_dtype=B)),
    "COCOB": lambda: optimized(contrib.cocob()),
    "DoG": lambda: optimized(contrib.dog()),
    "AdEMAMix": lambda: optimized(contrib.ademamix(1e-3)),
    "Prodigy": lambda: optimized(contrib.prodigy(1.0)),
    "schedule-free": lambda: optimized(contrib.schedule_free_sgd(0.05)),
    "apply_if_finite": lambda: optimized(optax.apply_if_finite(optax.adam(1e-3), 5)),
    "MultiSteps": lambda: optimized(optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation()),
    "noise in the gradients": lambda: noisy(0.1),
    "gradients sent in bfloat16": lambda: compressed(B),
    "gradients sent in float8": lambda: compressed(jnp.float8_e4m3fn),
    "networks that alternate": alternating,
    "copy in bfloat16": serving_copy,
    "residual in float32": residual,
}
SMALL_BATCHES = (  # of the right steps
    "float32 parameters",
    "Adam, mu in bfloat16",
    "Lion, momentum in bfloat16",
    "SGD, momentum in bfloat16",
    "batch normalization",
    "stochastic rounding by bits",
    "Prodigy",
    "loss scaling in float16",
)


# --- Faults. ---


def half_copy(lr=0.05):
    """The update begins from the copy in bfloat16 of float32 parameters."""

    def step(state, batch):
        half = jmpscale.cast(state["p"], B)
        loss, grads = jax.value_and_grad(loss_fn)(half, batch)
        return {"p": tree_map(lambda p, g: p.astype(F) - lr * g.astype(F), half, grads)}, loss

    return step, {"p": PARAMS}


def gated_mean():
    """A running mean in bfloat16, which the loss reads, and which is gated."""

    def step(state, batch):
        mean = (0.999 * state["m"] + 0.001 * (batch[0] + 2).mean(0).astype(B)).astype(B)
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, (batch[0] + 2 - mean.astype(F), batch[1])))(state["p"])
        new = {"p": tree_map(lambda p, g: p - 0.05 * g, state["p"], grads), "m": mean}
        return jmpscale.select_tree(jmpscale.all_finite(grads), new, state), loss

    return step, {"p": PARAMS, "m": jnp.full(16, 3, B)}


def critic_first():
    """A critic in bfloat16, which is updated before the gradient of the actor."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["c"], batch)
        critic = tree_map(lambda p, g: (p - 3e-3 * g).astype(p.dtype), state["c"], grads)
        grads = jax.grad(lambda a: -jnp.mean(predict(critic, batch[0] * jnp.tanh(predict(a, batch[0])))))(state["a"])
        return {"c": critic, "a": tree_map(lambda p, g: p - 0.01 * g, state["a"], grads)}, loss

    return step, {"c": HALF, "a": PARAMS}


def counter():
    """A learning rate that falls with a counter in bfloat16."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
        n = state["n"] + 1
        rate = 0.5 / n.astype(F)
        return {"p": tree_map(lambda p, g: p - rate * g, state["p"], grads), "n": n}, loss

    return step, {"p": PARAMS, "n": jnp.zeros((), B)}


def positions():
    """Positions of tokens in an expert, by a cumulative sum in bfloat16."""
    tx, x = optax.adam(1e-2), normal(10, 4096, 8)

    def loss(p, batch):
        gates = jax.nn.softmax(batch @ p["r"])
        expert = jnp.argmax(gates, 1)
        chosen = jax.nn.one_hot(expert, 4, dtype=B)
        place = jnp.sum((jnp.cumsum(chosen, 0) - 1) * chosen, 1).astype(jnp.int32)
        rows = jnp.zeros((4, 2048, 8)).at[expert, place].set(batch, mode="drop")
        out = jnp.tanh(jnp.einsum("ecd,edf->ecf", rows, p["e"])).at[expert, place].get(mode="fill", fill_value=0)
        return jnp.mean((out * jnp.take_along_axis(gates, expert[:, None], 1) - jnp.sin(batch)) ** 2)

    return *optimized(tx, {"r": normal(11, 8, 4), "e": normal(12, 4, 8, 8) / 3}, loss), itertools.repeat(x)


def sweep():
    """Learning rates that are tried together, with parameters in bfloat16."""
    rates = 10.0 ** -jnp.arange(1.0, 9.0)

    def one(p, rate, batch):
        loss, grads = jax.value_and_grad(loss_fn)(p, batch)
        return tree_map(lambda p, g: (p - rate * g).astype(B), p, grads), loss

    def step(state, batch):
        return jax.vmap(one, (0, 0, None))(state, rates, batch)

    return step, tree_map(lambda x: jnp.stack([x] * 8), HALF)


def two_scalers():
    """Two networks in float16, of which one has a loss scale that is too small."""

    def step(state, batch):
        new, total = {}, 0.0
        for name, factor, rate in (("a", 1.0, 0.05), ("b", 1e-9, 5e7)):
            loss, grads = jmpscale.value_and_grad(lambda p, c=factor: loss_fn(p, batch, H) * c)(
                state["s" + name], state[name]
            )
            finite = jmpscale.all_finite((loss, grads))
            params = tree_map(lambda p, g, r=rate: p - r * g, state[name], grads)
            new[name] = jmpscale.select_tree(finite, params, state[name])
            new["s" + name] = jmpscale.update(state["s" + name], finite, loss=loss)
            total += loss
        return new, total

    return step, {"a": PARAMS, "b": PARAMS, "sa": jmpscale.dynamic(2.0**8), "sb": jmpscale.dynamic(2.0**8)}


def unrolled():
    def step(params, batch):
        for i in range(8):
            loss, grads = jax.value_and_grad(loss_fn)(params, tree_map(lambda x, i=i: x[i::8], batch))
            params = tree_map(lambda p, g: (p - 3e-3 * g).astype(p.dtype), params, grads)
        return params, loss

    return step, HALF


def rounded_by_bits():
    def rounded(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)
        return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), F)

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return tree_map(lambda p, g: rounded(p - 1e-3 * g), params, grads), loss

    return step, jmpscale.cast(HALF, F)


def reduced_precision():
    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return tree_map(lambda p, g: jax.lax.reduce_precision(p - 1e-3 * g, 8, 7), params, grads), loss

    return step, jmpscale.cast(HALF, F)


def lone_average():
    """An average that is an argument of its own."""

    def step(params, mean, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, (batch[0] + 2 - mean.astype(F), batch[1]))
        mean = (0.999 * mean + 0.001 * (batch[0] + 2).mean(0).astype(B)).astype(B)
        return tree_map(lambda p, g: p - 0.05 * g, params, grads), mean, loss

    return step, PARAMS, jnp.full(16, 3, B)


def merged():
    """Adapters that are merged into weights in bfloat16 every 2 steps."""
    tx = optax.adam(1e-3)
    adapters = {"down": normal(5, 16, 8) / 4, "up": jnp.zeros((8, 64))}

    def loss(params, base, batch):
        return loss_fn({"a": base.astype(F) + 0.1 * params["down"] @ params["up"], "b": PARAMS["b"]}, batch)

    def step(state, batch):
        loss_value, grads = jax.value_and_grad(loss)(state["p"], state["w"], batch)
        updates, opt_state = tx.update(grads, state["o"])
        params, n = optax.apply_updates(state["p"], updates), state["n"] + 1

        def merge(params, base):
            return params | {"up": jnp.zeros((8, 64))}, (base + 0.1 * params["down"] @ params["up"]).astype(B)

        params, base = jax.lax.cond(n % 2 == 0, merge, lambda *x: x, params, state["w"])
        return {"p": params, "w": base, "o": opt_state, "n": n}, loss_value

    return step, {"p": adapters, "w": HALF["a"], "o": tx.init(adapters), "n": jnp.int32(0)}


def rate_in_state():
    """A learning rate in bfloat16, times 0.999 in each step."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
        rate = state["r"] * 0.999
        return {"p": tree_map(lambda p, g: p - rate.astype(F) * g, state["p"], grads), "r": rate.astype(B)}, loss

    return step, {"p": PARAMS, "r": jnp.asarray(0.3, B)}


def lost_decay(right):
    """Stochastic rounding after a decay, which bfloat16 rounds to a factor of 1."""
    step, state = stochastic(stochastic_by_bits)

    def with_decay(state, batch):
        factor = 1 - 1e-3
        decayed = {k: ((p.astype(F) if right else p) * factor).astype(p.dtype) for k, p in state["p"].items()}
        return step(state | {"p": decayed}, batch)

    return with_decay, state


def transported():
    """Flow matching, whose pairs of noise and data come from Sinkhorn's algorithm in float16: an argmax hides NaN."""
    keys = jax.random.split(jax.random.key(4), 3)
    params = {"a": 0.5 * normal(5, 9, 64), "b": 0.1 * normal(6, 64, 8)}
    tx = jmpscale.with_loss_scaling(optax.adam(3e-3))

    @jmpscale.autocast
    def loss(params, batch):
        noise, data, t = batch
        # exp(-cost) as a matmul of features, whose largest elements exceed 65504
        cost = jnp.sum(noise**2, 1)[:, None] + jnp.sum(data**2, 1) - 2 * jnp.matmul(noise, data.T, precision="highest")
        kernel = jnp.exp(12 - cost / 2)
        u = jnp.ones(len(noise))
        for _ in range(5):
            v = 1 / (kernel.T @ u[:, None])[:, 0]
            u = 1 / (kernel @ v[:, None])[:, 0]
        data = data[jnp.argmax(u[:, None] * kernel * v, 1)]
        x = (1 - t) * noise + t * data
        flow = jnp.tanh(jnp.concatenate([x, t], 1) @ params["a"]) @ params["b"]
        return jnp.mean((flow - (data - noise)) ** 2)

    def step(state, batch):
        value, grads = jmpscale.value_and_grad(loss)(state["o"], state["p"], batch)
        updates, opt_state = tx.update(grads, state["o"], state["p"], value=value)
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state}, value

    def batches():
        for i in itertools.count():
            noise, data, t = (jax.random.fold_in(key, i) for key in keys)
            yield jax.random.normal(noise, (64, 8)), 0.3 * jax.random.normal(data, (64, 8)) + 1, jax.random.uniform(t, (64, 1))

    return step, {"p": params, "o": tx.init(params)}, batches()


def noisy_in_half():
    def step(state, batch):
        key, *keys = jax.random.split(state["key"], 3)
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
        noise = {k: 0.3 * jax.random.normal(key, grads[k].shape) for k, key in zip(PARAMS, keys, strict=True)}
        params = tree_map(lambda p, g, n: (p - 1e-4 * (g.astype(F) + n)).astype(B), state["p"], grads, noise)
        return {"p": params, "key": key}, loss

    return step, {"p": HALF, "key": jax.random.key(1)}


# A fault, the number of steps, and what is named: a leaf, or the loss, "result[1]"; None where the run does not show it.
# A program is a step, its state, and its batches, if it has others than `BATCH`.
FAULTS = {
    "update from a half copy": (half_copy, 400, "state['p']['a']"),
    "gated mean that the loss reads": (gated_mean, 400, "state['m']"),
    "critic before the actor": (critic_first, 400, "state['c']['a']"),
    "MultiSteps, bfloat16 parameters": (
        lambda: optimized(optax.MultiSteps(optax.sgd(1e-2), 4).gradient_transformation(), HALF),
        400,
        "state['p']['a']",
    ),
    "Adam, bfloat16 parameters": (lambda: optimized(optax.adam(1e-4), HALF), 200, "state['p']['a']"),
    "counter in bfloat16": (counter, 600, "state['n']"),
    "positions by a cumulative sum": (positions, 60, "result[1]"),
    "Kahan, wrong sign": (lambda: kahan(1, 1e-4), 400, "state['p']['a']"),
    "noise and bfloat16 parameters": (
        noisy_in_half, 400, "state['p']['a']"
    ),
    "stochastic rounding with one key": (
        lambda: stochastic(stochastic_by_noise, 1e-4, fixed_key=list(jax.random.split(jax.random.key(5)))),
        400,
        "state['p']['a']",
    ),
    "learning rates by vmap": (sweep, 400, "state['a']"),
    "two scalers, one too small": (two_scalers, 400, "state['b']['a']"),
    "updates unrolled": (unrolled, 400, "params['a']"),
    "average that stalls": (lambda: averaged(B, 0.999), 400, "state['m']['a']"),
    "rounding by reduce_precision": (reduced_precision, 400, "params['a']"),
    "lone average": (lone_average, 400, "mean"),
    "merge into bfloat16 weights": (merged, 400, "state['w']"),
    "argmax hides an overflow": (transported, 150, "result[1]"),
    "float16 without loss scaling": (
        lambda: optimized(optax.adam(1e-3), loss=lambda p, b: 1e-6 * loss_fn(p, b, H)), 200, "state['p']['a']"
    ),
    "learning rate times 0.999 in bfloat16": (rate_in_state, 400, None),
    "rounding by bits": (rounded_by_bits, 400, None),
    "decay of 1 before stochastic rounding": (lambda: lost_decay(False), 1000, None),
}


def diagnosed(program, steps):
    """Returns the diagnosis of a run, and the seconds that it takes, without the diagnosis of a step."""
    step, *state = program
    batches = state.pop() if isinstance(state[-1], Iterator) else itertools.repeat(BATCH)
    start = time.perf_counter()
    found = jmpscale.diagnose_run(step, itertools.islice(batches, steps))(*state)
    return found, time.perf_counter() - start


def row(name, state, program, steps, expected=None):
    found, seconds = diagnosed(program, steps)
    losses = [None if x is None else float(np.mean(x[-steps // 5 :])) for x in (found.loss, found.loss_float32, found.loss_spread)]
    new = {"program": name, "state": state, "expected": expected, "steps": steps, "losses": losses}
    new |= {"progress": found.progress, "skips": [found.skips, found.skips_float32], "seconds": round(seconds, 1)}
    named = {kind: [name for x in found.findings if x.kind is kind for name in x.names] for kind in jmpscale.FindingKind}
    new |= {"named": {kind.value: names for kind, names in named.items() if names}, "worst step": found.worst_step}
    new |= {"summary": found.summary}
    print(new, flush=True)
    return new


def late(program, batches=None):
    """Returns a program after many steps, by default on one batch."""
    step, state = program
    if batches is None:
        return step, jax.jit(lambda s: jax.lax.scan(lambda s, _: (step(s, BATCH)[0], None), s, None, LATE)[0])(state)
    compiled = jax.jit(step)
    for batch in itertools.islice(batches, LATE):
        state, _ = compiled(state, batch)
    return step, state


def small_batches(seed):
    """Yields batches of 32 of 4,096 examples."""
    x = normal(20, 4096, 16)
    y = jnp.sin(2 * x[:, :1]) + 0.05 * normal(21, 4096, 1)
    for i in itertools.count():
        chosen = jax.random.randint(jax.random.fold_in(jax.random.key(seed), i), (32,), 0, 4096)
        yield x[chosen], y[chosen]


def right_rows():
    for name, make in RIGHT.items():
        yield row(name, "first", make(), STEPS)
        yield row(name, "late", late(make()), STEPS)


def small_batch_rows():
    for name in SMALL_BATCHES:
        make = RIGHT[name]
        yield row(name, "first", (*make(), small_batches(1)), STEPS)
        yield row(name, "late", (*late(make(), small_batches(2)), small_batches(1)), STEPS)


def fault_rows():
    for name, (make, steps, expected) in FAULTS.items():
        yield row(name, "first", make(), steps, expected)


def main():
    parts = {"right": right_rows, "right, small batches": small_batch_rows, "faults": fault_rows}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.runs", description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", default=list(parts), help="the parts of the study to run (default: all)")
    for part in parser.parse_args().parts:
        about = record.about("benchmarks.studies.runs", "cpu")
        record.add(RESULTS, {"about": about, part: list(parts[part]())})


if __name__ == "__main__":
    main()
