"""Makes the tables of docs/costs.md and its pictures from the figures: `python -m benchmarks.table`. Measures nothing.

Every ratio is to the same step with `optax.clip_by_global_norm`: on the same machine and in the same round, or compiled
for the same devices.
"""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
COMPILED = ROOT / "benchmarks" / "results" / "compilers.json"
PAGE, PICTURE, COMPILERS_PICTURE = (
    ROOT / "docs" / "costs.md",
    ROOT / "docs" / "cost.png",
    ROOT / "docs" / "compilers.png",
)
ROWS = {  # what the step is called, and whether it clips
    "clipped": ("clipped, neither scaled nor checked", "yes"),
    "bare": ("neither scaled nor checked", "no"),
    "functional": ("**jmpscale**, functional", "no"),
    "functional, one read": ("**jmpscale**, functional, the norm as the check", "yes"),
    "functional, clipping": ("**jmpscale**, functional, clipping in the chain", "yes"),
    "in optax": ("**jmpscale**, in optax", "no"),
    "in optax, max_norm": ("**jmpscale**, in optax, `max_norm`", "yes"),
    "in optax, clipping": ("**jmpscale**, in optax, clipping in the chain", "yes"),
    "jmp": ("jmp", "no"),
    "Flax DynamicScale": ("Flax `DynamicScale`", "no"),
    "mpx": ("mpx", "no"),
    "optax apply_if_finite": ("optax `apply_if_finite`, which scales nothing", "no"),
    "Keras, bare": ("Keras's own AdamW, neither scaled nor checked", "no"),
    "Keras LossScaleOptimizer": ("Keras `LossScaleOptimizer`", "no"),
}
H100 = "h100, {} devices, {}, {}, float16, gradients in float32"
V5E = "tpu-v5e, {} devices, {}, {}, bfloat16, gradients in float32"
V5P = "tpu-v5p, {} devices, {}, {}, bfloat16, gradients in float32"
LARGE = {H100: "8 of 2048, batch 32", V5E: "2 of 8192, batch 32"}
SHARDED = {H100: "6 of 2048, batch 256", V5E: "4 of 8192, batch 256", V5P: "4 of 8192, batch 256"}
DECODER = "decoder of 6.6 billion"


def tables(measured, compiled):
    """Returns each table as Markdown, by its name."""
    of = {name: part["figures"] for name, part in compiled.items()}
    last = list(measured["steps"]["figures"].values())[-1]  # the same network as that of the other optimizers
    return {
        "steps": steps(measured["steps"]["figures"], of) + "\n" + torch(measured["torch"]["figures"]),
        "optimizers": optimizers({"adamw": last} | measured["varied"]["figures"], of),
        "networks": networks(of),
        "devices": devices(of),
        "decoder": decoder(of),
    }


def steps(shapes, of):
    """All steps, beside each other: time, and what the compilers tell."""
    last = list(shapes)[-1]
    heads = [f"CPU, time: {shape}" for shape in shapes] + ["CPU, memory of the last"]
    for device in ("H100", "TPU v5e"):
        heads += [f"{device}, traffic", f"{device}, memory"]
    lines = [_row("to the step that clips", "clips", *heads), _rule(len(heads) + 2)]
    compiled = [of.get(name.format(1, shape, "adamw"), {}) for name, shape in LARGE.items()]
    for name, (title, clips) in ROWS.items():
        cells = [_ratio(methods.get(name, {}), "ratio") for methods in shapes.values()]
        cells.append(_megabytes(shapes[last].get(name, {})))
        for figures in compiled:
            cells += [_ratio(figures.get(name, {}), "traffic_ratio", 3), _megabytes(figures.get(name, {}))]
        lines.append(_row(title, clips, *cells))
    return "\n".join(lines)


def torch(figures):
    """One line for what has another framework's step for its denominator."""
    if "steps" not in figures:
        return ""
    ratios = " / ".join(f"{ways['GradScaler']['ratio_to_bare']:.2f}" for ways in figures["steps"].values())
    return f"\ntorch's `GradScaler` on the same CPU and shapes, to torch's own step without it: {ratios}."


