"""Measures what a diagnosis costs, relative to compiling and running the step once: `python -m benchmarks.diagnosis`.

The step is the gradient of a program in which a loss scale fits, or of one with scores that overflow in one layer,
whose line is searched for. A figure is the median of the CPU time of all threads in seconds. The later diagnosis
follows the first one in the same process, which has compiled the operations that are not part of the program.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp

import jmpscale
from benchmarks import record
from jmpscale.__main__ import SEQUENCES, SHARD_TOKENS, init, shard_loss

RESULTS = record.RESULTS / "diagnosis.json"
WIDTH = 64
ALPHABET = 103  # characters in the text of the demonstration
OVERFLOW, FAULTY = "12 layers, of which one overflows", 7
SHAPES = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
SHAPES |= {"inner": (WIDTH, 4 * WIDTH), "outer": (4 * WIDTH, WIDTH)}


def init_layers(layers):
    """Returns the parameters of transformer layers, stacked."""
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    pairs = zip(SHAPES.items(), keys, strict=True)
    return {name: 0.1 * jax.random.normal(key, (layers, *shape)) for (name, shape), key in pairs}


def normalize(x):
    """Normalizes the last axis."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def layer(x, w):
    """Returns the activations after a transformer layer."""
    h = normalize(x)
    scores = jnp.einsum("bqd,bkd->bqk", h @ w["query"], h @ w["key"]) / WIDTH**0.5
    x = x + jax.nn.softmax(scores) @ (h @ w["value"]) @ w["out"]
    return x + jax.nn.gelu(normalize(x) @ w["inner"]) @ w["outer"]


def unrolled(params, x):
    """Returns the mean square of the activations after layers in a Python loop."""
    return jnp.mean(functools.reduce(layer, params, x) ** 2)


def scanned(params, x):
    """Returns the mean square of the activations after layers in a scan, which are computed again for the gradient."""
    step = jax.checkpoint(lambda x, w: (layer(x, w), None))
    return jnp.mean(jax.lax.scan(step, x, params)[0] ** 2)


def recurrence(params, x):
    """Returns the mean square of the states of a recurrence over the first axis."""

    def step(h, x):
        h = jnp.tanh(x @ params["inputs"] + h @ params["states"])
        return h, h

    return jnp.mean(jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1] ** 2)


def demonstration(params, tokens):
    """Returns the loss of the model that `python -m jmpscale` trains."""
    return shard_loss(params, tokens, 2.0**19)


def unrolled_program(count, faulty=None):
    """Returns layers in a Python loop, of which one may overflow, and their arguments."""
    stacked = init_layers(count)
    layers = [{name: w[i] for name, w in stacked.items()} for i in range(count)]
    if faulty is not None:
        layers[faulty]["query"] *= 9e3
    return unrolled, layers, jax.random.normal(jax.random.key(1), (4, 32, WIDTH))


def programs():
    """Returns the loss functions and their arguments, by name."""
    normal = functools.partial(jax.random.normal, jax.random.key(1))
    weights = {name: 0.1 * jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) for name in ("inputs", "states")}
    shape = SEQUENCES, SHARD_TOKENS // SEQUENCES + 1
    tokens = jax.random.randint(jax.random.key(2), shape, 0, ALPHABET)
    return {
        "12 layers": unrolled_program(12),
        OVERFLOW: unrolled_program(12, FAULTY),
        "recurrence of 2,000 steps": (recurrence, weights, normal((2000, 8, WIDTH))),
        "scan of 24 layers with remat": (scanned, init_layers(24), normal((4, 32, WIDTH))),
        "the demonstration": (demonstration, init(jax.random.key(0), ALPHABET), tokens),
    }


def process_time(fun):
    """Returns the CPU time of a call in seconds."""
    start = time.process_time()
    jax.block_until_ready(fun())
    return time.process_time() - start


def measure(repeats, loss_fn, *args):
    """Returns the CPU times of the step, of the first diagnosis and of a later one."""
    half, scaler = jmpscale.autocast(loss_fn), jmpscale.dynamic(2.0**8)
    args, taken = jax.block_until_ready(args), []
    for _ in range(repeats):
        jax.clear_caches()
        step = process_time(lambda: jax.jit(jmpscale.value_and_grad(half))(scaler, *args))
        jax.clear_caches()
        taken.append([step, *(process_time(lambda: jmpscale.diagnose(half)(scaler, *args).loss) for _ in range(2))])
    names = "step", "first diagnosis", "later diagnosis"
    return {name: round(statistics.median(x), 2) for name, x in zip(names, zip(*taken, strict=True), strict=True)}


def main():
    """Prints the figures, and writes them to the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis", description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="the number of measurements of each figure (default: 3)")
    parser.add_argument("--layers", type=int, help="print the figures of so many layers alone, of which one overflows")
    options = parser.parse_args()
    if options.layers:
        print(json.dumps(measure(options.repeats, *unrolled_program(options.layers, options.layers // 2))))
        return
    figures = {}
    for name, (loss_fn, *args) in programs().items():
        figures[name] = measure(options.repeats, loss_fn, *args)
        print(f"{name}: {json.dumps(figures[name])}", flush=True)
    about = record.about("benchmarks.diagnosis", jax.devices()[0].device_kind)
    release = ".".join(jax.__version__.split(".")[:2])  # releases have different compilers for CPUs
    record.add(RESULTS, {f"JAX {release}": {"about": about, "figures": figures}})


if __name__ == "__main__":
    main()
