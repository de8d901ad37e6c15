"""The demonstration, `python -m jmpscale`: what float16 loses without loss scaling, shown on a photograph.

The same neural field is fitted to the same picture four times, from the same seed and by the same code; only the dtype
and the scaler differ. What can go wrong outside the training is found out before it, and no file is ever half written.
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import os
import pathlib
import secrets
import signal
import stat
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

import jmpscale

WIDTHS = (512, 128, 128, 128, 128, 3)
FREQUENCY = 12.0  # standard deviation of the Fourier features, in cycles over a side of the picture
LEARNING_RATE = 2e-3
GROWTH_INTERVAL = 30  # the usual 2000 steps between two growths are for long trainings; this one is over before
LAST_STEPS = 100
UNTIL_NEWS = 10  # steps between two looks at the device: often enough for a bar and for Ctrl-C, too seldom to cost time
GREY, RED, BLUE = "#5c626b", "#d1495b", "#2a7f9e"

Floats = npt.NDArray[np.float32]
Params = list[tuple[jax.Array, jax.Array]]  # of each layer the weights, f32[in, out], and the biases, f32[1, out]


class Variant(NamedTuple):
    """One way to train: the dtype to compute in, whether to scale the loss, and how to show it."""

    name: str
    dtype: Any
    scaled: bool
    colour: str


VARIANTS = (
    Variant("float32", jnp.float32, False, GREY),
    Variant("bfloat16", jnp.bfloat16, False, GREY),
    Variant("float16, no scaling", jnp.float16, False, RED),
    Variant("float16, jmpscale", jnp.float16, True, BLUE),
)


class Outcome(NamedTuple):
    """What came of one fit; `history` holds the scaler's metrics after each step, `zeros` a share of the gradients."""

    variant: Variant
    picture: Floats
    psnr: float
    seconds: float
    history: dict[str, Any]
    zeros: float


class _DemoError(Exception):
    """Something the user can put right; its text is all that is shown."""


def _init(key: jax.Array) -> Params:
    layers = zip(jax.random.split(key, len(WIDTHS) - 1), itertools.pairwise(WIDTHS), strict=True)
    return [
        (jax.random.normal(k, (n, m), jnp.float32) * n**-0.5, jnp.zeros((1, m), jnp.float32)) for k, (n, m) in layers
    ]


def _fourier_features(key: jax.Array, height: int, width: int) -> jax.Array:
    """Maps the centre of every pixel to sines and cosines of random frequencies, f32[height * width, features]."""
    rows, columns = np.mgrid[0:height, 0:width]
    centres = np.stack([(columns + 0.5) / width, (rows + 0.5) / height], axis=-1).reshape(-1, 2)
    frequencies = jax.random.normal(key, (2, WIDTHS[0] // 2), jnp.float32) * (2 * np.pi * FREQUENCY)
    phases = jnp.matmul(jnp.asarray(centres, jnp.float32), frequencies, precision="highest")
    return jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], axis=-1)


def _colours(params: Params, features: jax.Array, dtype: Any) -> jax.Array:
    """Computes f32[pixels, 3] with the network in `dtype`; the master weights stay float32."""
    x = features.astype(dtype)
    for weights, biases in params[:-1]:
        x = jax.nn.gelu(x @ weights.astype(dtype) + biases.astype(dtype))
    weights, biases = params[-1]
    return (x @ weights.astype(dtype) + biases.astype(dtype)).astype(jnp.float32)


