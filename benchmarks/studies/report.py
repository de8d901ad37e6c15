"""What `grad_report` costs in a training step. Run with `python -m benchmarks.studies.report`.

The same AdamW step is timed four ways, in turns, so that the machine's drift cancels: without a report, with one at
every step, with its `totals` only, and with one in the branch of a `jax.lax.cond` that only skipped steps take.
"""

import argparse
import datetime
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmpscale

SHAPES = {
    "16 layers of 512, batch 256": (16, 512, 256),
    "100 of 256, batch 32": (100, 256, 32),
    "16 of 1024, batch 32": (16, 1024, 32),
}
ROUNDS = 41
RESULTS = pathlib.Path(__file__).with_suffix(".json")


def nothing(grads, scaler, finite):
    """No report."""
    return


def always(grads, scaler, finite):
    """A whole report at every step."""
    return jmpscale.grad_report(grads, scaler=scaler)


def totals(grads, scaler, finite):
    """The sums over all leaves, at every step."""
    return jmpscale.grad_report(grads, scaler=scaler).totals()


def on_a_skip(grads, scaler, finite):
    """A report only where the gradients are not finite."""

    def full():
        return jmpscale.grad_report(grads, scaler=scaler)

    def empty():
        return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), jax.eval_shape(full))

    return jax.lax.cond(finite, empty, full)


def make(layers, width, batch, look):
    """Compiles the step; returns it, the state it takes over and hands back, and its batch."""
    tx = optax.adamw(1e-3)
    keys = jax.random.split(jax.random.key(0), layers)
    params = [(jax.random.normal(k, (width, width)) * width**-0.5, jnp.zeros((1, width))) for k in keys]

    def loss_fn(params, x):
        for weights, biases in params:
            x = jnp.tanh(x @ weights + biases)
        return jnp.mean(x**2)

    def train_step(params, opt_state, scaler, x):
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, x)
        finite = jmpscale.all_finite((loss, grads))
        seen = look(grads, scaler, finite)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)
        return (params, opt_state, jmpscale.update(scaler, finite, loss=loss)), seen

    state, x = (params, tx.init(params), jmpscale.dynamic()), jax.random.normal(jax.random.key(1), (batch, width))
    start = time.process_time()
    step = jax.jit(train_step, donate_argnums=(0, 1, 2)).lower(*state, x).compile()
    return step, state, x, time.process_time() - start


def measure(shape):
    """Returns of each way the median step in ms, its ratio to the step without a report, and CPU seconds to compile."""
    ways = {look.__name__: make(*shape, look) for look in (nothing, always, totals, on_a_skip)}
    states = {name: state for name, (_, state, _, _) in ways.items()}
    taken = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (step, _, x, _) in ways.items():
            start = time.perf_counter()
            states[name], _ = jax.block_until_ready(step(*states[name], x))
            taken[name].append(time.perf_counter() - start)
    bare = np.array(taken["nothing"])
    return {
        name: {
            "ms": round(1e3 * float(np.median(times)), 2),
            "ratio": round(float(np.median(np.array(times) / bare)), 3),
            "compile_s": round(ways[name][3], 2),
        }
        for name, times in taken.items()
    }


def describing():
    """Returns the milliseconds that `describe` takes for a tree of a thousand leaves, the reading included."""
    report = jax.jit(jmpscale.grad_report)({f"params/layer_{i}": jnp.ones((4, 4)) for i in range(1000)})
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.tree.map(jnp.copy, report).describe(limit=1000)
        times.append(time.perf_counter() - start)
    return round(1e3 * float(np.median(times)), 1)


def main():
    """Measures, prints a table, and writes the figures."""
    argparse.ArgumentParser(prog="python -m benchmarks.studies.report", description=__doc__).parse_args()
    figures = {name: measure(shape) for name, shape in SHAPES.items()}
    for name, ways in figures.items():
        print(name)
        for way, numbers in ways.items():
            print(f"  {way:<12}" + "  ".join(f"{k} {v:>8}" for k, v in numbers.items()))
    milliseconds = describing()
    print(f"describe, 1000 leaves: {milliseconds} ms")
    about = {"date": str(datetime.date.today()), "jax": jax.__version__, "device": jax.devices()[0].device_kind}
    RESULTS.write_text(json.dumps(about | {"steps": figures, "describe_ms": milliseconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
