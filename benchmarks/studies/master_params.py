"""Parameters in half precision with float32 copies in the optimizer state: `python -m benchmarks.studies.master_params`.

One network is trained with parameters in float32, in half precision, and in half precision with `with_master_params`,
from the same values. All other numbers are float32.
"""

from benchmarks.studies import bfloat16  # before anything that starts JAX

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import optax  # isort: skip

import jmpscale  # isort: skip
from benchmarks import record, table  # isort: skip

RESULTS = table.STUDIES / "master_params.json"
ALONE, COPIES = "adam", "with_master_params(adam)"
RUNS = [("float32", ALONE), ("bfloat16", ALONE), ("bfloat16", COPIES), ("float16", COPIES)]


def loss_after(dtype, name):
    """Returns the loss in float32 after training with parameters in a dtype."""
    tx = bfloat16.SMALL if name == ALONE else jmpscale.with_master_params(bfloat16.SMALL)
    params = bfloat16.in_dtype(bfloat16.PARAMS, jnp.dtype(dtype))

    def loss_fn(params, batch):
        return bfloat16.regression(bfloat16.in_dtype(params, jnp.float32), batch)

    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    params, _ = bfloat16.trained(step, (params, tx.init(params)), bfloat16.BATCH, bfloat16.STEPS)
    return float(loss_fn(params, bfloat16.BATCH))


def main():
    """Trains all networks, prints their losses, and writes the results."""
    runs = [{"parameters": dtype, "optimizer": name, "loss": loss_after(dtype, name)} for dtype, name in RUNS]
    print(*runs, sep="\n")
    record.add(RESULTS, {"about": record.about("benchmarks.studies.master_params", "cpu"), "runs": runs})


if __name__ == "__main__":
    main()
