"""Measures what a diagnosis costs, relative to compiling and running the step: `python -m benchmarks.diagnosis`.

The step is the gradient of 12 unrolled transformer layers. Each figure is the CPU time of one run in one process,
because only the first diagnosis of a process compiles its operations.
"""

import json
import time

import jax
import jax.numpy as jnp

import jmpscale
from benchmarks import record

RESULTS = record.RESULTS / "diagnosis.json"
LAYERS, WIDTH = 12, 64


def init(key):
    """Returns the parameters of the layers."""
    shapes = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    shapes |= {"inner": (WIDTH, 4 * WIDTH), "outer": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(key, LAYERS * len(shapes)))
    return [{n: 0.1 * jax.random.normal(next(keys), shape) for n, shape in shapes.items()} for _ in range(LAYERS)]


def normalize(x):
    """Normalizes the last axis."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def loss_fn(params, x):
    """Returns the mean square of the activations."""
    for w in params:
        h = normalize(x)
        scores = jnp.einsum("bqd,bkd->bqk", h @ w["query"], h @ w["key"]) / WIDTH**0.5
        x = x + jax.nn.softmax(scores) @ (h @ w["value"]) @ w["out"]
        x = x + jax.nn.gelu(normalize(x) @ w["inner"]) @ w["outer"]
    return jnp.mean(x**2)


def process_time(fun):
    """Returns the process time of a call in seconds."""
    start = time.process_time()
    jax.block_until_ready(fun())
    return time.process_time() - start


def main():
    """Prints the figures, and writes them to the results."""
    half, scaler = jmpscale.autocast(loss_fn), jmpscale.dynamic(2.0**8)
    params, x = jax.block_until_ready((init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (4, 32, WIDTH))))
    step = process_time(lambda: jax.jit(jmpscale.value_and_grad(half))(scaler, params, x))
    first, later = (process_time(lambda: jmpscale.diagnose(half)(scaler, params, x).loss) for _ in range(2))
    seconds = {"step": step, "first diagnosis": first, "later diagnosis": later}
    figures = {name: round(value, 2) for name, value in seconds.items()}
    print(json.dumps(figures))
    record.add(
        RESULTS, {"about": record.about("benchmarks.diagnosis", jax.devices()[0].device_kind), "figures": figures}
    )


if __name__ == "__main__":
    main()
