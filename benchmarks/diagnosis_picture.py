"""Draws docs/diagnosis.png, the diagnosis of the demonstration's model: `python -m benchmarks.diagnosis_picture`.

The model has its initial parameters.
"""

import functools
import pathlib

import jax
import matplotlib.pyplot as plt

import jmpscale
import jmpscale.__main__ as demonstration
from jmpscale import plots

PICTURE = pathlib.Path(__file__).parent.parent / "docs" / "diagnosis.png"
BATCH_TOKENS = 2**19  # the default of the demonstration


def diagnosis():
    """Returns the diagnosis of one step."""
    alphabet, tokens = demonstration.read_text()
    sequences, length = demonstration.SEQUENCES, demonstration.LENGTH
    batch = tokens[: sequences * (length + 1)].reshape(sequences, length + 1)
    params = demonstration.init(jax.random.key(0), len(alphabet))
    loss_fn = functools.partial(jmpscale.autocast(demonstration.shard_loss), batch_tokens=BATCH_TOKENS)
    return jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), params, batch)


def main():
    """Writes the picture; it is readable at a width of 400 pixels."""
    with plt.rc_context({"font.size": 15, "axes.titlesize": "medium"}):
        figure, axes = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
        plots.diagnosis(diagnosis(), ax=axes)
        figure.savefig(PICTURE, dpi=230)  # two pixels for each of the 736 of a page


if __name__ == "__main__":
    main()
