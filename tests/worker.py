"""One of several processes of a training run; started by test_processes.py, never collected.

Usage: worker.py SCENARIO ADDRESS NUMBER_OF_PROCESSES PROCESS FOLDER
"train" saves half way and continues; "resume" begins with what was saved; "raise" fails on the last process.
Prints one JSON line with what this process ended with.
"""

import inspect
import json
import os
import pathlib
import sys
import traceback

DEVICES = {1: 4, 2: 2, 4: 1}  # simulated devices per process: the mesh is always of four

scenario, address, processes, process, folder = sys.argv[1:]
processes, process, folder = int(processes), int(process), pathlib.Path(folder)
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES[processes]}"

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # By default the processes that are left wait for minutes for one that has died.
    timeouts = {"heartbeat_timeout_seconds": 10, "initialization_timeout": 60}
    shutdown = {"shutdown_timeout_seconds": 10}
    if not shutdown.keys() <= inspect.signature(jax.distributed.initialize).parameters.keys():
        # Before JAX 0.8 a process that fails waits for the others at its exit, and they for it: exit at once.
        sys.excepthook = lambda *error: (traceback.print_exception(*error), sys.stderr.flush(), os._exit(1))
        shutdown = {}
    jax.distributed.initialize(address, num_processes=processes, process_id=process, **timeouts, **shutdown)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as Spec  # noqa: E402

import jmpscale  # noqa: E402
from jmpscale.testing import assert_replicated  # noqa: E402

STEPS = 8
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
tx = jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(2.0**10, growth_interval=2))


def shard(x, spec):
    """Makes a global array of which this process holds its part."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def specs_of(opt_state):
    return jax.tree.map(lambda x: Spec("data") if x.ndim else Spec(), opt_state)


def start():
    params = shard(np.ones((8, 4), np.float32), Spec("data"))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(jax.eval_shape(tx.init, params)))
    return params, jax.jit(tx.init, out_shardings=shardings)(params)


def local_step(params, opt_state, x, fault):
    def loss_fn(params):
        w = jax.lax.all_gather(params, "data", axis=0, tiled=True)
        loss = jnp.mean((x @ w) ** 2)
        return loss + jnp.sum(fault * params), loss  # the reported loss stays finite

    (_, loss), grads = jmpscale.value_and_grad(loss_fn, has_aux=True)(opt_state, params)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def make_step(opt_state):
    specs = specs_of(opt_state)
    step = jax.shard_map(
        local_step,
        mesh=mesh,
        in_specs=(Spec("data"), specs, Spec("data"), Spec("data")),
        out_specs=(Spec("data"), specs),
    )
    return jax.jit(step)


def batch(number):
    """Returns a step's data, and the fault that strikes the last device (so the last process) only, at some steps."""
    x = np.random.default_rng(number).standard_normal((16, 8)).astype(np.float32)
    fault = np.zeros((8, 4), np.float32)
    if number in (1, 2, 6):
        fault[7, 3] = np.inf
    return shard(x, Spec("data")), shard(fault, Spec("data"))


def digest(params, opt_state):
    """Returns bytes of what this process holds, as hexadecimal, and the scaler's numbers."""
    shards = {s.index[0].start or 0: np.asarray(s.data).tobytes().hex() for s in params.addressable_shards}
    scaler = [np.asarray(x.addressable_shards[0].data).item() for x in jax.tree.leaves(jmpscale.get_scaler(opt_state))]
    return {"params": shards, "scaler": scaler}


def save(params, opt_state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", {"params": params, "opt_state": opt_state})


def restore(params, opt_state):
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder / "checkpoint", {"params": params, "opt_state": opt_state})
    return restored["params"], restored["opt_state"]


params, opt_state = start()
first = 0
if scenario == "resume":
    params, opt_state = restore(params, opt_state)
    first = STEPS // 2
step = make_step(opt_state)
scales = []
for number in range(first, STEPS):
    if scenario == "train" and number == STEPS // 2:
        save(params, opt_state)
    if scenario == "raise" and number == 3 and process == processes - 1:
        raise RuntimeError("this process fails in the middle of the run")
    params, opt_state = step(params, opt_state, *batch(number))
    scaler = jmpscale.get_scaler(opt_state)
    assert_replicated(scaler)
    scales.append(np.asarray(scaler.loss_scale.addressable_shards[0].data).item())
print(json.dumps(digest(params, opt_state) | {"scales": scales}), flush=True)