def _make_step(dtype: Any, tx: optax.GradientTransformation) -> Any:
    """Makes the training step: the same code with scaling and without it."""

    def loss_fn(params: Params, features: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.mean((_colours(params, features, dtype) - target) ** 2)

    def train_step(params: Any, opt_state: Any, scaler: jmpscale.ScalerState, *batch: jax.Array) -> Any:
        loss, grads, finite = jmpscale.value_and_grad(loss_fn)(scaler, params, *batch)

        def step(params: Any, opt_state: Any) -> Any:
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = jmpscale.apply_if(finite, step, params, opt_state)
        # Unscaling in float32 makes no zero that was not one in float16: these are the zeros of the backward pass.
        zeros = jmpscale.grad_report(grads).totals()["zero"]
        scaler = jmpscale.update(scaler, finite, loss=loss)
        return (params, opt_state, scaler), (jmpscale.metrics(scaler), zeros)

    return jax.jit(train_step, donate_argnums=(0, 1, 2))


def _fit(variant: Variant, target: Floats, steps: int, seed: int, report: Callable[[str, int, int], None]) -> Outcome:
    """Trains one network on the picture f32[height, width, 3] and says how it went."""
    report(variant.name, 0, steps)
    for_params, for_features = jax.random.split(jax.random.key(seed))
    batch = _fourier_features(for_features, *target.shape[:2]), jnp.asarray(target.reshape(-1, 3))
    scaler = jmpscale.dynamic(growth_interval=GROWTH_INTERVAL) if variant.scaled else jmpscale.disabled()
    params: Any = _init(for_params)
    tx = optax.adam(LEARNING_RATE)
    carry: tuple[Any, Any, jmpscale.ScalerState] = params, tx.init(params), scaler
    step = _make_step(variant.dtype, tx).lower(*carry, *batch).compile()
    records: list[Any] = []
    start = time.perf_counter()
    for done in range(1, steps + 1):
        carry, record = step(*carry, *batch)
        records.append(record)
        if done % UNTIL_NEWS == 0 or done == steps:
            jax.block_until_ready(carry)
            report(variant.name, done, steps)
    seconds = (time.perf_counter() - start) / steps
    picture = np.clip(np.asarray(_colours(carry[0], batch[0], variant.dtype)).reshape(target.shape), 0.0, 1.0)
    psnr = float(-10 * np.log10(np.mean((picture - target) ** 2) + 1e-12))
    history, zeros = jax.tree.map(lambda *column: np.stack(column), *jax.device_get(records))
    return Outcome(variant, picture, psnr, seconds, history, float(zeros[-LAST_STEPS:].mean()))


def _show_progress(name: str, done: int, steps: int) -> None:
    """Draws a bar on a terminal, and else writes a line at every quarter."""
    bar = "#" * (30 * done // steps)
    with contextlib.suppress(OSError):  # a bar that cannot be shown is no reason to stop
        if sys.stderr.isatty():
            end = "\n" if done == steps else ""
            print(f"\r{name:<20} [{bar:<30}] {done:>{len(str(steps))}}/{steps}", end=end, file=sys.stderr, flush=True)
        elif done in (0, steps) or 4 * done // steps > 4 * (done - UNTIL_NEWS) // steps:
            print(f"{name}: {done} of {steps} steps", file=sys.stderr, flush=True)


def _table(outcomes: Sequence[Outcome]) -> str:
    lines = [f"{'run':<20}{'PSNR (dB)':>10}{'s/step':>9}{'final scale':>13}{'skipped':>9}{'zero gradients':>16}"]
    for run in outcomes:
        last = {name: values[-1] for name, values in run.history.items()}
        scaling = (f"2^{np.log2(last['loss_scale']):.0f}", last["skipped"]) if run.variant.scaled else ("-", "-")
        numbers = f"{run.psnr:>10.1f}{run.seconds:>9.4f}{scaling[0]:>13}{scaling[1]:>9}{run.zeros:>16.2%}"
        lines.append(f"{run.variant.name:<20}{numbers}")
    return "\n".join(lines)


def _draw(target: Floats, outcomes: Sequence[Outcome]) -> Any:
    """Draws the picture, the fits, their errors and the loss scale; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    from jmpscale import plots  # needs matplotlib

    panel = 3.1 * min(max(target.shape[0] / target.shape[1], 0.35), 1.6)
    figure = cast(Any, Figure(figsize=(16.5, 2 * panel + 5.2)))
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.08)
    figure.suptitle("A neural field fitted to a photograph, four times from the same seed", fontsize=16)
    pictures, curves = figure.subfigures(2, 1, height_ratios=[2 * panel + 1.1, 3.8])
    _draw_pictures(target, outcomes, pictures.subplots(2, 1 + len(outcomes)), pictures)
    left, right = curves.subplots(1, 2, width_ratios=[2.6, 1])
    scaled = next(run for run in outcomes if run.variant.scaled)
    plots.scale_trajectory(scaled.history, ax=left)
    left.set_title(f"{scaled.variant.name}: the loss scale grows until the gradients overflow, and backs off")
    _draw_zeros(outcomes, right)
    return figure


def _draw_pictures(target: Floats, outcomes: Sequence[Outcome], axes: Any, figure: Any) -> None:
    errors = [255 * np.abs(run.picture - target).mean(axis=-1) for run in outcomes]
    colours = {"cmap": "inferno", "vmin": 0, "vmax": max(0.1, float(np.nanpercentile(np.stack(errors), 99)))}
    axes[0, 0].imshow(target, interpolation="nearest")
    axes[0, 0].set_title(f"original, {target.shape[1]} x {target.shape[0]} pixels")
    axes[1, 0].axis("off")
    for (top, bottom), run, error in zip(axes.T[1:], outcomes, errors, strict=True):
        top.imshow(run.picture, interpolation="nearest")
        top.set_title(f"{run.variant.name}: {run.psnr:.1f} dB", fontweight="bold", color=run.variant.colour)
        bottom.imshow(error, interpolation="nearest", **colours)
        bottom.set_title(f"its error, mean {error.mean():.2f}", fontsize=10)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    place = axes[1, 0].inset_axes([0.05, 0.5, 0.9, 0.1])
    bar = figure.colorbar(axes[1, 1].images[0], cax=place, orientation="horizontal", extend="max")
    bar.set_label("absolute error, mean of red, green, blue\n(8-bit levels, of 255)")


def _draw_zeros(outcomes: Sequence[Outcome], axis: Any) -> None:
    shares = [100 * run.zeros for run in outcomes]
    names, colours = [run.variant.name for run in outcomes], [run.variant.colour for run in outcomes]
    axis.bar_label(axis.barh(names, shares, color=colours), fmt="%.2f %%", padding=4)
    axis.set_title("Underflow: gradients that are exactly zero")
    axis.set(xlabel=f"share (%), mean over the last {LAST_STEPS} steps", xlim=(0, max(1.35 * max(shares), 0.01)))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


@contextlib.contextmanager
def _explaining(task: str, *errors: type[Exception]) -> Generator[None]:
    try:
        yield
    except errors as error:
        number: int | None = getattr(error, "errno", None)
        reason = os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__
        raise _DemoError(f"cannot {task}: {reason}") from error


def _check_output(path: pathlib.Path) -> None:
    """Raises unless a file can be put at `path`; leaves nothing behind."""
    with _explaining(f"write {path}", OSError):
        with contextlib.suppress(FileNotFoundError):
            if not (stat.S_ISREG(path.stat().st_mode) and os.access(path, os.W_OK)):
                raise _DemoError(f"cannot write {path}: it exists and is not a file that may be overwritten")
        temporary = _temporary(path)
        temporary.open("xb").close()
        temporary.unlink()


def _temporary(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".jmpscale-{secrets.token_hex(8)}.tmp")


def _save(figure: Any, path: pathlib.Path) -> None:
    """Writes the figure to `path` whole, or leaves what is there as it is."""
    temporary = _temporary(path)
    with _explaining(f"write {path}", OSError):
        file = temporary.open("xb")
        try:
            with file:
                figure.savefig(file, format="png", dpi=110)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _read_picture(path: pathlib.Path | None, size: int) -> Floats:
    """Reads a picture, at most `size` pixels on its longer side, as f32[height, width, 3] in [0, 1]."""
    from PIL import Image, ImageOps

    if path is None:
        datasets: Any = importlib.import_module("sklearn.datasets")
        image = Image.fromarray(datasets.load_sample_image("china.jpg"))
    else:
        # A decoder raises whatever it likes at a damaged file.
        with _explaining(f"read {path}", Exception), Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
    ratio = min(1.0, size / max(image.size))
    width, height = (max(1, round(side * ratio)) for side in image.size)
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS), np.float32) / np.float32(255)


def _require_extra() -> None:
    try:
        for module in ("matplotlib.figure", "PIL.Image", "sklearn.datasets"):
            importlib.import_module(module)
    except ImportError as error:
        text = f'{error.name or error} is missing, which the demonstration needs: pip install "jmpscale[demo]"'
        raise _DemoError(text) from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jmpscale", description="Fit a photograph with and without scaling."
    )
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("--image", type=pathlib.Path, metavar="FILE", help="photograph to fit (default: scikit-learn's china.jpg)")
    add("--steps", default=600, help="training steps of each run (default: 600)")
    add("--size", default=80, help="longer side in pixels, where the photograph's is more (default: 80)")
    add("--seed", default=0, help="seed of the random numbers (default: 0)")
    add("--output", type=pathlib.Path, metavar="FILE", default="jmpscale.png", help="PNG (default: jmpscale.png)")
    options = parser.parse_args(argv)
    for name, low, high in (("steps", 1, 10**6), ("size", 1, 4096), ("seed", 0, 2**31 - 1)):
        if not low <= (value := getattr(options, name)) <= high:
            parser.error(f"argument --{name}: must be between {low} and {high}, got {value}")
    return options


def _demonstrate(options: argparse.Namespace) -> None:
    # A link stays a link: what it points to is replaced, not the link itself.
    output = pathlib.Path(os.path.realpath(options.output))
    _require_extra()
    _check_output(output)
    target = _read_picture(options.image, options.size)
    outcomes = [_fit(variant, target, options.steps, options.seed, _show_progress) for variant in VARIANTS]
    try:
        _print(_table(outcomes))
    finally:  # neither must a failure to print cost the picture, nor one to write it the table
        _save(_draw(target, outcomes), output)
    _print(f"wrote {options.output}")


def _print(text: str) -> None:
    with _explaining("print the results", OSError):
        try:
            print(text, flush=True)
        except OSError:
            # What Python still holds it would try to write again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration and returns the exit code: 0, 2 for what the user can put right, 130 for Ctrl-C."""
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
