"""The demonstration, `python -m jmpscale`: what float16 loses without loss scaling, shown on a small language model.

The same model is trained four times, from the same seed and by the same code; only the dtype and the scaler differ.
What can go wrong outside the training is found out before it, and no file is ever half written.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import os
import pathlib
import secrets
import signal
import stat
import sys
import textwrap
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmpscale

SEQUENCES, LENGTH, WIDTH, HEADS, LAYERS = 16, 64, 64, 4, 2
SHARE = SEQUENCES * LENGTH  # tokens in a step
# The highest learning rate, the steps until it is reached, and those between two growths of the loss scale: the usual
# 2000 are for longer trainings.
LEARNING_RATE, WARM_UP, GROWTH_INTERVAL = 3e-3, 50, 40
LAST_STEPS, UNTIL_NEWS = 100, 10  # steps of the table's means; steps between two looks at the device, which cost time
SHORTEST, LONGEST, CHARACTERS = 4096, 2**21, 512  # of a text; and how many different characters are told apart
WRITTEN, SHOWN, TEMPERATURE = 400, 190, 0.6  # characters that each model writes; below 1 it prefers the likely ones
GREY, DARK, RED, BLUE, SAND = "#b3b9c1", "#3c4046", "#d1495b", "#2a7f9e", "#f3ead7"
# By what tells them apart: the dtype, and whether the loss is scaled.
VARIANTS = {"float32": GREY, "bfloat16": DARK, "float16": RED, "float16, jmpscale": BLUE}
NO_TAPS: Mapping[str, Any] = collections.defaultdict(float)


class Outcome(NamedTuple):
    """What came of one training; `history` holds of each step the loss, the share of zeros, and the scaler's metrics.

    `gradients` are those of the activations at the end, of the unscaled loss and in float32.
    """

    history: dict[str, Any]
    seconds: float
    writing: str
    gradients: dict[str, jax.Array]

    def mean(self, name: str) -> float:
        """Averages over the last steps."""
        return float(self.history[name][-LAST_STEPS:].mean())


class _DemoError(Exception):
    """Something the user can put right; its text is all that is shown."""


def init(key: jax.Array, characters: int) -> dict[str, jax.Array]:
    """Draws the parameters of a transformer, in float32."""
    sizes = {"embed": (characters, WIDTH, 1.0), "position": (LENGTH, WIDTH, 1.0), "unembed": (WIDTH, characters, 1.0)}
    for layer in (f"layer_{n}" for n in range(LAYERS)):
        sizes |= {f"{layer}/qkv": (WIDTH, 3 * WIDTH, 1.0), f"{layer}/out": (WIDTH, WIDTH, 0.2)}
        sizes |= {f"{layer}/up": (WIDTH, 4 * WIDTH, 1.0), f"{layer}/down": (4 * WIDTH, WIDTH, 0.2)}
    keys = dict(zip(sizes, jax.random.split(key, len(sizes)), strict=True))
    return {name: jax.random.normal(keys[name], (n, m)) * gain * n**-0.5 for name, (n, m, gain) in sizes.items()}


def _normalise(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(np.tri(LENGTH, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


def predict(params: Any, tokens: Any, dtype: Any, taps: Mapping[str, Any] = NO_TAPS) -> jax.Array:
    """Computes logits f32[sequences, LENGTH, characters] of what follows each character, in `dtype`.

    `taps` are zeros added to the activations: the gradients with respect to them are those of the activations.
    """
    w = {name: x.astype(dtype) for name, x in params.items()}
    h = w["embed"][tokens] + w["position"] + taps["embed"]
    for layer in (f"layer_{n}" for n in range(LAYERS)):
        qkv = (_normalise(h) @ w[f"{layer}/qkv"]).reshape(*tokens.shape, HEADS, -1)
        h = h + _attend(*jnp.split(qkv, 3, -1)).reshape(h.shape) @ w[f"{layer}/out"]
        h = h + jax.nn.gelu(_normalise(h) @ w[f"{layer}/up"] + taps[f"{layer}/mlp"]) @ w[f"{layer}/down"]
    return (_normalise(h) @ w["unembed"] + taps["logits"]).astype(jnp.float32)


def make_taps(characters: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Makes the zeros that `predict` adds to its activations."""
    widths = {"embed": WIDTH, "logits": characters} | {f"layer_{n}/mlp": 4 * WIDTH for n in range(LAYERS)}
    return {name: jnp.zeros((SEQUENCES, LENGTH, width), dtype) for name, width in widths.items()}