def optimizers(varied, of):
    """Each optimizer, by the four ways to scale: time on the CPU, traffic on H100 and TPU."""
    names = ("functional", "functional, one read", "in optax", "in optax, max_norm", "jmp")
    lines = [_row("to the step that clips", "", *map(_called, names)), _rule(len(names) + 2)]
    for title, kind in (("CPU, time", None), ("H100, traffic", H100), ("TPU v5e, traffic", V5E)):
        for optimizer in ("sgd", "momentum", "adamw", "adafactor"):
            figures = of.get(kind.format(1, LARGE[kind], optimizer), {}) if kind else varied.get(optimizer, {})
            key, digits = ("traffic_ratio", 3) if kind else ("ratio", 2)
            lines.append(_row(title, optimizer, *(_ratio(figures.get(name, {}), key, digits) for name in names)))
    return "\n".join(lines)


def networks(of):
    """Traffic, memory and kernels of GPT-2 small, of the benchmark's own networks, and with gradients in 16 bits."""
    lines = [_row("", "step", "traffic", "memory", "kernels", "copies"), _rule(6)]
    for title, kind in (("H100", H100), ("TPU v5e", V5E)):
        for shape in ("GPT-2 small", "16 layers of 512, batch 256", "100 of 256, batch 32", "16 of 1024, batch 32"):
            for name, x in of.get(kind.format(1, shape, "adamw"), {}).items():
                lines.append(_network(f"{title}, {shape}", name, x))
        for name, x in of.get(_in_16_bits(kind.format(1, LARGE[kind], "adamw")), {}).items():
            lines.append(_network(f"{title}, {LARGE[kind]}, gradients in 16 bits", name, x))
    return "\n".join(lines)


def _network(title, name, x):
    cells = [_ratio(x, "traffic_ratio", 3), _megabytes(x), x.get("kernels", "-"), x.get("copies", "-")]
    return _row(title, _called(name), *cells)


def _in_16_bits(name):
    computed = name.split(", ")[-2]
    return name.replace("gradients in float32", f"gradients in {computed}")


def devices(of):
    """What a sharded state becomes on 8 and on 1,024 devices."""
    heads = ("traffic", "memory", "lost shardings", "all-gathers", "small all-reduces")
    lines = [_row("", "step", *heads), _rule(len(heads) + 2)]
    known = (("8 H100", H100, 8), ("1,024 H100", H100, 1024), ("8 TPU v5e", V5E, 8), ("1,024 TPU v5p", V5P, 1024))
    for title, kind, number in known:
        figures = of.get(kind.format(number, SHARDED[kind], "adamw"), {})
        for name in ("clipped", "functional", "in optax", "in optax, max_norm", "functional, branch", "jmp"):
            if "traffic" in (x := figures.get(name, {})):
                gathers, reduced = x["collectives"].get("all-gather", 0), x["small_all_reduces"]
                cells = [_ratio(x, "moved_bytes_ratio", 3), _megabytes(x), f"{x['lost']} of {x['sharded']}"]
                lines.append(_row(title, _called(name), *cells, gathers, reduced))
    return "\n".join(lines)


def decoder(of):
    """The large model: memory of a device, and what its devices tell each other."""
    heads = ("arguments of a device", "temporary", "all-gathers", "all-reduces", "lost shardings", "compiled in")
    lines = [_row("", "step", *heads), _rule(len(heads) + 2)]
    for title, name in (
        ("64 H100", H100.format(64, DECODER, "adamw")),
        ("256 TPU v5p", V5P.format(256, DECODER, "adamw")),
    ):
        for method, x in of.get(name, {}).items():
            if "traffic" in x:
                gigabytes = [f"{x[key] / 1e9:.2f} GB" for key in ("argument_bytes", "temp_bytes")]
                counts = [x["collectives"].get(kind, 0) for kind in ("all-gather", "all-reduce")]
                cells = [*gigabytes, *counts, f"{x['lost']} of {x['sharded']}", f"{x['compile_cpu_s']:.0f} s"]
                lines.append(_row(title, _called(method), *cells))
    return "\n".join(lines)


