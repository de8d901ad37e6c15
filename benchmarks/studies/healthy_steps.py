"""Whether a diagnosis is right about steps that look healthy: `python -m benchmarks.studies.healthy_steps`.

A small network learns 256 examples with several optimizers, in bfloat16 and in float32, from the same parameters with
the same batches. `diagnose_step` sees the step during training. After training, two losses are evaluated in float32: of
the 256 examples, and of 4,096 others.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import jmpscale
from benchmarks import record, table

RESULTS = table.STUDIES / "healthy_steps.json"
B, F = jnp.bfloat16, jnp.float32
SEEDS, STEPS, EXAMPLES, BATCH = 5, 3000, 256, 64
WORSE = 1.05  # the ratio of two losses from which on a difference matters, as in the thresholds of the diagnosis


def examples(seed, count):
    """Returns inputs of 64 numbers, and the sine of the first one."""
    x = jax.random.normal(jax.random.key(seed), (count, 64))
    return x, jnp.sin(x[:, :1])


TRAINING, OTHERS = examples(0, EXAMPLES), examples(1, 4096)


def parameters(seed, dtype):
    keys = jax.random.split(jax.random.key(100 + seed))
    params = {"a": jax.random.normal(keys[0], (64, 64)) / 8, "b": jax.random.normal(keys[1], (64, 1)) / 8}
    return jmpscale.cast(params, dtype)


def loss_fn(params, batch, dtype):
    a, b, x = jmpscale.cast((params["a"], params["b"], batch[0]), dtype)
    return jnp.mean(((jnp.tanh(x @ a) @ b).astype(F) - batch[1]) ** 2)


# --- Steps. A state is a pair of the parameters and everything else. ---


def optimized(tx, dtype, **extra):
    """Returns the initial rest of the state, given the parameters, and a step."""

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, dtype)
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return (optax.apply_updates(params, updates), opt_state), loss

    return tx.init, step


def newton_schulz(dtype):
    """Muon, whose iteration is in bfloat16."""

    def orthogonal(momentum):
        a, b, c = map(dtype, (3.4445, -4.7750, 2.0315))
        x = momentum.astype(dtype)
        x = x / (jnp.linalg.norm(x.astype(F)).astype(dtype) + dtype(1e-7))
        for _ in range(5):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        return x.astype(F)

    def step(state, batch):
        params, momentum = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, dtype)
        momentum = jax.tree.map(lambda m, g: 0.95 * m + g, momentum, grads)
        change = {"a": orthogonal(momentum["a"]), "b": momentum["b"]}
        return (jax.tree.map(lambda p, c: p - 0.01 * c, params, change), momentum), loss

    return lambda params: jax.tree.map(jnp.zeros_like, params), step


def shampoo(dtype):
    """Shampoo, whose statistics are products of gradients in bfloat16."""

    def root(matrix):
        values, vectors = jnp.linalg.eigh(matrix + 1e-6 * jnp.eye(64))
        return (vectors * jnp.maximum(values, 1e-12) ** -0.25) @ vectors.T

    def step(state, batch):
        params, (left, right) = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, dtype)
        g, half = grads["a"], grads["a"].astype(dtype)
        left, right = left + (half @ half.T).astype(F), right + (half.T @ half).astype(F)
        change = {"a": 0.1 * root(left) @ g @ root(right), "b": 0.1 * grads["b"]}
        return (jax.tree.map(jnp.subtract, params, change), (left, right)), loss

    return lambda params: (1e-6 * jnp.eye(64), 1e-6 * jnp.eye(64)), step


def averaged(decay, dtype):
    """Adam, with an average of the parameters in half precision, which is evaluated in their place."""
    tx = optax.adam(1e-3)

    def step(state, batch):
        average, (params, opt_state) = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, B)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda e, p: e * dtype(decay) + p.astype(dtype) * dtype(1 - decay), average, params)
        return (average, (params, opt_state)), loss

    return lambda params: (jmpscale.cast(params, F), tx.init(jmpscale.cast(params, F))), step


def adapted_loss(params, batch, dtype, inner_dtype=F):
    """MAML: the loss of the second half of a batch after an update with the first half, of which the sum may round."""
    first, second = (jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2))
    grads = jax.grad(loss_fn)(params, first, dtype)
    before, change = jmpscale.cast((params, jax.tree.map(lambda g: 0.3 * g, grads)), inner_dtype)
    return loss_fn(jmpscale.cast(jax.tree.map(jnp.subtract, before, change), F), second, dtype)


def maml(dtype):
    def step(state, batch):
        params, rest = state
        loss, grads = jax.value_and_grad(adapted_loss)(params, batch, dtype, dtype)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest), loss

    return lambda params: (), step


class Program(NamedTuple):
    """A step in half precision and in float32."""

    create: Callable  # from the dtype to the initial rest of the state, and the step
    diagnosed: int = 300  # the step that is diagnosed
    dtype: type = B
    narrow: bool = False  # whether the parameters are in half precision, too
    evaluated: Callable = loss_fn


def with_optimizer(create, **extra):
    return lambda dtype: optimized(create(dtype), dtype, **extra)


PROGRAMS = {
    "Adam, b1 in bfloat16": Program(with_optimizer(lambda d: optax.adam(1e-3, mu_dtype=d)), 1000),
    "AdamW, b1 in bfloat16": Program(with_optimizer(lambda d: optax.adamw(1e-3, mu_dtype=d)), 2000),
    "SGD, momentum in bfloat16": Program(
        with_optimizer(lambda d: optax.sgd(1e-2, momentum=0.9, accumulator_dtype=d)), 1000
    ),
    "COCOB": Program(with_optimizer(lambda d: contrib.cocob())),
    "Adafactor": Program(with_optimizer(lambda d: optax.adafactor(1e-2))),
    "Adafactor, momentum in bfloat16": Program(
        with_optimizer(lambda d: optax.adafactor(1e-2, 8, momentum=0.9, dtype_momentum=d))
    ),
    "Muon": Program(with_optimizer(lambda d: contrib.muon(1e-2))),
    "Muon, momentum in bfloat16": Program(with_optimizer(lambda d: contrib.muon(1e-2, mu_dtype=d))),
    "Muon, iteration in bfloat16": Program(newton_schulz, 1000),
    "Prodigy": Program(with_optimizer(lambda d: contrib.prodigy(1.0))),
    "D-Adaptation": Program(with_optimizer(lambda d: contrib.dadapt_adamw(1.0))),
    "Lion": Program(with_optimizer(lambda d: optax.lion(1e-4))),
    "Lion, momentum in bfloat16": Program(with_optimizer(lambda d: optax.lion(1e-4, mu_dtype=d))),
    "schedule-free SGD, z in bfloat16": Program(
        with_optimizer(lambda d: contrib.schedule_free(optax.sgd(1e-2), 1e-2, state_dtype=d))
    ),
    "Prodigy, parameters in bfloat16": Program(with_optimizer(lambda d: contrib.prodigy(1.0)), narrow=True),
    "Momo, parameters in bfloat16": Program(
        with_optimizer(lambda d: contrib.momo(1e-2), value=jnp.float32(1.0)), narrow=True
    ),
    "Adam of 1e-2, all in bfloat16": Program(with_optimizer(lambda d: optax.adam(1e-2)), 0, narrow=True),
    "MAML, inner update in bfloat16": Program(maml, evaluated=adapted_loss),
    "Shampoo, statistics in bfloat16": Program(shampoo, 0),
    "average of 0.9 in bfloat16": Program(lambda d: averaged(0.9, d), 1000, narrow=True),
    "average of 0.99 in float16": Program(lambda d: averaged(0.99, d), 1000, jnp.float16, narrow=True),
}


def trainer(program, dtype, steps):
    """Returns the step, and a function from a seed to the state after steps."""
    create, step = program.create(dtype)

    @jax.jit
    def train(seed):
        def body(state, key):
            chosen = jax.random.choice(key, EXAMPLES, (BATCH,))
            return step(state, jax.tree.map(lambda x: x[chosen], TRAINING))[0], None

        params = parameters(seed, dtype if program.narrow else F)
        return jax.lax.scan(body, (params, create(params)), jax.random.split(jax.random.key(seed), steps))[0]

    return step, train


def losses(program, dtype):
    """Returns the losses of the training examples, and of others, after training with each seed."""
    _, train = trainer(program, dtype, STEPS)
    evaluate = jax.jit(lambda params: [program.evaluated(params, batch, F) for batch in (TRAINING, OTHERS)])
    return np.array([evaluate(train(seed)[0]) for seed in range(SEEDS)]).T


def compared(half, full):
    """Compares losses of the same seeds: the geometric mean of their ratio, and the factor of its standard error.

    Half precision is worse if the ratio is more than `WORSE`, and its logarithm more than two standard errors.
    """
    both = {"half precision": half, "float32": full}
    found = {name: x.tolist() if np.isfinite(x).all() else "not finite" for name, x in both.items()}
    if "not finite" in found.values():
        return found | {"worse": found["float32"] != "not finite"}
    logs = np.log(half / full)
    mean, error = logs.mean(), logs.std(ddof=1) / math.sqrt(SEEDS)
    ratio = {"ratio": math.exp(mean), "standard error": math.exp(error)}
    return found | ratio | {"worse": bool(mean > max(math.log(WORSE), 2 * error))}


def measure(program):
    step, train = trainer(program, program.dtype, program.diagnosed)
    diagnosis = jmpscale.diagnose_step(step)(train(0), jax.tree.map(lambda x: x[:BATCH], TRAINING))
    half, full = losses(program, program.dtype), losses(program, F)
    return {
        "diagnosed after": program.diagnosed,
        "summary": diagnosis.summary,
        "training loss": compared(half[0], full[0]),
        "loss of other examples": compared(half[1], full[1]),
    }


# --- Metrics of a right step: reinforcement learning in which the forward pass alone is in bfloat16. ---


def policy_step(seed):
    """Returns a step of PPO with its metrics, which are computed in float32, and its arguments."""
    keys = jax.random.split(jax.random.key(seed), 8)
    x, advantages, returns = jax.random.normal(keys[0], (64, 16)), *jax.random.normal(keys[1], (2, 64))
    actions = jax.random.randint(keys[2], (64,), 0, 10)
    shapes = {"hidden": (16, 64), "policy": (64, 10), "value": (64, 1)}
    params = {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys[3:6], shapes.items(), strict=True)
    }

    def model(params, dtype):
        half, inputs = jmpscale.cast((params, x), dtype)
        hidden = jnp.tanh(inputs @ half["hidden"])
        log_p = jax.nn.log_softmax((hidden @ half["policy"]).astype(F))
        return log_p, (hidden @ half["value"]).astype(F)[:, 0]

    def step(params, old):
        def loss_fn(params):
            log_p, value = model(params, B)
            log_ratio = log_p[jnp.arange(64), actions] - old
            ratio = jnp.exp(log_ratio)
            clipped = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
            metrics = {
                "entropy": -(jnp.exp(log_p) * log_p).sum(-1).mean(),
                "explained variance": 1 - jnp.var(returns - value) / jnp.var(returns),
                "mean value": value.mean(),
                "clipped fraction": (jnp.abs(ratio - 1) > 0.02).mean(),
                "KL divergence": jnp.mean(ratio - 1 - log_ratio),
                "mean log ratio": log_ratio.mean(),
            }
            return jnp.mean((value - returns) ** 2) - clipped.mean(), metrics

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss, **metrics}

    before = jax.tree.map(lambda p: p * (1 + 0.02 * jax.random.normal(keys[6], p.shape)), params)
    return step, (params, model(before, F)[0][jnp.arange(64), actions])


def metric_errors():
    """Returns the error of the worst gradient, and of each metric, of several seeds."""
    found = {}
    for seed in range(SEEDS):
        step, args = policy_step(seed)
        diagnosis = jmpscale.diagnose_step(step)(*args)
        errors = {change.name: change.error for change in diagnosis.changes}
        for name, error in {"gradients": diagnosis.gradient_error, **errors}.items():
            found.setdefault(name, []).append(error)
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.healthy_steps", description=__doc__)
    parser.add_argument("names", nargs="*", default=PROGRAMS, help="the programs; all of them by default")
    about = record.about("benchmarks.studies.healthy_steps", "cpu")
    for name in parser.parse_args().names:
        found = measure(PROGRAMS[name])
        print(name, found, flush=True)
        programs = record.read(RESULTS).get("programs", {})
        record.add(RESULTS, {"about": about, "programs": programs | {name: found}})
    record.add(RESULTS, {"metrics": metric_errors()})


if __name__ == "__main__":
    main()
