"""The demonstration, `python -m jmpscale`: what float16 loses without loss scaling, shown on a photograph.

The same neural field is fitted to the same picture four times, from the same seed and by the same code; only the dtype
and the scaler differ. What can go wrong outside the training is found out before it, and no file is ever half written.
"""

import argparse
import importlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
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
LAST_STEPS = 100
UNTIL_NEWS = 10  # steps between two looks at the device: often enough for a bar and for Ctrl-C, too seldom to cost time

OVERFLOW = "#d1495b"
Floats = npt.NDArray[np.float32]


class Layer(NamedTuple):
    """One dense layer: weights f32[in, out] and biases f32[1, out]."""

    weights: jax.Array
    biases: jax.Array


Params = list[Layer]


class Record(NamedTuple):
    """What one step reports: the scale that it used, whether it was taken, and its share of zero gradients."""

    loss_scale: jax.Array
    finite: jax.Array
    zeros: jax.Array


class Variant(NamedTuple):
    """One way to train: a name, the dtype to compute in, what makes the scaler, and a colour to draw it in."""

    name: str
    dtype: Any
    scaler: Callable[[], jmpscale.ScalerState]
    colour: str


class Outcome(NamedTuple):
    """What came of one fit; `loss_scale` holds the scale of every step and, at its end, the one after the last."""

    name: str
    colour: str
    scaled: bool
    picture: Floats
    psnr: float
    seconds: float
    loss_scale: Floats
    skipped: npt.NDArray[np.intp]
    zeros: float


def _dynamic() -> jmpscale.ScalerState:
    # The usual 2000 steps between two growths are for long trainings; this one is over before.
    return jmpscale.dynamic(growth_interval=30)


VARIANTS = (
    Variant("float32", jnp.float32, jmpscale.disabled, "#5c626b"),
    Variant("bfloat16", jnp.bfloat16, jmpscale.disabled, "#5c626b"),
    Variant("float16, no scaling", jnp.float16, jmpscale.disabled, OVERFLOW),
    Variant("float16, jmpscale", jnp.float16, _dynamic, "#2a7f9e"),
)


class _DemoError(Exception):
    """Something the user can put right; its text is all that is shown."""


