"""Draws docs/jmpscale.png and docs/gradients.png from the demonstration: `python -m benchmarks.demonstration_pictures`.

The first shows the losses and the sampled texts, the second the gradients of the activations.
"""

import pathlib

from matplotlib.figure import Figure

import jmpscale.__main__ as demonstration

DOCS = pathlib.Path(__file__).parent.parent / "docs"
STEPS, BATCH_TOKENS, SEED = 800, 2**19, 0  # the defaults of the demonstration


def front(runs):
    """Returns a figure of the losses and the texts, with the result as its title."""
    losses = {name: run.mean("loss") for name, run in runs.items()}
    alone, scaled = (f"{losses[name] - losses['float32']:z.2f}" for name in ("float16", "float16, jmpscale"))
    figure = Figure(figsize=(8, 9.2), layout="constrained")
    axes = figure.subplot_mosaic([["loss"], ["texts"]], height_ratios=[4, 4.4])
    figure.suptitle(
        f"float16 alone loses {alone} nats;\nwith jmpscale it loses {'none' if scaled == '0.00' else scaled}",
        size=22,
        weight="bold",
    )
    demonstration._plot_losses(runs, axes["loss"])
    demonstration._plot_texts(runs, axes["texts"])
    _enlarge(axes["loss"])
    axes["loss"].legend(fontsize=17)
    for text in axes["texts"].texts:
        text.set_fontsize(12.5)
    return figure


def gradients(run):
    """Returns a figure of the gradients of the activations, unscaled and scaled."""
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    axis = figure.subplots()
    demonstration._plot_gradients(run, axis)
    axis.set(title="Loss scaling shifts gradients into float16's range", ylim=(0, 22), yticks=(0, 5, 10))
    _enlarge(axis)
    axis.legend(fontsize=17, loc="upper left")
    return figure


def _enlarge(axis):
    axis.title.set_fontsize(19)
    axis.xaxis.label.set_fontsize(17)
    axis.yaxis.label.set_fontsize(17)
    axis.tick_params(labelsize=15)


def main():
    """Trains the model four times and writes the pictures; they are readable at a width of 400 pixels."""
    text = demonstration.encode(demonstration.read_text())
    runs = {name: demonstration.train(name, text, STEPS, BATCH_TOKENS, SEED) for name in demonstration.RUNS}
    front(runs).savefig(DOCS / "jmpscale.png", dpi=184)
    gradients(runs["float16, jmpscale"]).savefig(DOCS / "gradients.png", dpi=184)


if __name__ == "__main__":
    main()
