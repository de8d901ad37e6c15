"""What one infinite pixel does to a model with BatchNorm. `python -m benchmarks.studies.one_infinite_pixel`.

A small convolutional network of Flax Linen learns scikit-learn's digits for 120 steps. One pixel of the batch at step 60
is infinite. Two training steps are compared:

- `DynamicScale` with the update of Flax's ImageNet example (examples/imagenet/train.py, commit 594b4529). If gradients
  are not finite, it restores the parameters and the optimizer state, and keeps the new batch statistics.
- jmpscale's functional API, which selects the batch statistics by the same flag as the parameters.

As in the example, the layers compute in float16, the images are float16, and the optimizer is SGD with Nesterov momentum.
jmpscale also trains the network with float32 layers and autocast. Two controls use `DynamicScale`: one without an
infinite pixel, and one whose step selects the batch statistics, too.
"""

import functools
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import dynamic_scale, train_state
from sklearn.datasets import load_digits

import jmpscale
from benchmarks import record

STEPS, BATCH, INFINITE_STEP = 120, 64, 60
TRAINING_IMAGES = 1400  # of 1,797; the others are evaluated
AVERAGED_STEPS = 20
SEEDS = range(5)
RESULTS = pathlib.Path(__file__).with_suffix(".json")
DIGITS = load_digits()
IMAGES, LABELS = np.float32(DIGITS.images[..., None] / 16), DIGITS.target


class Network(nn.Module):
    """Two convolutions with BatchNorm, and one linear layer."""

    dtype: Any

    @nn.compact
    def __call__(self, images, *, train):
        x = images
        for features in 16, 32:
            x = nn.Conv(features, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(10, dtype=self.dtype)(x.reshape(len(x), -1))


class State(train_state.TrainState):
    """The state of a training run; `scaler` is Flax's or jmpscale's."""

    batch_stats: Any
    scaler: Any


def cross_entropy(network, params, batch_stats, images, labels):
    """Computes the mean loss of a batch, and the new batch statistics."""
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = network.apply(variables, images, train=True, mutable=["batch_stats"])
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 10)).mean(), new["batch_stats"]


def flax_step(loss_fn, state, images, labels, *, select_statistics=False):
    """Takes a step as Flax's ImageNet example does, on one device."""
    grad_fn = state.scaler.value_and_grad(loss_fn, has_aux=True)
    scaler, is_finite, (loss, batch_stats), grads = grad_fn(state.params, state.batch_stats, images, labels)
    select = functools.partial(jax.tree.map, functools.partial(jnp.where, is_finite))
    new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    if select_statistics:  # unlike the example
        new = new.replace(batch_stats=select(new.batch_stats, state.batch_stats))
    params, opt_state = select(new.params, state.params), select(new.opt_state, state.opt_state)
    return new.replace(params=params, opt_state=opt_state, scaler=scaler), loss


def jmpscale_step(loss_fn, state, images, labels):
    """Takes a step with jmpscale's functional API."""
    grad_fn = jmpscale.value_and_grad(loss_fn, has_aux=True)
    (loss, batch_stats), grads = grad_fn(state.scaler, state.params, state.batch_stats, images, labels)
    finite = jmpscale.all_finite((loss, grads))
    new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    state = jmpscale.select_tree(finite, new, state)
    return state.replace(scaler=jmpscale.update(state.scaler, finite, loss=loss)), loss


RUNS = {  # the dtype of the layers, the step, and whether a pixel is infinite
    "DynamicScale": (jnp.float16, flax_step, True),
    "DynamicScale, no infinite pixel": (jnp.float16, flax_step, False),
    "DynamicScale, statistics selected": (jnp.float16, functools.partial(flax_step, select_statistics=True), True),
    "jmpscale, float16 layers": (jnp.float16, jmpscale_step, True),
    "jmpscale, autocast": (jnp.float32, jmpscale_step, True),
}


def train(dtype, step, infinite, seed):
    """Trains the network from a seed, and evaluates it with its running averages."""
    network = Network(dtype)
    loss_fn = functools.partial(cross_entropy, network)
    if dtype == jnp.float32:
        loss_fn = jmpscale.autocast(loss_fn)
    variables = network.init(jax.random.key(seed), IMAGES[:1], train=True)
    scaler = jmpscale.dynamic() if step is jmpscale_step else dynamic_scale.DynamicScale()
    tx = optax.sgd(0.05, momentum=0.9, nesterov=True)
    state = State.create(
        apply_fn=network.apply, params=variables["params"], tx=tx, scaler=scaler, batch_stats=variables["batch_stats"]
    )
    train_step, rng, losses = jax.jit(functools.partial(step, loss_fn)), np.random.default_rng(seed), []
    for n in range(STEPS):
        chosen = rng.integers(0, TRAINING_IMAGES, BATCH)
        images = IMAGES[chosen].astype(dtype)
        if infinite and n == INFINITE_STEP:
            images[0, 3, 3] = np.inf
        state, loss = train_step(state, images, LABELS[chosen])
        losses.append(float(loss))
    evaluated = network.apply(
        {"params": state.params, "batch_stats": state.batch_stats}, IMAGES[TRAINING_IMAGES:].astype(dtype), train=False
    )
    return {
        "loss": round(float(np.mean(losses[-AVERAGED_STEPS:])), 4),
        "loss at step 60": f"{losses[INFINITE_STEP]:.3f}",  # in JSON, a NaN is a text
        "accuracy": round(float(np.mean(evaluated.argmax(-1) == LABELS[TRAINING_IMAGES:])), 4),
        "finite statistics": bool(jmpscale.all_finite(state.batch_stats)),
    }


def main():
    """Trains, prints, and writes the figures."""
    runs = []
    for seed in SEEDS:
        for name, settings in RUNS.items():
            runs.append({"seed": seed, "run": name} | train(*settings, seed))
            print(runs[-1], flush=True)
    about = record.about("benchmarks.studies.one_infinite_pixel", jax.devices()[0].device_kind) | {"steps": STEPS}
    record.add(RESULTS, {"about": about, "runs": runs})


if __name__ == "__main__":
    main()
