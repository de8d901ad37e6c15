"""What `diagnose_run` costs, relative to compiling and running the steps: `python -m benchmarks.studies.whole_run`.

The steps are those of `benchmarks.studies.whole_step`, 200 of each, in float16 with loss scaling and in bfloat16, without
a diagnosis of a step, because nothing is wrong. A figure is the CPU time of all threads in seconds.
"""

import jax

import jmpscale
from benchmarks import record, table
from benchmarks.diagnosis import process_time, unrolled_program
from benchmarks.studies.check_step import step_of
from benchmarks.studies.whole_step import bfloat16_step

import jax.numpy as jnp

RESULTS = table.STUDIES / "whole_run.json"
STEPS = 200


def trained(step, params, opt_state, batch):
    """Returns the loss after all steps."""
    loss = None
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state, batch)
        jax.block_until_ready(loss)
    return loss


def main():
    rows, program = [], unrolled_program(12)
    for form, (step, args) in {"float16": step_of(*program), "bfloat16": bfloat16_step(*program, jnp.float32)}.items():
        *state, batch = args
        jax.clear_caches()
        own = process_time(lambda step=step, args=args: trained(step, *args))
        jax.clear_caches()
        run = jmpscale.diagnose_run(step, [batch] * STEPS)
        found = []
        diagnosis = process_time(lambda run=run, state=state, found=found: found.append(run(*state)))
        row = {"program": "12 layers", "form": form, "steps": own, "diagnosis": diagnosis, "ratio": diagnosis / own}
        rows.append(row | {"summary": found[0].summary})
        print(rows[-1], flush=True)
    record.add(RESULTS, {"about": record.about("benchmarks.studies.whole_run", "cpu"), "runs": rows})


if __name__ == "__main__":
    main()