def _init(key: jax.Array) -> Params:
    keys = jax.random.split(key, len(WIDTHS) - 1)
    return [
        Layer(jax.random.normal(k, (n, m), jnp.float32) * n**-0.5, jnp.zeros((1, m), jnp.float32))
        for k, n, m in zip(keys, WIDTHS, WIDTHS[1:], strict=False)
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
    *hidden, last = [Layer(layer.weights.astype(dtype), layer.biases.astype(dtype)) for layer in params]
    x = features.astype(dtype)
    for layer in hidden:
        x = jax.nn.gelu(x @ layer.weights + layer.biases)
    return (x @ last.weights + last.biases).astype(jnp.float32)


def _share_of_zeros(grads: Any) -> jax.Array:
    leaves: list[jax.Array] = jax.tree.leaves(grads)
    zeros = jnp.stack([jnp.sum(leaf == 0) for leaf in leaves]).sum()
    return zeros.astype(jnp.float32) / sum(leaf.size for leaf in leaves)


def _make_step(features: jax.Array, target: jax.Array, dtype: Any, tx: optax.GradientTransformation) -> Any:
    """Makes the training step: the same code with scaling and without it."""

    def loss_fn(params: Params) -> jax.Array:
        return jnp.mean((_colours(params, features, dtype) - target) ** 2)

    def train_step(params: Params, opt_state: optax.OptState, scaler: jmpscale.ScalerState) -> Any:
        loss, grads, finite = jmpscale.value_and_grad(loss_fn)(scaler, params)

        def step(params: Params, opt_state: optax.OptState) -> tuple[Params, optax.OptState]:
            updates, opt_state = tx.update(cast(Any, grads), opt_state, cast(Any, params))
            return cast(Params, optax.apply_updates(cast(Any, params), updates)), opt_state

        params, opt_state = jmpscale.apply_if(finite, step, params, opt_state)
        # Unscaling in float32 makes no zero that was not one in float16: these are the zeros of the backward pass.
        record = Record(scaler.loss_scale, finite, _share_of_zeros(grads))
        return params, opt_state, jmpscale.update(scaler, finite, loss=loss), record

    return jax.jit(train_step, donate_argnums=(0, 1, 2))


def _fit(variant: Variant, target: Floats, steps: int, seed: int, report: Callable[[str, int, int], None]) -> Outcome:
    """Trains one network on the picture f32[height, width, 3] and says how it went."""
    report(variant.name, 0, steps)
    for_params, for_features = jax.random.split(jax.random.key(seed))
    features = _fourier_features(for_features, *target.shape[:2])
    tx = optax.adam(LEARNING_RATE)
    params, scaler = _init(for_params), variant.scaler()
    carry: tuple[Params, Any, jmpscale.ScalerState] = params, tx.init(cast(Any, params)), scaler
    compiled = _make_step(features, jnp.asarray(target.reshape(-1, 3)), variant.dtype, tx).lower(*carry).compile()
    records: list[Record] = []
    start = time.perf_counter()
    for done in range(1, steps + 1):
        *carry_out, record = compiled(*carry)
        carry = cast(tuple[Params, Any, jmpscale.ScalerState], tuple(carry_out))
        records.append(record)
        if done % UNTIL_NEWS == 0 or done == steps:
            jax.block_until_ready(carry)
            report(variant.name, done, steps)
    seconds = (time.perf_counter() - start) / steps
    params, _, scaler = carry
    picture = np.clip(np.asarray(_colours(params, features, variant.dtype)).reshape(target.shape), 0.0, 1.0)
    loss_scale, finite, zeros = (np.array(column) for column in zip(*jax.device_get(records), strict=True))
    return Outcome(
        variant.name,
        variant.colour,
        scaler.config.mode != "disabled",
        picture,
        float(-10 * np.log10(np.mean((picture - target) ** 2) + 1e-12)),
        seconds,
        np.append(loss_scale, np.asarray(scaler.loss_scale)),
        np.flatnonzero(~finite),
        float(zeros[-LAST_STEPS:].mean()),
    )


def _show_progress(name: str, done: int, steps: int) -> None:
    """Draws a bar on a terminal, and else writes a line at every quarter."""
    bar = "#" * (30 * done // steps)
    if sys.stderr.isatty():
        end = "\n" if done == steps else ""
        print(f"\r{name:<20} [{bar:<30}] {done:>{len(str(steps))}}/{steps}", end=end, file=sys.stderr, flush=True)
    elif done in (0, steps) or 4 * done // steps > 4 * (done - UNTIL_NEWS) // steps:
        print(f"{name}: {done} of {steps} steps", file=sys.stderr, flush=True)


def _table(outcomes: Sequence[Outcome]) -> str:
    lines = [f"{'run':<20}{'PSNR (dB)':>10}{'s/step':>9}{'final scale':>13}{'skipped':>9}{'zero gradients':>16}"]
    for run in outcomes:
        scale = f"2^{np.log2(run.loss_scale[-1]):.0f}" if run.scaled else "-"
        skipped = str(len(run.skipped)) if run.scaled else "-"
        numbers = f"{run.psnr:>10.1f}{run.seconds:>9.4f}{scale:>13}{skipped:>9}{run.zeros:>16.2%}"
        lines.append(f"{run.name:<20}{numbers}")
    return "\n".join(lines)


def _draw(target: Floats, outcomes: Sequence[Outcome]) -> Any:
    """Draws the picture, the fits, their errors and the loss scale; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    panel = 3.1 * min(max(target.shape[0] / target.shape[1], 0.35), 1.6)
    figure = cast(Any, Figure(figsize=(16.5, 2 * panel + 5.2)))
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.08)
    figure.suptitle("A neural field fitted to a photograph, four times from the same seed", fontsize=16)
    pictures, curves = figure.subfigures(2, 1, height_ratios=[2 * panel + 1.1, 3.8])
    axes = pictures.subplots(2, 1 + len(outcomes))
    _draw_pictures(target, outcomes, axes, pictures)
    left, right = curves.subplots(1, 2, width_ratios=[2.6, 1])
    _draw_loss_scale(next(run for run in outcomes if run.scaled), left)
    _draw_zeros(outcomes, right)
    return figure


def _draw_pictures(target: Floats, outcomes: Sequence[Outcome], axes: Any, figure: Any) -> None:
    errors = [255 * np.abs(run.picture - target).mean(axis=-1) for run in outcomes]
    limit = max(0.1, float(np.nanpercentile(np.stack(errors), 99)))
    axes[0, 0].imshow(target, interpolation="nearest")
    axes[0, 0].set_title(f"original, {target.shape[1]} x {target.shape[0]} pixels")
    image = None
    for column, (run, error) in enumerate(zip(outcomes, errors, strict=True), start=1):
        axes[0, column].imshow(run.picture, interpolation="nearest")
        axes[0, column].set_title(f"{run.name}: {run.psnr:.1f} dB", fontweight="bold", color=run.colour)
        image = axes[1, column].imshow(error, cmap="inferno", vmin=0, vmax=limit, interpolation="nearest")
        axes[1, column].set_title(f"its error, mean {error.mean():.2f}", fontsize=10)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    axes[1, 0].axis("off")
    bar = figure.colorbar(
        image, cax=axes[1, 0].inset_axes([0.05, 0.5, 0.9, 0.1]), orientation="horizontal", extend="max"
    )
    bar.set_label("absolute error, mean of red, green, blue\n(8-bit levels, of 255)")


def _draw_loss_scale(run: Outcome, axis: Any) -> None:
    steps = np.arange(len(run.loss_scale))
    axis.step(steps, run.loss_scale, where="post", color=run.colour, linewidth=1.8, label="loss scale")
    label = f"overflow: step skipped, {len(run.skipped)} in all"
    axis.plot(run.skipped, run.loss_scale[run.skipped], "v", color=OVERFLOW, markersize=8, label=label)
    axis.set_yscale("log", base=2)
    axis.set_ylim(run.loss_scale.min() / 2, run.loss_scale.max() * 4)
    axis.set_xlim(0, max(len(run.loss_scale) - 1, 1))
    axis.set_xlabel("step")
    axis.set_ylabel("loss scale")
    axis.set_title(f"{run.name}: the loss scale grows until the gradients overflow, and backs off")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")


def _draw_zeros(outcomes: Sequence[Outcome], axis: Any) -> None:
    shares = [100 * run.zeros for run in outcomes]
    bars = axis.barh([run.name for run in outcomes], shares, color=[run.colour for run in outcomes])
    axis.bar_label(bars, fmt="%.2f %%", padding=4)
    axis.set_title("Underflow: gradients that are exactly zero")
    axis.set_xlabel(f"share (%), mean over the last {LAST_STEPS} steps")
    axis.set_xlim(0, max(1.35 * max(shares), 0.01))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def _check_output(path: pathlib.Path) -> None:
    """Raises unless a file can be put at `path`; leaves nothing behind."""
    try:
        if _exists(path) and not (path.is_file() and os.access(path, os.W_OK)):
            raise _DemoError(f"cannot write {path}: it exists and is not a file that may be overwritten")
        temporary = _temporary(path)
        temporary.open("xb").close()
        temporary.unlink()
    except OSError as error:
        raise _DemoError(f"cannot write {path}: {_reason(error)}") from error


def _exists(path: pathlib.Path) -> bool:
    """Tells whether there is anything at `path`; other than pathlib's own, raises for a name that cannot be."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _temporary(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".jmpscale-{os.getpid()}.tmp")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return " ".join(str(error).split()) or type(error).__name__


def _save(figure: Any, path: pathlib.Path) -> None:
    """Writes the figure to `path` whole, or leaves what is there as it is."""
    temporary = _temporary(path)
    try:
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
    except OSError as error:
        raise _DemoError(f"cannot write {path}: {_reason(error)}") from error


def _sample() -> Any:
    from PIL import Image

    datasets: Any = importlib.import_module("sklearn.datasets")
    return Image.fromarray(datasets.load_sample_image("china.jpg"))


def _open(path: pathlib.Path) -> Any:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            return ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # a decoder raises whatever it likes at a damaged file
        raise _DemoError(f"cannot read {path}: {_reason(error)}") from error


def _read_picture(path: pathlib.Path | None, size: int) -> Floats:
    """Reads a picture, at most `size` pixels on its longer side, as f32[height, width, 3] in [0, 1]."""
    from PIL import Image

    image = _sample() if path is None else _open(path)
    ratio = min(1.0, size / max(image.size))
    width, height = (max(1, round(side * ratio)) for side in image.size)
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS), np.float32) / np.float32(255)