def share_loss(params: Any, batch: Any, whole: Any, dtype: Any, taps: Mapping[str, Any] = NO_TAPS) -> jax.Array:
    """Computes the loss of one share of a batch of `whole` tokens; the gradients of all shares add up to the mean's."""
    logits = predict(params, batch[:, :-1], dtype, taps)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).sum() / whole


tap_grads: Any = jax.jit(jax.grad(share_loss, argnums=4), static_argnums=3)


@functools.partial(jax.jit, static_argnames="dtype")
def _write(params: Any, start: Any, seed: int, dtype: Any) -> jax.Array:
    """Lets the model write on after the characters i32[LENGTH]."""

    def step(seen: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jax.random.categorical(key, predict(params, seen[None], dtype)[0, -1] / TEMPERATURE).astype(seen.dtype)
        return jnp.append(seen[1:], new), new

    return jax.lax.scan(step, start, jax.random.split(jax.random.key(seed), WRITTEN))[1]


def train(name: str, text: tuple[Any, Any], steps: int, whole: int, seed: int) -> Outcome:
    """Trains one of `VARIANTS` on an encoded text, a share of a batch of `whole` tokens a step; says how it went."""
    _show_progress(name, 0, steps)
    (alphabet, tokens), dtype = text, jnp.dtype(name.removesuffix(", jmpscale"))
    scaler = jmpscale.dynamic(growth_interval=GROWTH_INTERVAL) if "jmpscale" in name else jmpscale.disabled()
    schedule = optax.warmup_cosine_decay_schedule(1e-4, LEARNING_RATE, min(WARM_UP, steps // 4), steps)
    tx = jmpscale.with_loss_scaling(optax.adam(schedule), scaler)
    loss_fn = functools.partial(share_loss, whole=whole, dtype=dtype)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        seen = {"loss": loss * (whole / SHARE), "zero": jmpscale.grad_report(grads).totals()["zero"]}
        return params, opt_state, seen | jmpscale.metrics(opt_state)

    params = jax.jit(init, static_argnums=1)(jax.random.key(seed), len(alphabet))
    opt_state: Any = tx.init(params)
    starts = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH, (steps, SEQUENCES, 1))
    batch = tokens[starts[0] + np.arange(LENGTH + 1)]
    compiled, records, begin = train_step.lower(params, opt_state, batch).compile(), [], time.perf_counter()
    for done, start in enumerate(starts, 1):
        batch = tokens[start + np.arange(LENGTH + 1)]
        params, opt_state, seen = compiled(params, opt_state, batch)
        records.append(seen)
        if done % UNTIL_NEWS == 0 or done == steps:
            jax.block_until_ready(params)
            _show_progress(name, done, steps)
    seconds = (time.perf_counter() - begin) / steps
    history = jax.tree.map(lambda *column: np.stack(column), *jax.device_get(records))
    letters = alphabet[_write(params, tokens[-LENGTH:], seed, dtype)]  # after the end of the text
    # A blank for all white space and for what is not to be printed: neither a terminal nor a picture obeys a text.
    writing = " ".join("".join(c if c.isprintable() else " " for c in letters).split())[:SHOWN]
    return Outcome(history, seconds, writing, tap_grads(params, batch, whole, jnp.float32, make_taps(len(alphabet))))


def _show_progress(name: str, done: int, steps: int) -> None:
    """Counts the steps on a terminal, and else writes a line at every quarter."""
    quarter = done in (0, steps) or 4 * done // steps > 4 * (done - UNTIL_NEWS) // steps
    with contextlib.suppress(OSError):  # progress that cannot be shown is no reason to stop
        if (terminal := sys.stderr.isatty()) or quarter:
            start, end = ("\r", "\n" * (done == steps)) if terminal else ("", "\n")
            print(f"{start}{name}: {done} of {steps} steps", end=end, file=sys.stderr, flush=True)


def _table(outcomes: Mapping[str, Outcome]) -> str:
    lines = [f"{'run':<20}{'loss':>8}{'s/step':>9}{'final scale':>13}{'skipped':>9}{'zero gradients':>16}"]
    for name, run in outcomes.items():
        scale, skipped = f"2^{np.log2(run.history['loss_scale'][-1]):.0f}", run.history["skipped"][-1]
        scaling = f"{scale:>13}{skipped:>9}" if "jmpscale" in name else f"{'-':>13}{'-':>9}"
        lines.append(f"{name:<20}{run.mean('loss'):>8.3f}{run.seconds:>9.4f}{scaling}{run.mean('zero'):>16.2%}")
    return "\n".join(lines + [f"\n{name} writes:\n{textwrap.fill(run.writing, 100)}" for name, run in outcomes.items()])


def _draw(outcomes: Mapping[str, Outcome], whole: int) -> Any:
    """Draws the losses, the texts, the loss scale and the gradients; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    from jmpscale import plots  # needs matplotlib

    fonts = importlib.import_module("matplotlib.font_manager")
    figure = Figure(figsize=(16, 9.5), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "texts"], ["scale", "window"]], height_ratios=[1.25, 1])
    losses = [run.mean("loss") for run in outcomes.values()]
    title = f"float16 ends {losses[2] - losses[0]:z.2f} nats above float32, with jmpscale {losses[3] - losses[0]:z.2f}"
    figure.suptitle(title, size=21, weight="bold")
    known, top = fonts.get_font(fonts.findfont("monospace")).get_charmap(), 1.0
    for (name, run), colour in zip(outcomes.items(), VARIANTS.values(), strict=True):
        loss, text = run.history["loss"], "".join(c if ord(c) in known else "\u25a1" for c in run.writing)
        smooth = [loss[max(0, n - UNTIL_NEWS) : n].mean() for n in range(1, len(loss) + 1)]
        shape: dict[str, Any] = {"linewidth": 8 if colour == GREY else 2, "linestyle": ":" if colour == DARK else "-"}
        axes["loss"].plot(smooth, color=colour, label=f"{name}: {run.mean('loss'):.3f}", **shape)
        look: dict[str, Any] = {
            "size": 13,
            "color": DARK if colour == GREY else colour,
            "va": "top",
            "parse_math": False,
        }
        axes["texts"].text(0, top, f"{name} writes:", weight="bold", **look)
        axes["texts"].text(0, top - 0.07, textwrap.fill(text, 66), family="monospace", **look)
        top -= 0.26
    axes["loss"].set(xlabel="step", ylabel=f"loss (nats a character), mean of {UNTIL_NEWS} steps")
    axes["loss"].set_title("The same language model, trained four times from the same seed", size=14)
    axes["loss"].legend(fontsize=13)
    axes["texts"].axis("off")
    plots.scale_trajectory(outcomes["float16, jmpscale"].history, ax=axes["scale"])
    axes["scale"].set_title("The loss scale grows until gradients overflow, skips that step, halves", size=14)
    _draw_window(outcomes["float16, jmpscale"], axes["window"])
    figure.supxlabel(f"loss of a step: summed over its {SHARE:,} tokens, divided by the {whole:,} of the whole batch")
    return figure


def _draw_window(run: Outcome, axis: Any) -> None:
    values = np.concatenate([np.abs(g).ravel() for g in jax.device_get(run.gradients).values()])
    axis.axvspan(-24, 16, color=SAND, label="what float16 can hold")
    power = int(np.log2(run.history["loss_scale"][-1]))
    for shift, colour, name in ((0, RED, "as they are"), (power, BLUE, f"times the loss scale, 2^{power}")):
        shares, edges = np.histogram(np.log2(values[values > 0]) + shift, np.arange(-50, 20))
        label = f"{name}: {np.mean(values * 2.0**shift < 2.0**-24):.0%} too small"
        axis.stairs(100 * shares / values.size, edges, fill=True, color=colour, label=label)
    axis.set(xlabel="log2 of the magnitude", ylabel="share (%)", xlim=(-48, 19), ymargin=0.5)
    axis.set_title("Where the gradients of the activations lie", size=14)
    axis.legend(fontsize=13, loc="upper left")


@contextlib.contextmanager
def _explaining(task: str, *errors: type[Exception]) -> Generator[None]:
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise _DemoError(f"cannot {task}: {reason}") from error


@contextlib.contextmanager
def _replacing(path: pathlib.Path, keep: bool) -> Generator[Any]:
    """Gives a file to write; whole, it takes the place of `path`, if it is to be kept. Else nothing has happened."""
    temporary = path.with_name(f".jmpscale-{secrets.token_hex(8)}.tmp")
    with _explaining(f"write {path}", OSError):
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if keep:
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _check_output(path: pathlib.Path, text: pathlib.Path | None = None) -> None:
    """Raises unless a file can be put at `path`, and it is not `text`; leaves nothing behind."""
    with _explaining(f"write {path}", OSError), contextlib.suppress(FileNotFoundError):
        if not (stat.S_ISREG(path.stat().st_mode) and os.access(path, os.W_OK)):
            raise OSError("it exists and is not a file that may be overwritten")
        if text and text.samefile(path):
            raise OSError("it is the text to learn; name another file with --output")
    with _replacing(path, keep=False):
        pass


def read_text(path: pathlib.Path | None = None) -> str:
    """Reads a text, by default the reference manual that Python brings along for `help()`."""
    if path is None:
        topics = _imported("pydoc_data.topics", "the text to learn: name another one with --text FILE").topics
        return "\n".join(topics[name] for name in sorted(topics))
    with _explaining(f"read {path}", OSError, ValueError):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise OSError("it is not a regular file")
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST)
        if len(text) < SHORTEST or len(set(text)) < 2:
            raise ValueError(f"it must have {SHORTEST:,} characters or more, not all the same, and has {len(text):,}")
    return text


def encode(text: str) -> tuple[Any, Any]:
    """Numbers the characters: returns the alphabet and the text as i32[length]. The rare ones of very many are one."""
    common = {c for c, _ in collections.Counter(text).most_common(CHARACTERS)}
    alphabet, tokens = np.unique([c if c in common else "\ufffd" for c in text], return_inverse=True)
    return alphabet, tokens.astype(np.int32)


def _imported(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _DemoError(f"{error.name or error} is missing, {what}") from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m jmpscale", description="Train a language model four times.")
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("--text", type=pathlib.Path, metavar="FILE", help="UTF-8 text to learn (default: Python's reference manual)")
    add("--steps", default=800, help="training steps of each run (default: 800)")
    add("--batch-tokens", default=2**19, help="tokens of the whole batch, which divide the loss (default: 524288)")
    add("--seed", default=0, help="seed of the random numbers (default: 0)")
    add("--output", type=pathlib.Path, metavar="FILE", default="jmpscale.png", help="PNG (default: jmpscale.png)")
    options = parser.parse_args(argv)
    for name, low, high in (("steps", 1, 10**6), ("batch-tokens", SHARE, 2**30), ("seed", 0, 2**31 - 1)):
        if not low <= (value := getattr(options, name.replace("-", "_"))) <= high:
            parser.error(f"argument --{name}: must be between {low} and {high}, got {value}")
    return options


def _demonstrate(options: argparse.Namespace) -> None:
    output = pathlib.Path(os.path.realpath(options.output))  # a link is written through, not replaced
    _imported("matplotlib.figure", 'which the demonstration needs: pip install "jmpscale[demo]"')
    settings = encode(read_text(options.text)), options.steps, options.batch_tokens, options.seed
    _check_output(output, options.text)
    outcomes = {name: train(name, *settings) for name in VARIANTS}
    try:
        _print(_table(outcomes))
    finally:  # neither must a failure to print cost the picture, nor one to write it the table
        with _replacing(output, keep=True) as file:
            _draw(outcomes, options.batch_tokens).savefig(file, format="png", dpi=110)
    _print(f"\nwrote {options.output}")


def _print(text: str) -> None:
    with _explaining("print the results", OSError):
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        try:
            print(text.encode(encoding, "replace").decode(encoding), flush=True)
        except OSError:
            # What Python still holds it would try to write again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration and returns the exit code: 0, 2 for what the user can put right, 130 for Ctrl-C."""
    # Closed by whoever started this: nobody listens.
    sys.stdout, sys.stderr = (s or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") for s in (sys.stdout, sys.stderr))
    try:
        _demonstrate(_parse(argv))
    except _DemoError as failure:
        print(f"python -m jmpscale: error: {failure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # A bar may be standing on the line.
        print("\n" * sys.stderr.isatty() + "interrupted, nothing written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # By an exception, so that a file half written is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
