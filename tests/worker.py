"""One of several processes of a training run: the program that test_multiprocess.py starts.

Usage: worker.py SCENARIO ADDRESS PROCESSES PROCESS FOLDER
"save" trains and writes a checkpoint half way, "resume" continues from it, "raise" fails on the last process,
and "tools" diagnoses faults and training steps, and compares values of which some differ between the processes. "one
device" trains with one device of the default platform for each process.
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
from jmpscale.testing import assert_replicated, check_step

STEPS = 6
OVERFLOWS = (1, 2, 4)
TX = jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(2.0**10, growth_interval=2))


def main(scenario, address, processes, process, folder):
    own = {}
    if scenario != "one device":
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // int(processes)}"
        jax.config.update("jax_platforms", "cpu")
    elif os.environ.get("JAX_PLATFORMS") != "cpu":
        own = {"local_device_ids": [int(process)]}
    if int(processes) > 1:
        _join(address, int(processes), int(process), **own)
    if scenario == "tools":
        put = functools.partial(_put, _mesh())
        results = {"diagnose": diagnose(put), "diagnose_step": diagnose_step(put), "compare": compare(int(process))}
        print(json.dumps(results), flush=True)
        return
    fail_at = 3 if scenario == "raise" and process == f"{int(processes) - 1}" else None
    checkpoint = pathlib.Path(folder) / "checkpoint" if scenario in ("save", "resume") else None
    print(json.dumps(train(checkpoint, resume=scenario == "resume", fail_at=fail_at)), flush=True)


def _join(address, processes, process, **own):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # By default the other processes wait for minutes for one that has died.
    timeouts = {"heartbeat_timeout_seconds": 10, "initialization_timeout": 60}
    if "shutdown_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        timeouts["shutdown_timeout_seconds"] = 10
    else:  # before JAX 0.8 a process that fails waits for the others at its exit, and they wait for it
        sys.excepthook = lambda *error: (traceback.print_exception(*error), sys.stderr.flush(), os._exit(1))
    jax.distributed.initialize(address, num_processes=processes, process_id=process, **timeouts, **own)


def train(checkpoint=None, resume=False, fail_at=None):
    """Trains on at most four devices; returns the shards of this process, the scaler and the history of its scale."""
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


def diagnose_step(put):
    """Returns the description and the errors of the changes, for parameters in float32 and in bfloat16."""
    tx, found = optax.adam(1e-4), []
    random = np.random.default_rng(0)
    values = 0.25 * random.standard_normal((8, 8)).astype(np.float32)
    x = random.standard_normal((16, 8)).astype(np.float32)

    @jax.jit
    def step(w, opt_state, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x.astype(w.dtype) @ w) - 1) ** 2))(w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state, loss

    for dtype in (jnp.float32, jnp.bfloat16):
        w = put(values.astype(dtype), P())
        opt_state = jax.tree.map(lambda x: put(np.asarray(x), P()), tx.init(jnp.asarray(values, dtype)))
        diagnosis = jmpscale.diagnose_step(step)(w, opt_state, put(x, P("data")))
        found.append([diagnosis.describe(), [[change.name, change.error] for change in diagnosis.changes]])
    return found


def _scan_loss(w, x):
    def layer(h, _):
        return jnp.tanh(h @ w.astype(jnp.float16)), None

    h, _ = jax.lax.scan(layer, x.astype(jnp.float16), None, length=2)
    return jnp.mean(h.astype(jnp.float32) ** 2)


def _mesh():
    devices = jax.devices()[:4]
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def _put(mesh, x, spec):
    """Creates a global array, of which this process holds its shards."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def _local(x):
    return np.asarray(x.addressable_shards[0].data)


def _checkpointer():
    import orbax.checkpoint as ocp  # takes seconds

    return ocp.StandardCheckpointer()


def _program(max_norm):
    """Returns the program of a training step."""
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), max_norm=max_norm, warn_after_skips=20)
    w = jnp.ones(2)
    return jax.jit(tx.update).lower(w, tx.init(w), w).as_text()


def _deleted(x):
    x.delete()
    return x


# The trees of two processes, and the words of the error; none if they agree. `n` is the number of the process.
TREES = {
    "NumPy arrays": (lambda n: {"scaler": jmpscale.dynamic(), "x": np.arange(3)}, None),
    "NumPy and JAX": (lambda n: [np.ones((1, 2), np.float32), jnp.ones((1, 2))][n], None),
    "programs": (lambda n: _program(1.0), None),
    "NumPy scale": (
        lambda n: jmpscale.dynamic(2.0 ** (10 + n)),
        "tree.loss_scale differs between the processes 0 and 1.",
    ),
    "NumPy and other JAX": (
        lambda n: [np.ones((1, 2), np.float32), jnp.zeros((1, 2))][n],
        "tree differs between the processes 0 and 1.",
    ),
    "JAX scale": (lambda n: {"x": jnp.float32(n)}, "tree['x'] differs between the processes 0 and 1."),
    "settings": (
        lambda n: (jmpscale.dynamic(growth_interval=2 + n),),
        "the setting growth_interval of the scaler is 2 on process 0 and 3 on process 1.",
    ),
    "mode": (
        lambda n: [jmpscale.static(1.0), jmpscale.disabled()][n],
        "the setting mode of the scaler is static on process 0 and disabled on process 1.",
    ),
    "maximum norm": (lambda n: {"step": _program(1.0 + n)}, "tree['step'] differs between the processes 0 and 1."),
    "number of leaves": (
        lambda n: [np.ones(2)] * (1 + n),
        "tree[1] is absent on process 0 and float64[2] on process 1.",
    ),
    "shape": (lambda n: np.ones(2 + n), "tree is float64[2] on process 0 and float64[3] on process 1."),
    "dtype": (lambda n: np.zeros(2, f"i{4 + 4 * n}"), "tree is int32[2] on process 0 and int64[2] on process 1."),
    "Python number": (
        lambda n: [np.ones(2), 1.0][n],
        "tree must be an array or a text, got float. Pass the result of a step.",
    ),
    "deleted array": (lambda n: [jnp.copy, _deleted][n](jnp.ones(2)), "got a deleted float32[2] at tree"),
}


def error_of(check, *args):
    """Returns the message of the error that a check raises, or None."""
    try:
        check(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def compare(n):
    """Returns the errors of process `n` of two for trees that agree or differ."""
    errors = {name: error_of(assert_replicated, make(n)) for name, (make, _) in TREES.items()}
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x = np.arange(8, dtype=np.float32) + n
    on_devices = [jax.device_put(np.float32(n * i), device) for i, device in enumerate(jax.local_devices())]
    trees = {
        "replicated": _put(mesh, x, P()),
        "a copy of each shard on each process": _put(mesh, x, P("model")),
        "a device of process 1": jax.make_array_from_single_device_arrays((), NamedSharding(mesh, P()), on_devices),
    }
    errors |= {name: error_of(assert_replicated, {"w": tree}) for name, tree in trees.items()}
    state = jax.tree.map(lambda x: _put(mesh, np.asarray(x), P()), TX.init(jnp.ones(2)))
    errors["check_step"] = error_of(check_step(lambda state: state), state)
    assert_replicated(jmpscale.dynamic())  # which no process has to wait for
    return errors


if __name__ == "__main__":
    main(*sys.argv[1:])
