"""Makes README's table and docs/cost.png from the figures: `python -m benchmarks.table`. Measures nothing."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "cost.png"
ROWS = {
    "functional": "**jmpscale**, functional",
    "functional, one read": "**jmpscale**, functional, and clipping by the same read",
    "in optax": "**jmpscale**, in optax",
    "jmp": "jmp",
    "Flax DynamicScale": "Flax `DynamicScale`",
    "mpx": "mpx",
    "optax apply_if_finite": "optax `apply_if_finite`",
    "bare": "neither scaled nor clipped",
}


def table(written):
    """Returns the table as Markdown: ratios to the clipped step, and the temporary memory of the last shape."""
    shapes, last = written["steps"]["figures"], list(written["steps"]["figures"])[-1]
    lines = [
        f"| to the step with clipping | {' | '.join(shapes)} | temporary memory of the last |",
        "|---|" + "---|" * (len(shapes) + 1),
    ]
    for name, title in ROWS.items():
        ratios = [f"{methods[name]['ratio']:.2f}" if name in methods else "-" for methods in shapes.values()]
        memory = f"{shapes[last][name]['temp_bytes'] / 1e6:.0f} MB" if name in shapes[last] else "-"
        lines.append(f"| {title} | {' | '.join(ratios)} | {memory} |")
    keras, own = "Keras LossScaleOptimizer", "Keras, bare"
    if all(keras in methods for methods in shapes.values()):
        ratios = [f"{methods[keras]['ms'] / methods[own]['ms']:.2f}" for methods in shapes.values()]
        lines.append(f"| Keras, to Keras's own bare step | {' | '.join(ratios)} | - |")
    if "steps" in (in_torch := written["torch"]["figures"]):
        ratios = [f"{ways['GradScaler']['ratio_to_bare']:.2f}" for ways in in_torch["steps"].values()]
        lines.append(f"| torch `GradScaler`, to torch's own bare step | {' | '.join(ratios)} | - |")
    return "\n".join(lines)


def rewrite(text, new):
    """Returns the text with what is between the two marks replaced."""
    marks = r"(<!-- benchmark -->\n).*?(\n<!-- /benchmark -->)"
    if not re.search(marks, text, flags=re.DOTALL):
        raise ValueError("README.md needs a line <!-- benchmark -->, and after it a line <!-- /benchmark -->")
    return re.sub(marks, lambda found: found[1] + new + found[2], text, flags=re.DOTALL)


def draw(written, path):
    """Draws the ratios by method, and what becomes of the functional route's ratio as things grow."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained", width_ratios=(3, 2))
    _draw_methods(left, written["steps"]["figures"])
    _draw_growth(
        right, {name: written[name]["figures"] for name in ("leaves", "parameters", "devices", "micro-batches")}
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    about = written["steps"]["about"]
    figure.suptitle(f"AdamW, float32, {about['cores']} cores of {about['cpu']}, JAX {about['versions']['jax']}")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_methods(axes, shapes):
    names = [name for name in next(iter(shapes.values())) if name != "clipped"][::-1]
    for i, (shape, methods) in enumerate(shapes.items()):
        known = [(row, methods[name]) for row, name in enumerate(names) if name in methods]
        middle = [numbers["ratio"] for _, numbers in known]
        low, high = zip(*(numbers["ratio_quartiles"] for _, numbers in known), strict=True)
        spread = [[m - q for m, q in zip(middle, low, strict=True)], [q - m for m, q in zip(middle, high, strict=True)]]
        axes.errorbar(middle, [row + 0.2 * (1 - i) for row, _ in known], xerr=spread, fmt="o", capsize=2, label=shape)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(
        yticks=range(len(names)), yticklabels=names, xlabel="time, to the step with clipping: median and quartiles"
    )


def _draw_growth(axes, parts):
    for name, by_size in parts.items():
        known = {float(size): figures["functional"] for size, figures in by_size.items() if "functional" in figures}
        known = {size: numbers for size, numbers in known.items() if "ratio" in numbers}
        if known:
            smallest, largest = min(known), max(known)
            label = f"{name}, {smallest:g} to {largest:g}"
            axes.plot([size / smallest for size in known], [n["ratio"] for n in known.values()], "o-", label=label)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(
        xscale="log", xlabel="how many times as many", ylabel="functional, to the step with clipping", ylim=(0, None)
    )


def main():
    """Rewrites README's table, draws the picture, and prints the table."""
    written = json.loads(RESULTS.read_text())
    new = table(written)
    print(new)
    draw(written, PICTURE)
    README.write_text(rewrite(README.read_text(), new))


if __name__ == "__main__":
    main()
