"""Draws docs/diagnosis.png, docs/changes.png and docs/run.png: `python -m benchmarks.diagnosis_picture`.

The first two diagnose the first step of the demonstration's model. In the first picture the step scales its loss in
float16; in the second, its parameters and the averages of Adam are stored in bfloat16. The third shows a run of a small
network that is stored in the same way.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import jmpscale
import jmpscale.__main__ as demonstration
from benchmarks.studies import runs
from jmpscale import plots

DOCS = pathlib.Path(__file__).parent.parent / "docs"
BATCH_TOKENS = 2**19  # the default of the demonstration
LEARNING_RATE = 3e-4
PIXELS = 1472  # two for each of the 736 of a page's width


def model():
    """Returns the initial parameters, and a batch."""
    alphabet, tokens = demonstration.read_text()
    sequences, length = demonstration.SEQUENCES, demonstration.LENGTH
    batch = tokens[: sequences * (length + 1)].reshape(sequences, length + 1)
    return demonstration.init(jax.random.key(0), len(alphabet)), batch


def scales():
    """Returns the diagnosis of the gradients in float16."""
    loss_fn = functools.partial(jmpscale.autocast(demonstration.shard_loss), batch_tokens=BATCH_TOKENS)
    return jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), *model())


def changes():
    """Returns the diagnosis of a step with all parameters in bfloat16."""
    tx = optax.adam(LEARNING_RATE)

    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(demonstration.shard_loss)(params, batch, demonstration.SHARD_TOKENS)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, batch = model()
    params = jmpscale.cast(params, jnp.bfloat16)
    return jmpscale.diagnose_step(train_step)(params, tx.init(params), batch)


def run():
    """Returns the diagnosis of a run with all parameters in bfloat16."""
    make, steps, _ = runs.FAULTS["Adam, bfloat16 parameters"]
    return runs.diagnosed(make(), steps)[0]


def main():
    """Writes the pictures; they are readable at a width of 400 pixels."""
    pictures = {
        "diagnosis": (plots.diagnosis, scales(), 5.2),
        "changes": (plots.changes, changes(), 6.4),
        "run": (plots.run, run(), 6.4),
    }
    for name, (plot, diagnosis, height) in pictures.items():
        with plt.rc_context({"font.size": 15, "axes.titlesize": "medium"}):
            figure, axes = plt.subplots(figsize=(6.4, height), layout="constrained")
            plot(diagnosis, ax=axes)
            figure.savefig(DOCS / f"{name}.png", dpi=PIXELS / 6.4)


if __name__ == "__main__":
    main()
