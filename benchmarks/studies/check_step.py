"""What `check_step` costs, relative to compiling and running a step once: `python -m benchmarks.studies.check_step`.

The steps are the README's, and steps of the programs of `benchmarks.diagnosis` with `autocast`, Adam and the optax
wrapper. A figure is the CPU time of all threads in seconds.
"""

import re

import jax
import optax

import jmpscale
from benchmarks import record, table
from benchmarks.diagnosis import process_time, programs
from jmpscale.testing import check_step

RESULTS = table.STUDIES / "check_step.json"
PROGRAMS = ("12 layers", "scan of 24 layers with remat", "the demonstration")


def readme_step():
    """Returns the step of the README's example, before its diagnosis, and the arguments of the step."""
    blocks = re.findall(r"^```python\n(.*?)^```", (record.ROOT / "README.md").read_text(), re.S | re.M)
    [code] = (block.partition("\ndiagnosis =")[0] for block in blocks if "RunMonitor" in block)
    names = {}
    exec(code, names)
    return names["train_step"], (names["params"], names["opt_state"], names["batches"][0])


def step_of(loss_fn, params, batch):
    """Returns a compiled training step with the optax wrapper, and its arguments."""
    tx, half = jmpscale.with_loss_scaling(optax.adam(1e-3)), jmpscale.autocast(loss_fn)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jmpscale.value_and_grad(half)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step, (params, tx.init(params), batch)


def main():
    steps = {"README": readme_step()} | {name: step_of(*programs()[name]) for name in PROGRAMS}
    rows = []
    for name, (step, args) in steps.items():
        own = process_time(lambda step=step, args=args: step(*args))
        check = process_time(lambda step=step, args=args: check_step(step)(*args))
        rows.append({"step": name, "compiling and running": own, "check": check, "ratio": check / own})
        print(f"{name}: {own:.1f} s, check {check:.1f} s, {check / own:.1f} times")
    record.add(RESULTS, {"about": record.about("benchmarks.studies.check_step", "cpu"), "steps": rows})


if __name__ == "__main__":
    main()
