"""Writes the table of docs/costs.md from the results of earlier runs: `python -m benchmarks.table`.

Each ratio is to the same step with `optax.clip_by_global_norm`: on the same machine and in the same round, or compiled
for the same device.
"""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "costs.md"
ROWS = {  # the name of the step, and whether it clips
    "clipped": ("clipping only", "yes"),
    "bare": ("neither clipping nor loss scaling", "no"),
    "functional": ("functional API", "no"),
    "functional, norm as check": ("functional API, `all_finite(norm)`", "yes"),
    "optax wrapper": ("optax wrapper", "no"),
    "optax wrapper, max_norm": ("optax wrapper, `max_norm`", "yes"),
    "loss_scaled": ("`loss_scaled`, optax wrapper", "no"),
    "jmp": ("jmp", "no"),
    "Flax DynamicScale": ("Flax `DynamicScale`", "no"),
    "mpx": ("mpx", "no"),
    "optax apply_if_finite": ("optax `apply_if_finite`", "no"),
}
TIMED = {"H100": "8 of 2048, batch 32, float16", "H100, GPT-2": "language model, float16"}
COMPILED = {
    "bytes: H100": "h100, 1 devices, 8 of 2048, batch 32, adamw, float16, gradients in float32",
    "bytes: H100, embedding": "h100, 1 devices, embedding of 32,000 x 1,024, adamw, float32, gradients in float32",
    "bytes: TPU v5e": "tpu-v5e, 1 devices, 2 of 8192, batch 32, adamw, bfloat16, gradients in float32",
}
MARKS = r"(<!-- steps -->\n).*?(\n<!-- /steps -->)"


def read_results():
    """Returns the arguments of `table`."""
    return [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("cpu", "gpu", "compilers")]


def table(cpu, gpu, compilers):
    """Returns the table as Markdown."""
    on_cpu = cpu["steps"]["figures"].values()
    on_gpu = [gpu["large"]["figures"][name] for name in TIMED.values()]
    compiled = [compilers[name]["figures"] for name in COMPILED.values()]
    heads = ["step", "clips", "time: CPU", *(f"time: {name}" for name in TIMED), *COMPILED]
    lines = [_row(heads), "|" + len(heads) * "---|"]
    for name, (title, clips) in ROWS.items():
        times = ", ".join(f"{figures[name]['ratio']:.2f}" for figures in on_cpu if name in figures) or "-"
        ratios = [_cell(figures, name, "ratio") for figures in on_gpu]
        traffic = [_cell(figures, name, "traffic_ratio") for figures in compiled]
        lines.append(_row([title, clips, times, *ratios, *traffic]))
    return "\n".join(lines)


def _cell(figures, name, ratio):
    return f"{figures[name][ratio]:.3f}" if name in figures else "-"


def _row(cells):
    return f"| {' | '.join(cells)} |"


def rewrite(text, new):
    """Returns the page with the table between its two marks replaced."""
    if not re.search(MARKS, text, flags=re.DOTALL):
        raise ValueError("the page needs a line <!-- steps -->, and after it a line <!-- /steps -->")
    return re.sub(MARKS, lambda found: found[1] + new + found[2], text, flags=re.DOTALL)


def main():
    """Rewrites the page's table, and prints it."""
    new = table(*read_results())
    print(new)
    PAGE.write_text(rewrite(PAGE.read_text(), new))


if __name__ == "__main__":
    main()
