"""Measures how long Python takes to trace autocast and the optax wrapper: `python -m benchmarks.tracing`.

autocast: the gradient of many equal transformer blocks, in a Python loop or in a scan. The wrapper: an update of many
small parameters with Adam, traced, and without `jax.jit`. A figure is the median process time of several runs, without
compilation.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import optax

import jmpscale
from benchmarks import record, steps, targets

RESULTS = record.RESULTS / "tracing.json"
BLOCKS, REPEATS = 96, 5
TRACED, EAGER = 1000, 300  # parameters of an update
ADAM = optax.adam(1e-3)
OPTIMIZERS = {
    "optax": ADAM,
    "optax, clipped": optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    "wrapper": jmpscale.with_loss_scaling(ADAM),
    "wrapper, max_norm": jmpscale.with_loss_scaling(ADAM, max_norm=1.0),
}


def median(run):
    """Returns the median process time of a function, without the traces of earlier runs."""
    taken = []
    for _ in range(REPEATS):
        jax.clear_caches()
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return round(statistics.median(taken), 2)


def seconds(scan, autocast):
    """Returns the time of tracing the gradient of the loss."""
    make = functools.partial(steps.transformer, BLOCKS, 64, 4, 64, 32, 2, scan=scan)
    loss_fn, params, batch = targets.abstract(make)
    fn = jax.grad(jmpscale.autocast(loss_fn) if autocast else loss_fn)
    return median(lambda: jax.jit(fn).trace(params, batch))


def seconds_of_update(name, is_traced):
    """Returns the time of tracing an update, or of running it without `jax.jit` after a first run."""
    tx, count = OPTIMIZERS[name], TRACED if is_traced else EAGER
    loss, params = jnp.float32(1), {f"parameter {i}": jnp.ones((8, 8)) for i in range(count)}
    state = tx.init(params)
    options = {"value": loss} if name.startswith("wrapper") else {}

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params, **options)
        return optax.apply_updates(params, updates), state

    if is_traced:
        return median(lambda: jax.jit(update).trace(params, state, params))
    jax.block_until_ready(update(params, state, params))
    taken = []
    for _ in range(REPEATS):
        start = time.process_time()
        jax.block_until_ready(update(params, state, params))
        taken.append(time.process_time() - start)
    return round(statistics.median(taken), 3)


def main():
    """Prints and writes the times."""
    figures = {}
    for name, scan in (("unrolled", False), ("scan", True)):
        figures[name] = {"float32": seconds(scan, autocast=False), "autocast": seconds(scan, autocast=True)}
        print(f"{BLOCKS} blocks, {name}: {figures[name]}", flush=True)
    jmpscale.scale(jmpscale.dynamic(), 1.0)  # as every program does; otherwise the wrapper warns
    for kind, is_traced in (("traced update", True), ("eager update", False)):
        figures[kind] = {name: seconds_of_update(name, is_traced) for name in OPTIMIZERS}
        print(f"{kind} of {TRACED if is_traced else EAGER} parameters: {figures[kind]}", flush=True)
    record.add(RESULTS, {"about": record.about("benchmarks.tracing", "cpu"), "figures": figures})


if __name__ == "__main__":
    main()
