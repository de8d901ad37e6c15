"""Draws docs/range_report.png, the ranges of the demonstration's model: `python -m benchmarks.range_picture`.

The model has its initial parameters. The scale of the picture is the largest one that the report allows.
"""

import functools
import pathlib

import jax
import matplotlib.pyplot as plt

import jmpscale
import jmpscale.__main__ as demonstration
from jmpscale import plots

PICTURE = pathlib.Path(__file__).parent.parent / "docs" / "range_report.png"
BATCH_TOKENS = 2**19  # the default of the demonstration


def report():
    """Returns the range report of one step."""
    alphabet, tokens = demonstration.encode(demonstration.read_text())
    sequences, length = demonstration.SEQUENCES, demonstration.LENGTH
    batch = tokens[: sequences * (length + 1)].reshape(sequences, length + 1)
    params = demonstration.init(jax.random.key(0), len(alphabet))
    loss_fn = functools.partial(jmpscale.autocast(demonstration.shard_loss), batch_tokens=BATCH_TOKENS)
    report_of = jmpscale.range_report(loss_fn)
    _, high = report_of(jmpscale.dynamic(), params, batch).scales()
    return report_of(jmpscale.static(high), params, batch)


def main():
    """Writes the picture; it is readable at a width of 400 pixels."""
    figure, axes = plt.subplots(figsize=(6.4, 5.6), layout="constrained")
    plots.magnitudes(report(), ax=axes)
    axes.set_title("One training step: forward, then backward", size=15)
    axes.xaxis.label.set_size(15)
    axes.yaxis.label.set_size(15)
    axes.tick_params(labelsize=14)
    axes.get_legend().remove()
    figure.legend(fontsize=14, loc="outside lower center")
    figure.savefig(PICTURE, dpi=125)


if __name__ == "__main__":
    main()
