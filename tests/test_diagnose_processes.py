"""diagnose has the same result on all processes that jax.distributed connects: this file is a test and its program."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale

PROCESSES = 2
FAULTS = {  # the last number of the batch, and the first words of the summary
    1e5: "The forward pass overflows: convert_element_type at test_diagnose_processes.py:",
    np.nan: "x contains infinities or NaN",
}


def loss_fn(w, x):
    def layer(h, _):
        return jnp.tanh(h @ w.astype(jnp.float16)), None

    h, _ = jax.lax.scan(layer, x.astype(jnp.float16), None, length=2)
    return jnp.mean(h.astype(jnp.float32) ** 2)


def batch(fault):
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    x[-1, -1] = fault  # on the last device
    return x


def diagnose(fault, put):
    w = np.eye(8, dtype=np.float32)
    diagnosis = jmpscale.diagnose(loss_fn)(
        jmpscale.static(2.0**10), put(w, jax.P("data")), put(batch(fault), jax.P("data"))
    )
    return {"description": diagnosis.describe(), "fitting": diagnosis.fitting_scales()}


def main(address, process):
    """Prints the diagnosis of each fault as a line of JSON, on arrays of which each process holds a part."""
    import worker

    worker._join(address, PROCESSES, int(process))
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def put(x, spec):
        return jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, spec), lambda index: x[index])

    print(json.dumps([diagnose(fault, put) for fault in FAULTS]), flush=True)


@pytest.mark.full
def test_diagnose_has_the_same_result_on_all_processes():
    from test_multiprocess import _free_port

    address = f"127.0.0.1:{_free_port()}"
    package = str(pathlib.Path(jmpscale.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": package, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment["JAX_PLATFORMS"] = "cpu"
    commands = [[sys.executable, __file__, address, str(process)] for process in range(PROCESSES)]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * PROCESSES
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first == second
    for found, (fault, begins) in zip(first, FAULTS.items(), strict=True):
        assert found["description"].startswith(begins)
        alone = diagnose(fault, lambda x, spec: jnp.asarray(x))
        assert found["fitting"] == (list(alone["fitting"]) if alone["fitting"] else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
