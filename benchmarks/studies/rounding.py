"""Which errors of gradients by rounding harm a training run: `python -m benchmarks.studies.rounding`.

Each program is diagnosed at its first step, and trained in float32 and in half precision from the same parameters with
the same batches. The loss is computed in float32 from the trained parameters, and is the mean over the seeds.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

import jmpscale
from benchmarks import record

RESULTS = pathlib.Path(__file__).with_suffix(".json")
SEEDS = 3


class ResNet(linen.Module):
    """A residual network of 18 convolutions with batch normalization."""

    @linen.compact
    def __call__(self, x):
        """Returns the logits of images."""

        def conv(x, features, stride=1, size=3):
            x = linen.Conv(features, (size, size), (stride, stride), use_bias=False)(x)
            return linen.BatchNorm(use_running_average=False)(x)

        x = linen.relu(conv(x, 8))
        for features, stride in [(8, 1), (8, 1), (16, 2), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)]:
            y = conv(linen.relu(conv(x, features, stride)), features)
            x = linen.relu(y + (x if x.shape == y.shape else conv(x, features, stride, 1)))
        return linen.Dense(10)(x.mean((1, 2)))


def residual_network(seed, *, size):
    """Returns a loss function, its parameters, the data, the size of a batch, the steps and the learning rate."""
    keys = jax.random.split(jax.random.key(seed), 3)
    labels = jnp.arange(64) % 10
    prototypes = jax.random.normal(keys[0], (10, 16, 16, 3))
    images = prototypes[labels] + 1.5 * jax.random.normal(keys[1], (64, 16, 16, 3))
    model = ResNet()
    variables = jax.jit(model.init)(keys[2], images[:8])

    def loss_fn(params, batch):
        logits, _ = model.apply(variables | {"params": params}, batch[0], mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return loss_fn, jmpscale.autocast(loss_fn), variables["params"], (images, labels), size, 60, 3e-3


def time_steps(seed, *, largest):
    """Returns a network of time steps, which are rounded to bfloat16 in half precision."""
    keys = jax.random.split(jax.random.key(seed), 3)
    frequencies = jnp.exp(-jnp.log(1e4) * jnp.arange(32) / 32)
    times = jax.random.uniform(keys[2], (512,), maxval=largest)
    params = {
        "first": jax.random.normal(keys[0], (64, 64)) / 8,
        "bias": jnp.zeros(64),
        "last": jax.random.normal(keys[1], (64, 1)) / 8,
    }

    def loss_in(dtype):
        def loss_fn(params, batch):
            angles = batch.astype(dtype).astype(jnp.float32)[:, None] * frequencies
            features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype)
            hidden = jax.nn.silu(features @ params["first"].astype(dtype) + params["bias"].astype(dtype))
            out = (hidden @ params["last"].astype(dtype)).astype(jnp.float32)[:, 0]
            return jnp.mean((out - jnp.cos(batch)) ** 2)

        return loss_fn

    return loss_in(jnp.float32), loss_in(jnp.bfloat16), params, times, 512, 1000, 3e-3


PROGRAMS = {
    "time steps up to 10, bfloat16": (time_steps, {"largest": 10.0}),
    "time steps up to 100, bfloat16": (time_steps, {"largest": 100.0}),
    "time steps up to 1,000, bfloat16": (time_steps, {"largest": 1000.0}),
    "ResNet-18, 8 images, float16": (residual_network, {"size": 8}),
}


def train(loss_fn, evaluate, params, data, size, steps, rate):
    """Returns the loss in float32 after a training run with Adam."""
    tx = jmpscale.with_loss_scaling(optax.adam(rate), jmpscale.static(2.0**10))
    opt_state, rng = tx.init(params), np.random.default_rng(0)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    count = len(jax.tree.leaves(data)[0])
    for _ in range(steps):
        chosen = rng.choice(count, size, replace=False)
        params, opt_state = step(params, opt_state, jax.tree.map(lambda x, chosen=chosen: x[chosen], data))
    return float(evaluate(params, data))


def measure(create, options):
    """Returns the error of the first gradients, and the mean losses after training in both precisions."""
    found = []
    for seed in range(SEEDS):
        in_float32, in_half, params, data, size, steps, rate = create(seed, **options)
        first = jax.tree.map(lambda x, size=size: x[:size], data)
        error = jmpscale.diagnose(in_half)(jmpscale.static(2.0**10), params, first).gradient_error
        evaluate = jax.jit(in_float32)
        losses = [train(fun, evaluate, params, data, size, steps, rate) for fun in (in_float32, in_half)]
        found.append([error, *losses])
    names = "gradient_error", "loss, float32", "loss, half precision"
    return {name: float(f"{x:.3g}") for name, x in zip(names, np.mean(found, axis=0), strict=True)}


def main():
    """Measures, prints a table, and writes the figures."""
    argparse.ArgumentParser(prog="python -m benchmarks.studies.rounding", description=__doc__).parse_args()
    figures = {}
    for name, (create, options) in PROGRAMS.items():
        figures[name] = measure(create, options)
        print(f"{name}: {json.dumps(figures[name])}", flush=True)
    about = record.about("benchmarks.studies.rounding", jax.devices()[0].device_kind)
    RESULTS.write_text(json.dumps({"about": about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
