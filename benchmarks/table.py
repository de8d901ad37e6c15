"""Writes the tables of docs/costs.md from the results of earlier runs: `python -m benchmarks.table`.

Each cell has two ratios: to the same step with `optax.clip_by_global_norm`, on the same machine and in the same round,
or compiled for the same device; and, in parentheses, to the step that neither clips nor scales the loss.
"""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "costs.md"
ROWS = {  # the name of the step, and whether it clips
    "clipped": ("clipped step", "yes"),
    "bare": ("bare step", "no"),
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
CPU = {
    "16 layers of width 512": "16 layers of 512, batch 256",
    "100 of width 256": "100 of 256, batch 32",
    "16 of width 1024": "16 of 1024, batch 32",
}
GPU = {"8 layers of width 2048": "8 of 2048, batch 32, float16", "GPT-2": "language model, float16"}
COMPILED = {
    "H100": "h100, 1 devices, 8 of 2048, batch 32, adamw, float16, gradients in float32",
    "H100, embedding": "h100, 1 devices, embedding of 32,000 x 1,024, adamw, float32, gradients in float32",
    "TPU v5e": "tpu-v5e, 1 devices, 2 of 8192, batch 32, adamw, bfloat16, gradients in float32",
}


def read_results():
    """Returns the arguments of `tables`."""
    return [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("cpu", "gpu", "compilers")]


def tables(cpu, gpu, compilers):
    """Returns the tables as Markdown, by name."""
    compiled = {name: result["figures"] for name, result in compilers.items()}
    return {
        "cpu": _table(CPU, cpu["steps"]["figures"], "ratio", digits=2),
        "gpu": _table(GPU, gpu["large"]["figures"], "ratio", digits=3),
        "bytes": _table(COMPILED, compiled, "traffic_ratio", digits=3),
    }


def _table(columns, figures, ratio, digits):
    """Returns a table with the ratios of each step in each column.

    Steps without any ratio are omitted. Steps with the same ratios share a row.
    """
    rows = {}  # the titles of the steps, by their ratios
    for name, titles in ROWS.items():
        cells = tuple(_cell(figures[key], name, ratio, digits) for key in columns.values())
        if any(cells):
            rows.setdefault(cells, []).append(titles)
    lines = [_row(["step", "clips", *columns]), "|" + (2 + len(columns)) * "---|"]
    for cells, titles in sorted(rows.items(), key=lambda row: len(row[1]) > 1):
        shown = titles[0] if len(titles) == 1 else ("all other steps", "")
        lines.append(_row([*shown, *cells]))
    return "\n".join(lines)


def _cell(figures, name, ratio, digits):
    if name not in figures:
        return ""
    to_clipped = figures[name][ratio]
    to_bare = f" ({to_clipped / figures['bare'][ratio]:.{digits}f})" if "bare" in figures else ""
    return f"{to_clipped:.{digits}f}{to_bare}"


def _row(cells):
    return f"| {' | '.join(cells)} |"


def rewrite(text, new):
    """Returns the page with each table between its two marks replaced."""
    for name, table in new.items():
        marks = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
        if not re.search(marks, text, flags=re.DOTALL):
            raise ValueError(f"the page needs a line <!-- {name} -->, and after it a line <!-- /{name} -->")
        text = re.sub(marks, lambda found, table=table: found[1] + table + found[2], text, flags=re.DOTALL)
    return text


def main():
    """Rewrites the page's tables, and prints them."""
    new = tables(*read_results())
    print(*new.values(), sep="\n\n")
    PAGE.write_text(rewrite(PAGE.read_text(), new))


if __name__ == "__main__":
    main()
