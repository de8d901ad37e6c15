"""The demonstration, `python -m jmpscale`: training in float16 with and without loss scaling.

A small character-level language model, written in float32, is trained four times, from the same initial parameters and
on the same batches: in float32, with autocast to bfloat16, with autocast to float16, and with autocast to float16 and
loss scaling. Each step computes the loss of one shard of a large batch, as in data-parallel training. The loss is
divided by the size of the whole batch, so its gradients are small.
"""

import argparse
import collections
import functools
import io
import pathlib
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmpscale

if TYPE_CHECKING:  # matplotlib may be missing until the arguments are checked
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Params: TypeAlias = dict[str, jax.Array]
Text: TypeAlias = tuple[np.ndarray, np.ndarray]  # the alphabet, and the characters as integers

SEQUENCES, LENGTH, WIDTH, HEADS, LAYERS = 16, 64, 64, 4, 2
SHARD_TOKENS = SEQUENCES * LENGTH  # in each step
LEARNING_RATE, WARMUP_STEPS = 3e-3, 50
GROWTH_INTERVAL = 40  # instead of 2000, because the runs are short
MAX_TEXT, MIN_TEXT, MAX_ALPHABET = 2**21, 4096, 512  # characters
SAMPLE_LENGTH, SHOWN_LENGTH, TEMPERATURE = 400, 190, 0.6
AVERAGED_STEPS, SMOOTHING = 100, 10  # in the table and in the picture
PROGRESS_STEPS = 200  # from one printed step to the next
RUNS = {  # name: color
    "float32": "#b3b9c1",
    "bfloat16": "#3c4046",
    "float16": "#d1495b",
    "float16, jmpscale": "#2a7f9e",
}


class Run(NamedTuple):
    """The result of one training run."""

    history: dict[str, np.ndarray]  # the loss, the fraction of zero gradients, and the scaler's metrics, by step
    seconds_per_step: float
    sample: str  # text written by the trained model
    params: Params  # after the last step

    def mean(self, name: str) -> float:
        """Averages a quantity over the last steps."""
        return float(self.history[name][-AVERAGED_STEPS:].mean())


def init(key: jax.Array, characters: int) -> Params:
    """Initializes the parameters of a transformer, in float32."""
    sizes = {"embed": (characters, WIDTH, 1.0), "position": (LENGTH, WIDTH, 1.0), "unembed": (WIDTH, characters, 1.0)}
    for layer in (f"layer_{n}" for n in range(LAYERS)):
        sizes |= {f"{layer}/qkv": (WIDTH, 3 * WIDTH, 1.0), f"{layer}/out": (WIDTH, WIDTH, 0.2)}
        sizes |= {f"{layer}/up": (WIDTH, 4 * WIDTH, 1.0), f"{layer}/down": (4 * WIDTH, WIDTH, 0.2)}
    keys = dict(zip(sizes, jax.random.split(key, len(sizes)), strict=True))
    return {name: jax.random.normal(keys[name], (n, m)) * gain * n**-0.5 for name, (n, m, gain) in sizes.items()}