def _called(name):
    if name == "functional, branch":
        return "functional, a branch in the place of `apply_if`"
    return ROWS[name][0]


def _row(*cells):
    return f"| {' | '.join(str(cell) for cell in cells)} |".replace("| --- |", "|---|").replace("| ---", "|---")


def _rule(columns):
    return "|" + columns * "---|"


def _ratio(figures, key, digits=2):
    return f"{figures[key]:.{digits}f}" if key in figures else "-"


def _megabytes(figures):
    return f"{figures['temp_bytes'] / 1e6:.0f} MB" if "temp_bytes" in figures else "-"


def rewrite(text, new):
    """Returns the text with what is between each table's two marks replaced."""
    for name, table in new.items():
        marks = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
        if not re.search(marks, text, flags=re.DOTALL):
            raise ValueError(f"the page needs a line <!-- {name} -->, and after it a line <!-- /{name} -->")
        text = re.sub(marks, lambda found, table=table: found[1] + table + found[2], text, flags=re.DOTALL)
    return text


def draw(written, path):
    """Draws the ratios by method, and what becomes of the functional route's ratio as things grow."""
    figure, (left, right) = _figure((12, 5), width_ratios=(3, 2))
    _draw_methods(left, written["steps"]["figures"])
    _draw_growth(
        right, {name: written[name]["figures"] for name in ("leaves", "parameters", "devices", "micro-batches")}
    )
    about = written["steps"]["about"]
    figure.suptitle(f"AdamW, float32, {about['cores']} cores of {about['cpu']}, JAX {about['versions']['jax']}")
    _save(figure, (left, right), path)


def draw_compiled(compiled, path):
    """Draws the traffic and the temporary memory of all steps, as the compilers for H100 and TPU tell."""
    figure, (left, right) = _figure((12, 5), sharey=True)
    names = [*(name for name in ROWS if not name.startswith("Keras")), "functional, branch"][::-1]
    for i, (title, kind) in enumerate((("H100", H100), ("TPU v5e", V5E))):
        figures = compiled[kind.format(1, LARGE[kind], "adamw")]["figures"]
        known = [(row + 0.3 * (0.5 - i), figures[name]) for row, name in enumerate(names) if name in figures]
        rows, floor = [row for row, _ in known], figures["clipped"]["temp_bytes"]
        label = f"{title}, {LARGE[kind]}"
        left.plot([x["traffic_ratio"] for _, x in known], rows, "o", label=label)
        right.plot([x["temp_bytes"] / floor for _, x in known], rows, "o", label=label)
    left.set(yticks=range(len(names)), yticklabels=names, xlabel="bytes read and written, to the step with clipping")
    right.set(xlabel="temporary memory, to the step with clipping")
    for axes in (left, right):
        axes.axvline(1, color="black", linewidth=1)
    about = compiled[H100.format(1, LARGE[H100], "adamw")]["about"]
    figure.suptitle(f"AdamW, 16-bit arithmetic, one device, as compiled by XLA, JAX {about['versions']['jax']}")
    _save(figure, (left, right), path)


def _figure(size, **options):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, 2, figsize=size, layout="constrained", **options)


def _save(figure, panels, path):
    import matplotlib.pyplot as plt

    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
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
    """Rewrites the page's tables, draws the pictures, and prints the tables."""
    measured, compiled = (json.loads(path.read_text()) for path in (RESULTS, COMPILED))
    new = tables(measured, compiled)
    print(*new.values(), sep="\n\n")
    draw(measured, PICTURE)
    draw_compiled(compiled, COMPILERS_PICTURE)
    PAGE.write_text(rewrite(PAGE.read_text(), new))


if __name__ == "__main__":
    main()
