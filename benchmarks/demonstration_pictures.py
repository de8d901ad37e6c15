"""Draws docs/jmpscale.png and docs/gradients.png from the demonstration: `python -m benchmarks.demonstration_pictures`.

The first shows the losses of the four runs, the second the gradients of the logits.
"""

import pathlib

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

import jmpscale.__main__ as demonstration

DOCS = pathlib.Path(__file__).parent.parent / "docs"
STEPS, BATCH_TOKENS, SEED = 800, 2**19, 0  # the defaults of the demonstration
SMOOTHING = 10  # steps
COLORS = dict(zip(demonstration.RUNS, ("#b3b9c1", "#3c4046", "#d1495b", "#2a7f9e"), strict=True))


def losses(runs):
    """Returns a figure of the losses. Its title says what they show, which is an error if they do not."""
    final = {name: run.mean("loss") for name, run in runs.items()}
    if final["float16"] < final["float32"] + 0.5 or abs(final["float16, jmpscale"] - final["float32"]) > 0.02:
        raise ValueError(f"the final losses do not show that float16 fails and jmpscale helps: {final}")
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    axis = figure.subplots()
    # Three curves are nearly equal: a wide one, a narrow one on it, and a dashed one on both.
    styles = {"float32": {"linewidth": 9}, "bfloat16": {"linestyle": (0, (2, 5)), "zorder": 3}}
    for name, run in runs.items():
        loss = run.history["loss"]
        smooth = [loss[max(0, n - SMOOTHING) : n].mean() for n in range(1, len(loss) + 1)]
        label = f"{name}: {final[name]:.2f}"
        axis.plot(smooth, color=COLORS[name], label=label, **{"linewidth": 2, **styles.get(name, {})})
    figure.suptitle("float16 alone fails;\nwith jmpscale it trains like float32", size=22, weight="bold")
    power = int(np.log2(BATCH_TOKENS))
    axis.set_title(f"One language model, trained four times;\nits loss is divided by 2^{power}", size=19)
    axis.set_xlabel("step", size=17)
    axis.set_ylabel("loss (nats per character)", size=17)
    axis.tick_params(labelsize=15)
    axis.legend(fontsize=17, title="final loss", title_fontsize=17)
    return figure


def magnitudes(params, tokens):
    """Returns the magnitudes of the gradients of the logits, of one batch, in float32."""
    starts = np.random.default_rng(SEED).integers(0, len(tokens) - demonstration.LENGTH, (demonstration.SEQUENCES, 1))
    batch = tokens[starts + np.arange(demonstration.LENGTH + 1)]

    def loss(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).sum() / BATCH_TOKENS

    return np.abs(np.ravel(jax.grad(loss)(demonstration.predict(params, batch[:, :-1]))))


def gradients(values, power):
    """Returns a figure of magnitudes, unscaled and multiplied by a power of two."""
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    axis = figure.subplots()
    axis.axvspan(-24, 16, color="#f3ead7", label="range of float16")
    names = {0: ("float16", "unscaled"), power: ("float16, jmpscale", f"times the loss scale, 2^{power}")}
    for shift, (run, name) in names.items():
        counts, edges = np.histogram(np.log2(values[values > 0]) + shift, np.arange(-50, 20))
        zero = np.mean((values * 2.0**shift).astype(np.float16) == 0)
        label = f"{name}: {zero:.0%} become zero"
        axis.stairs(100 * counts / values.size, edges, fill=True, color=COLORS[run], label=label)
    axis.set_title("Loss scaling shifts gradients into float16's range", size=19)
    axis.set_xlabel("log2 of the magnitude", size=17)
    axis.set_ylabel("percentage of values", size=17)
    axis.set(xlim=(-48, 19), ymargin=0.7)
    axis.tick_params(labelsize=15)
    axis.legend(fontsize=17, loc="upper left")
    return figure


def main():
    """Trains the model four times and writes the pictures; they are readable at a width of 400 pixels."""
    text = demonstration.read_text()
    runs = {name: demonstration.train(name, text, STEPS, BATCH_TOKENS, SEED) for name in demonstration.RUNS}
    # Two pixels for each of the 736 pixels of a page's width.
    losses(runs).savefig(DOCS / "jmpscale.png", dpi=184)
    scaled = runs["float16, jmpscale"]
    power = int(np.log2(scaled.history["loss_scale"][-1]))
    gradients(magnitudes(scaled.params, text[1]), power).savefig(DOCS / "gradients.png", dpi=184)


if __name__ == "__main__":
    main()