def _require_extra() -> None:
    try:
        for module in ("matplotlib.figure", "PIL.Image", "sklearn.datasets"):
            importlib.import_module(module)
    except ImportError as error:
        remedy = 'pip install "jmpscale[demo]"'
        raise _DemoError(f"{error.name or error} is missing, which the demonstration needs: {remedy}") from error


def _integer(low: int, high: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not low <= (number := int(text)) <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}, got {number}")
        return number

    return integer


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jmpscale", description="Fit a neural field to a photograph in float16, with loss scaling."
    )
    parser.add_argument("--image", type=pathlib.Path, metavar="FILE", help="photograph to fit (default: a sample)")
    parser.add_argument("--steps", type=_integer(1, 10**6), default=600, metavar="N", help="steps (default: 600)")
    size = "longer side in pixels, at most the photograph's own (default: 80)"
    parser.add_argument("--size", type=_integer(1, 4096), default=80, metavar="N", help=size)
    parser.add_argument("--seed", type=_integer(0, 2**31 - 1), default=0, metavar="N", help="seed (default: 0)")
    output = pathlib.Path("jmpscale.png")
    parser.add_argument(
        "--output", type=pathlib.Path, default=output, metavar="FILE", help="PNG (default: %(default)s)"
    )
    return parser.parse_args(argv)


def _demonstrate(options: argparse.Namespace) -> None:
    # A link stays a link: what it points to is replaced, not the link itself.
    output = pathlib.Path(os.path.realpath(options.output))
    _require_extra()
    _check_output(output)
    target = _read_picture(options.image, options.size)
    outcomes = [_fit(variant, target, options.steps, options.seed, _show_progress) for variant in VARIANTS]
    print(_table(outcomes), flush=True)  # before the file, whose failure must not cost the result
    _save(_draw(target, outcomes), output)
    print(f"wrote {options.output}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration and return the exit code: 0, 2 for what the user can put right, 130 for Ctrl-C."""
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
    sys.exit(main())
