"""One of several processes of a training run: the program that test_multiprocess.py starts.

Usage: worker.py SCENARIO ADDRESS PROCESSES PROCESS FOLDER
"save" trains and writes a checkpoint half way, "resume" continues from it, "raise" fails on the last process, and
"diagnose" diagnoses faults.
Prints the outcome as a line of JSON.
"""

import functools
import inspect
import json
import os
import pathlib
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import assert_replicated

STEPS = 6
OVERFLOWS = (1, 2, 4)
TX = jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(2.0**10, growth_interval=2))


def main(scenario, address, processes, process, folder):
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // int(processes)}"
    jax.config.update("jax_platforms", "cpu")
    if int(processes) > 1:
        _join(address, int(processes), int(process))
    if scenario == "diagnose":
        print(json.dumps(diagnose(functools.partial(_put, _mesh()))), flush=True)
        return
    fail_at = 3 if scenario == "raise" and process == f"{int(processes) - 1}" else None
    checkpoint = pathlib.Path(folder) / "checkpoint" if scenario in ("save", "resume") else None
    outcome = train(checkpoint, resume=scenario == "resume", fail_at=fail_at)
    print(json.dumps(outcome | {"differs": _compare(float(process))}), flush=True)


def _join(address, processes, process):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # By default the other processes wait for minutes for one that has died.
    timeouts = {"heartbeat_timeout_seconds": 10, "initialization_timeout": 60}
    if "shutdown_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        timeouts["shutdown_timeout_seconds"] = 10
    else:  # before JAX 0.8 a process that fails waits for the others at its exit, and they wait for it
        sys.excepthook = lambda *error: (traceback.print_exception(*error), sys.stderr.flush(), os._exit(1))
    jax.distributed.initialize(address, num_processes=processes, process_id=process, **timeouts)


def train(checkpoint=None, resume=False, fail_at=None):
    """Trains on a mesh of four devices; returns the shards of this process, the scaler and the history of its scale."""
    mesh = _mesh()
    put = functools.partial(_put, mesh)
    params = put(np.ones((8, 4), np.float32), P("data"))
    specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), jax.eval_shape(TX.init, params))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    carry = params, jax.jit(TX.init, out_shardings=shardings)(params)
    if resume:
        carry = _checkpointer().restore(checkpoint, carry)
    specs = P("data"), specs
    step = jax.jit(jax.shard_map(_local_step, mesh=mesh, in_specs=(*specs, P("data"), P("data")), out_specs=specs))
    scales = []
    for number in range(STEPS // 2 if resume else 0, STEPS):
        if checkpoint and not resume and number == STEPS // 2:
            with _checkpointer() as checkpointer:
                checkpointer.save(checkpoint, carry)
        if number == fail_at:
            raise RuntimeError("this process fails in the middle of the run")
        x = np.random.default_rng(number).standard_normal((16, 8)).astype(np.float32)
        fault = np.zeros((8, 4), np.float32)
        fault[-1, -1] = np.inf if number in OVERFLOWS else 0  # on the last device, so on the last process
        carry = step(*carry, put(x, P("data")), put(fault, P("data")))
        assert_replicated(carry)
        scales.append(_local(carry[1].scaler.loss_scale).item())
    shards = {
        str(shard.index[0].start or 0): np.asarray(shard.data).tobytes().hex() for shard in carry[0].addressable_shards
    }
    scaler = [_local(x).item() for x in jax.tree.leaves(carry[1].scaler)]
    return {"shards": shards, "scaler": scaler, "scales": scales}


def _local_step(params, opt_state, x, fault):
    def loss_fn(params):
        w = jax.lax.all_gather(params, "data", axis=0, tiled=True)
        loss = jnp.mean((x @ w) ** 2)
        return loss + jnp.sum(fault * params), loss  # the reported loss stays finite

    (_, loss), grads = jmpscale.value_and_grad(loss_fn, has_aux=True)(opt_state, params)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


FAULTS = {  # the last number of a batch, and the first words of the diagnosis
    1e5: "The forward pass overflows: convert_element_type at worker.py:",
    np.nan: "Infinities or NaN in x reach the loss or a gradient",
}


def diagnose(put):
    """Returns the description and the fitting scales for each fault; a process may hold a part of each array."""
    w, x, found = np.eye(8, dtype=np.float32), np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32), []
    for fault in FAULTS:
        x[-1, -1] = fault  # on the last device
        diagnosis = jmpscale.diagnose(_scan_loss)(jmpscale.static(2.0**10), put(w, P("data")), put(x, P("data")))
        found.append([diagnosis.describe(), diagnosis.fitting_scales])
    return found


def _scan_loss(w, x):
    def layer(h, _):
        return jnp.tanh(h @ w.astype(jnp.float16)), None

    h, _ = jax.lax.scan(layer, x.astype(jnp.float16), None, length=2)
    return jnp.mean(h.astype(jnp.float32) ** 2)


def _mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def _put(mesh, x, spec):
    """Creates a global array, of which this process holds its shards."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def _local(x):
    return np.asarray(x.addressable_shards[0].data)


def _checkpointer():
    import orbax.checkpoint as ocp  # takes seconds

    return ocp.StandardCheckpointer()


def _compare(value):
    """Returns the errors of `assert_replicated` for values that differ between processes.

    The first is replicated. Of the second, if there are two processes, each process holds a copy of every shard.
    """
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    errors = []
    for name, x, spec in (("n", np.float32([value]), P()), ("w", np.arange(8, dtype=np.float32) + value, P("model"))):
        try:
            assert_replicated({name: _put(mesh, x, spec)})
        except AssertionError as error:
            errors.append(str(error))
    return errors


if __name__ == "__main__":
    main(*sys.argv[1:])
