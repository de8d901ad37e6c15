"""How the cost grows: with leaves, parameters, devices and micro-batches.

What needs a process of its own runs as `python -m benchmarks.growth PART ARGUMENTS`, and prints its figures as JSON.
"""

import json
import os
import resource
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmpscale
from benchmarks import check, steps, timing

SECONDS, BYTES = 1800, 8 * 2**30  # what one method in a process of its own may take


def in_a_process(part, *arguments, devices=1):
    """Measures a part in a new process; returns its figures, or what went wrong."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "benchmarks.growth", part, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {SECONDS} s"}
    if done.returncode:
        return {"failed": f"exit {done.returncode}, with {BYTES >> 30} GiB: {done.stderr.strip().splitlines()[-1:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def leaves(seconds, options):
    """1 to 1,000 leaves of 64 elements, 3,000 with `full`: from 1,000 on each method in a process of its own."""
    figures = {}
    for n in (1, 10, 30, 100, 300):
        names = steps.ROUTES + (steps.PEERS if n <= 30 else ())  # selects on 100 leaves take minutes to compile
        print(f"  {n} leaves", flush=True)
        figures[n] = timing.measure(steps.make_job(steps.tiny_leaves(n)), names, seconds) | check_leaves(n, seconds)
    for n in (1000, 3000) if options.full else (1000,):
        print(f"  {n} leaves", flush=True)
        figures[n] = {name: in_a_process("leaves", n, name) for name in (*steps.ROUTES, "check")}
    for name in ("jmp", "Flax DynamicScale", "mpx") if options.full else ():
        figures[100][name] = in_a_process("leaves", 100, name)
    return figures


def leaves_alone(n, name):
    """One method, or the check, on many leaves, within the limits."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    if name == "check":
        return check_leaves(int(n), 5)[name]
    job = steps.make_job(steps.tiny_leaves(int(n)))
    if int(n) > 1000:  # XLA on CPU compiles the bare step of 3,000 for seven minutes
        return timing.build(job, steps.METHODS[name], compilations=1)[1]
    figures = timing.measure(job, [name], 5, floor=name)[name]
    return {key: value for key, value in figures.items() if "ratio" not in key}  # nothing was timed in turns with it


def check_leaves(n, seconds):
    tree = [jnp.full(64, 1.0 + i, jnp.float32) for i in range(n)]
    return {"check": check.compare(tree, seconds)}


def parameters(seconds, options):
    """A network of four layers with 1e5 to 1e8 parameters."""
    figures = {}
    for size in (1e5, 1e6, 1e7, 1e8):
        print(f"  {size:.0e} parameters", flush=True)
        job = steps.make_job(steps.mlp(4, round((size / 4) ** 0.5), 32))
        figures[f"{size:.0e}"] = timing.measure(job, ("clipped", "functional", "optax wrapper", "jmp"), seconds)
    return figures


def devices(seconds, options):
    """The same batch over 1 to 8 simulated devices: parameters on all of them, gradients added by XLA."""
    figures = {}
    for n in (1, 2, 4, 8):
        print(f"  {n} devices", flush=True)
        figures[n] = in_a_process("devices", n, seconds, devices=n)
    return figures


def on_devices(n, seconds):
    mesh = jax.make_mesh((int(n),), ("data",), axis_types=(AxisType.Auto,))
    job = steps.make_job(steps.mlp(8, 256, 256))
    job = job._replace(batch=jax.device_put(job.batch, NamedSharding(mesh, PartitionSpec("data"))))
    return timing.measure(job, steps.ROUTES, float(seconds), placed=NamedSharding(mesh, PartitionSpec()))


def micro_batches(seconds, options):
    """1 to 16 micro-batches of 32 make one step; each is unscaled and checked, and a bad one loses the step."""
    figures = {}
    for parts in (1, 2, 4, 8, 16):
        print(f"  {parts} micro-batches", flush=True)
        job = steps.make_job(steps.mlp(16, 512, 32 * parts))
        ways = {
            "clipped": timing.build(job, partial(accumulate, parts=parts, tx=job.clipped, scaler=jmpscale.disabled())),
            "functional": timing.build(job, partial(accumulate, parts=parts, tx=job.tx, scaler=jmpscale.dynamic())),
        }
        taken = timing.interleave({name: run for name, (run, _) in ways.items()}, seconds)
        times = timing.summarize(taken, "clipped")
        figures[parts] = {name: times[name] | program for name, (_, program) in ways.items()}
    return figures


def accumulate(job, parts, tx, scaler):
    """A step over micro-batches. With `jmpscale.disabled()` it is the step without scaling."""

    def step(state, batch):
        params, opt_state, scaler = state

        def add(sums, micro_batch):
            loss, grads = jmpscale.value_and_grad(job.loss_fn)(scaler, params, micro_batch)
            return jax.tree.map(jnp.add, sums, (grads, loss)), jmpscale.all_finite(grads)

        zeros = jax.tree.map(jnp.zeros_like, params), jnp.float32(0)
        (grads, loss), finite = jax.lax.scan(add, zeros, batch.reshape(parts, -1, *batch.shape[1:]))
        grads, loss, finite = jax.tree.map(lambda g: g / parts, grads), loss / parts, finite.all()

        def descend(params, opt_state):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        if scaler.config.mode == "disabled":
            params, opt_state = descend(params, opt_state)
        else:
            params, opt_state = jmpscale.apply_if(finite, descend, params, opt_state)
        return (params, opt_state, jmpscale.update(scaler, finite, loss=loss)), loss

    return lambda params: (params, tx.init(params), scaler), step


if __name__ == "__main__":
    part, *arguments = sys.argv[1:]
    print(json.dumps({"leaves": leaves_alone, "devices": on_devices}[part](*arguments)))