def normalize(x: jax.Array) -> jax.Array:
    """Applies layer normalization, computed in float32."""
    return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Applies causal attention; the softmax is computed in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(np.tri(LENGTH, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


def predict(params: Params, tokens: jax.Array) -> jax.Array:
    """Computes the logits of the next character, f32[sequences, LENGTH, characters], in the dtype of the parameters."""
    h = params["embed"][tokens] + params["position"]
    for layer in (f"layer_{n}" for n in range(LAYERS)):
        qkv = (normalize(h) @ params[f"{layer}/qkv"]).reshape(*tokens.shape, HEADS, -1)
        h = h + attend(*jnp.split(qkv, 3, -1)).reshape(h.shape) @ params[f"{layer}/out"]
        h = h + jax.nn.gelu(normalize(h) @ params[f"{layer}/up"]) @ params[f"{layer}/down"]
    return (normalize(h) @ params["unembed"]).astype(jnp.float32)


def shard_loss(params: Params, batch: jax.Array, batch_tokens: float) -> jax.Array:
    """Computes the loss of one shard of a batch of `batch_tokens` tokens.

    The gradients of all shards add up to the gradients of the mean loss over the batch.
    """
    logits = predict(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).sum() / batch_tokens


@jax.jit
def sample(params: Params, prompt: jax.Array, seed: int) -> jax.Array:
    """Samples the characters that follow a prompt, i32[LENGTH]."""

    def step(context: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = predict(params, context[None])[0, -1]
        character = jax.random.categorical(key, logits / TEMPERATURE).astype(context.dtype)
        return jnp.append(context[1:], character), character

    return jax.lax.scan(step, prompt, jax.random.split(jax.random.key(seed), SAMPLE_LENGTH))[1]


def train(name: str, text: Text, steps: int, batch_tokens: int, seed: int) -> Run:
    """Trains the model on an encoded text; `name` is one of `RUNS`."""
    alphabet, tokens = text
    loss_fn: Callable[..., jax.Array] = functools.partial(shard_loss, batch_tokens=batch_tokens)  # in float32
    if name != "float32":
        loss_fn = jmpscale.autocast(loss_fn, dtype=name.removesuffix(", jmpscale"))  # the same in float16 or bfloat16
    scaler = jmpscale.dynamic(growth_interval=GROWTH_INTERVAL) if "jmpscale" in name else jmpscale.disabled()
    schedule = optax.warmup_cosine_decay_schedule(1e-4, LEARNING_RATE, min(WARMUP_STEPS, steps // 4), steps)
    tx = jmpscale.with_loss_scaling(optax.adam(schedule), scaler)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, batch: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        logged = {"loss": loss * (batch_tokens / SHARD_TOKENS), "zero": jmpscale.grad_report(grads).totals()["zero"]}
        return params, opt_state, logged | jmpscale.metrics(opt_state)

    params = jax.jit(init, static_argnums=1)(jax.random.key(seed), len(alphabet))
    opt_state: Any = tx.init(params)
    starts = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH, (steps, SEQUENCES, 1))
    batches = [tokens[start + np.arange(LENGTH + 1)] for start in starts]
    compiled, history, begin = train_step.lower(params, opt_state, batches[0]).compile(), [], time.perf_counter()
    for step, batch in enumerate(batches, 1):
        params, opt_state, logged = compiled(params, opt_state, batch)
        history.append(logged)
        if step % PROGRESS_STEPS == 0 or step == steps:
            print(f"{name}: step {step} of {steps}, loss {logged['loss']:.3f}", file=sys.stderr, flush=True)
    seconds_per_step = (time.perf_counter() - begin) / steps
    characters = alphabet[sample(params, tokens[-LENGTH:], seed)]
    # Characters that are not printable could control the terminal.
    printable = " ".join("".join(c if c.isprintable() else " " for c in characters).split())[:SHOWN_LENGTH]
    return Run(jax.tree.map(lambda *x: np.stack(x), *jax.device_get(history)), seconds_per_step, printable, params)


def format_table(runs: Mapping[str, Run]) -> str:
    """Formats the final losses, the scale and the skips, and the sampled texts."""
    lines = [f"{'run':<20}{'loss':>8}{'s/step':>9}{'final scale':>13}{'skipped':>9}{'zero gradients':>16}"]
    for name, run in runs.items():
        scale, skipped = f"2^{np.log2(run.history['loss_scale'][-1]):.0f}", run.history["total_skips"][-1]
        scaling = f"{scale:>13}{skipped:>9}" if "jmpscale" in name else f"{'-':>13}{'-':>9}"
        lines.append(
            f"{name:<20}{run.mean('loss'):>8.3f}{run.seconds_per_step:>9.4f}{scaling}{run.mean('zero'):>16.2%}"
        )
    return "\n".join(lines + [f"\n{name} writes:\n{textwrap.fill(run.sample, 100)}" for name, run in runs.items()])


def plot(runs: Mapping[str, Run]) -> "Figure":
    """Plots the losses and the sampled texts; returns a matplotlib figure that is readable at a width of 400 pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9.2), layout="constrained")
    axes = figure.subplot_mosaic([["loss"], ["texts"]], height_ratios=[4, 4.4])
    losses = {name: run.mean("loss") for name, run in runs.items()}
    alone, scaled = (losses[name] - losses["float32"] for name in ("float16", "float16, jmpscale"))
    title = f"float16 ends {alone:z.2f} nats above float32,\nfloat16 with jmpscale {scaled:z.2f}"
    figure.suptitle(title, size=22, weight="bold")
    _plot_losses(runs, axes["loss"])
    _plot_texts(runs, axes["texts"])
    return figure


def _plot_losses(runs: Mapping[str, Run], axis: "Axes") -> None:
    # The curve of jmpscale would hide the curves of float32 and bfloat16.
    styles: dict[str, Any] = {"float32": {"linewidth": 8}, "bfloat16": {"linestyle": ":"}}
    for name, run in runs.items():
        loss = run.history["loss"]
        smooth = [loss[max(0, n - SMOOTHING) : n].mean() for n in range(1, len(loss) + 1)]
        label = f"{name}: {run.mean('loss'):.3f}"
        axis.plot(smooth, color=RUNS[name], label=label, **{"linewidth": 2, **styles.get(name, {})})
    axis.set_title("The same language model, trained four times", size=19)
    axis.set_xlabel("step", size=17)
    axis.set_ylabel("loss (nats per character)", size=17)
    axis.tick_params(labelsize=15)
    axis.legend(fontsize=17)


def _plot_texts(runs: Mapping[str, Run], axis: "Axes") -> None:
    for row, (name, run) in enumerate(runs.items()):
        top, color = 1 - 0.25 * row, RUNS["bfloat16" if name == "float32" else name]
        look: dict[str, Any] = {"size": 12.5, "color": color, "va": "top", "parse_math": False}
        axis.text(0, top, f"{name} writes:", weight="bold", **look)
        axis.text(0, top - 0.06, textwrap.fill(run.sample, 66), family="monospace", **look)
    axis.axis("off")


def read_text(path: pathlib.Path | None = None) -> str:
    """Reads a text, by default the reference manual that Python contains for `help()`."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(MAX_TEXT)
    if len(text) < MIN_TEXT or len(set(text)) < 2:
        raise ValueError(f"the text must have at least {MIN_TEXT:,} characters, not all equal, got {len(text):,}")
    return text


def encode(text: str) -> Text:
    """Encodes characters as integers: returns the alphabet and the text, i32[length]. Rare characters share a code."""
    common = {c for c, _ in collections.Counter(text).most_common(MAX_ALPHABET)}
    alphabet, tokens = np.unique([c if c in common else "\ufffd" for c in text], return_inverse=True)
    return alphabet, tokens.astype(np.int32)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the model four times, prints a table and writes a picture."""
    parser = argparse.ArgumentParser("python -m jmpscale", description="Train a language model four times.")
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("--text", type=pathlib.Path, metavar="FILE", help="UTF-8 training text (default: Python's reference manual)")
    add("--steps", default=800, help="training steps of each run (default: 800)")
    add("--batch-tokens", default=2**19, help="number of tokens by which the loss is divided (default: 524288)")
    add("--seed", default=0, help="seed of the random numbers (default: 0)")
    add("--output", type=pathlib.Path, metavar="FILE", default="jmpscale.png", help="PNG (default: jmpscale.png)")
    options = parser.parse_args(argv)
    for name, low, high in (("steps", 1, 10**6), ("batch-tokens", SHARD_TOKENS, 2**30), ("seed", 0, 2**31 - 1)):
        if not low <= (value := getattr(options, name.replace("-", "_"))) <= high:
            parser.error(f"argument --{name}: must be between {low} and {high}, got {value}")
    # Checked before the training, which takes minutes.
    try:
        import matplotlib  # noqa: F401

        text = encode(read_text(options.text))
        options.output.open("ab").close()
    except ImportError as error:
        parser.error(f'{error}: pip install "jmpscale[demo]"')
    except (OSError, ValueError) as error:
        parser.error(str(error))

    runs = {name: train(name, text, options.steps, options.batch_tokens, options.seed) for name in RUNS}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal cannot print
    print(format_table(runs))
    # The picture has two pixels for each of the 736 pixels of a page's width.
    plot(runs).savefig(options.output, format="png", dpi=184)
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    main()
