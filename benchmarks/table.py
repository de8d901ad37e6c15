"""Writes the table of docs/costs.md from the measured figures: `python -m benchmarks.table`. Measures nothing.

Each ratio is to the same step with `optax.clip_by_global_norm`: on the same machine and in the same round, or compiled
for the same device.
"""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
COMPILED = ROOT / "benchmarks" / "results" / "compilers.json"
PAGE = ROOT / "docs" / "costs.md"
ROWS = {  # the name of the step, and whether it clips
    "clipped": ("clipping only", "yes"),
    "functional": ("functional API", "no"),
    "functional, norm as check": ("functional API, the norm as the check", "yes"),
    "optax wrapper": ("optax wrapper", "no"),
    "optax wrapper, max_norm": ("optax wrapper, `max_norm`", "yes"),
    "loss_scaled": ("`loss_scaled`, optax wrapper", "no"),
    "jmp": ("jmp", "no"),
    "Flax DynamicScale": ("Flax `DynamicScale`", "no"),
    "mpx": ("mpx", "no"),
    "optax apply_if_finite": ("optax `apply_if_finite`", "no"),
}
DEVICES = {
    "H100": "h100, 1 devices, 8 of 2048, batch 32, adamw, float16, gradients in float32",
    "H100, embedding": "h100, 1 devices, embedding of 32,000 x 1,024, adamw, float32, gradients in float32",
    "TPU v5e": "tpu-v5e, 1 devices, 2 of 8192, batch 32, adamw, bfloat16, gradients in float32",
}
MARKS = r"(<!-- steps -->\n).*?(\n<!-- /steps -->)"


def table(measured, compiled):
    """Returns the table as Markdown."""
    shapes = list(measured["steps"]["figures"].values())
    compiled = [compiled[name]["figures"] for name in DEVICES.values()]
    heads = ["step", "clips", "CPU time", *(f"{name}: bytes, temporary" for name in DEVICES)]
    lines = [_row(heads), "|" + len(heads) * "---|"]
    for name, (title, clips) in ROWS.items():
        times = " / ".join(f"{methods[name]['ratio']:.2f}" for methods in shapes)
        lines.append(_row([title, clips, times, *(_memory(figures.get(name)) for figures in compiled)]))
    return "\n".join(lines)


def _memory(figures):
    return f"{figures['traffic_ratio']:.3f}, {figures['temp_bytes'] / 1e6:.0f} MB" if figures else "-"


def _row(cells):
    return f"| {' | '.join(cells)} |"


def rewrite(text, new):
    """Returns the page with the table between its two marks replaced."""
    if not re.search(MARKS, text, flags=re.DOTALL):
        raise ValueError("the page needs a line <!-- steps -->, and after it a line <!-- /steps -->")
    return re.sub(MARKS, lambda found: found[1] + new + found[2], text, flags=re.DOTALL)


def main():
    """Rewrites the page's table, and prints it."""
    new = table(*(json.loads(path.read_text()) for path in (RESULTS, COMPILED)))
    print(new)
    PAGE.write_text(rewrite(PAGE.read_text(), new))


if __name__ == "__main__":
    main()
