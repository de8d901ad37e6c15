"""What `diagnose_step` costs, relative to compiling and running the step: `python -m benchmarks.studies.whole_step`.

The steps are programs of `benchmarks.diagnosis` with Adam: in float16 with loss scaling, in bfloat16 with
parameters in float32, and in bfloat16 with parameters in bfloat16, whose update is at fault. A figure is the CPU time
of all threads in seconds.
"""

import jax
import jax.numpy as jnp
import optax

import jmpscale
from benchmarks import record, table
from benchmarks.diagnosis import process_time, programs, unrolled_program
from benchmarks.studies.check_step import step_of

RESULTS = table.STUDIES / "whole_step.json"
ADAM = optax.adamw(1e-4)


def bfloat16_step(loss_fn, params, batch, dtype):
    """Returns a compiled step in bfloat16 with parameters in a dtype, and its arguments."""
    half = jmpscale.autocast(lambda params, x: loss_fn(jmpscale.cast(params, jnp.float32), x), dtype=jnp.bfloat16)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(half)(params, batch)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jmpscale.cast(params, dtype)
    return train_step, (params, ADAM.init(params), batch)


def steps():
    """Returns the steps and their arguments, by the name of the program and of the form."""
    found = {"4 layers": unrolled_program(4)}
    found |= {name: programs()[name] for name in ("12 layers", "scan of 24 layers with remat", "the demonstration")}
    for name, program in found.items():
        yield name, "float16", step_of(*program)
        yield name, "bfloat16", bfloat16_step(*program, jnp.float32)
        yield name, "bfloat16 parameters", bfloat16_step(*program, jnp.bfloat16)


def main():
    rows = []
    for name, form, (step, args) in steps():
        jax.clear_caches()
        own = process_time(lambda step=step, args=args: step(*args))
        jax.clear_caches()
        diagnosis = process_time(lambda step=step, args=args: jmpscale.diagnose_step(step)(*args).loss)
        rows.append({"program": name, "form": form, "step": own, "diagnosis": diagnosis, "ratio": diagnosis / own})
        print(rows[-1], flush=True)
    record.add(RESULTS, {"about": record.about("benchmarks.studies.whole_step", "cpu"), "steps": rows})


if __name__ == "__main__":
    main()
