"""Writes the tables and figures of the pages from the results of earlier runs: `python -m benchmarks.table`.

Two comments on a page delimit each table. A sentence about the runs follows the table. A comment behind a number in a
sentence names a figure of `benchmarks/figures.py`.
"""

import re

from benchmarks import cards, figures, record

DOCS = record.ROOT / "docs"
STUDIES = record.ROOT / "benchmarks" / "studies"
WITH_TABLES = ("batch_size", "bfloat16", "calibration", "rounding")  # the studies with a table on a page
VARIANTS = ("float32", "float16", "float16, jmpscale")  # of the runs of a study
FEW = 4  # the largest number of steps with equal cells that have a row each
FILES = ("autocast", "compilers", "cpu", "diagnosis", "float16_sums", "gpu", "tracing")
STEPS = {  # the name of the step, and whether it clips
    "clipped": ("clipped step", "yes"),
    "bare": ("bare step", "no"),
    "functional": ("functional API", "no"),
    "functional, norm as check": ("functional API, `all_finite(norm)`", "yes"),
    "optax wrapper": ("optax wrapper", "no"),
    "optax wrapper, max_norm": ("optax wrapper, `max_norm`", "yes"),
    "scaled_backward": ("`scaled_backward`, static scale, optax wrapper", "no"),
    "jmp": ("jmp", "no"),
    "Flax DynamicScale": ("Flax `DynamicScale`", "no"),
    "mpx": ("mpx", "no"),
    "optax apply_if_finite": ("optax `apply_if_finite`", "no"),
}
CPU = {
    "16 layers of width 512": "16 layers of 512, batch 256",
    "50 layers of width 256": "50 of 256, batch 32",
    "16 layers of width 1024": "16 of 1024, batch 32",
}
GPU = {"8 layers of width 2048": "8 of 2048, batch 32, float16", "language model": "language model, float16"}
COMPILED = {
    "H100, 8 layers of width 2048": "h100, 1 devices, 8 of 2048, batch 32, adamw, float16, gradients in float32",
    "H100, language model": "h100, 1 devices, language model, adamw, float16, gradients in float32",
    "H100, embedding": "h100, 1 devices, embedding of 32,000 x 1,024, adamw, float32, gradients in float32",
    "TPU v5e, 2 layers of width 8192": "tpu-v5e, 1 devices, 2 of 8192, batch 32, adamw, bfloat16, gradients in float32",
}
DEVICES = {"h100": "H100", "t4": "T4", "v100": "V100", "tpu-v5e": "TPU v5e"}
COMPARED = ("moved_bytes", "temp_bytes")
HALF, IN_FLOAT32 = "autocast, blocks return half", "autocast, float32 results"
NONE = "-"  # not measured, or unknown
TOO_LARGE = 10  # an error of which the pages do not give the size
RULES = {  # of benchmarks.studies.calibration: the column, the record on which the rules are replayed, and the figure
    "skips, photo from 2^16": ("photo, from 2^16", "skipped"),
    "skips, text from 2^32": ("text, from 2^32", "skipped"),
    "skips, text with spikes": ("text, spikes, from 2^16", "skipped"),
    "underflow, photo": ("photo, from 2^16", "underflow"),
    "steps to recover from a collapse": ("text, collapse, from 2^16", "right again after step 4030"),
}
NEVER = 10_000  # steps
AUTOCAST = [  # the model as on the page, the name of the result, and the variant
    ("GPT-2 small", "h100, GPT-2 small", "autocast"),
    ("GPT-2 small, float32 results", "h100, GPT-2 small", IN_FLOAT32),
    ("GPT-2 small, scan over layers", "h100, GPT-2 small, scan", "autocast"),
    ("GPT-2 small, scan with `dots_saveable`", "h100, GPT-2 small, scan, dots saved", "autocast"),
    ("ResNet-34", "h100, ResNet-34", "autocast"),
    ("ResNet-34, blocks return half precision", "h100, ResNet-34", HALF),
    ("U-Net", "h100, U-Net", "autocast"),
    ("U-Net, blocks return half precision", "h100, U-Net", HALF),
    ("GPT-2 with 2 layers", "t4, GPT-2 small, 2 layers", "autocast"),
    ("U-Net", "t4, U-Net", "autocast"),
    ("U-Net, blocks return half precision", "t4, U-Net", HALF),
    ("GPT-2 with 2 layers", "v100, GPT-2 small, 2 layers", "autocast"),
    ("GPT-2 with 2 layers, float32 results", "v100, GPT-2 small, 2 layers", IN_FLOAT32),
    ("GPT-2 with 2 layers", "tpu-v5e, GPT-2 small, 2 layers", "autocast"),
]


def read_results():
    """Returns the results by the names of their files. A file that does not exist has no results."""
    return {name: record.read(record.RESULTS / f"{name}.json") for name in FILES}


def pages(results):
    """Returns the tables of each page as Markdown, by the path of the page and the name of the table."""
    compiled = results["compilers"]
    figures = {name: result["figures"] for name, result in compiled.items()}
    costs = {
        "accelerators": cards.section(cards.read()),
        "gpu": _timed(GPU, results["gpu"].get("large"), _time),
        "bytes": _steps(COMPILED, figures, _moved) + _runs([compiled[name] for name in COMPILED.values()]),
        "autocast": _autocast(results["autocast"]),
    }
    studies = {name: record.read(STUDIES / f"{name}.json") for name in WITH_TABLES}
    return {
        DOCS / "costs.md": costs,
        DOCS / "how_it_works.md": {"batches": _batches(studies["batch_size"])},
        DOCS / "bfloat16.md": {"bfloat16": _bfloat16(studies["bfloat16"])},
        STUDIES / "README.md": {
            "rules": _rules(studies["calibration"]),
            "rounding": _rounding(studies["rounding"]),
        },
    }


# --- cells, of the figures of all steps of one column


def _time(figures, name):
    return f"{figures[name]['ms']:#.3g} ms, {figures[name]['ratio']:.3f}"


def _moved(figures, name):
    return f"{figures[name]['moved_bytes'] / figures['clipped']['moved_bytes']:.3f}"


# --- tables


def _steps(columns, figures, cell):
    """Returns a table with a row for each step and a cell for each column; most steps may share the last row."""
    rows = {}  # the titles of the steps, by their cells
    for name, titles in STEPS.items():
        cells = tuple(cell(figures[key], name) if name in figures[key] else NONE for key in columns.values())
        if set(cells) != {NONE}:
            rows.setdefault(cells, []).append(titles)
    lines = []
    for cells, titles in sorted(rows.items(), key=lambda row: len(row[1]) > FEW):
        shown = titles if len(titles) <= FEW else [("all other steps", "")]
        lines += [[*title, *cells] for title in shown]
    return _table(["step", "clips", *columns], lines)


def _timed(columns, result, cell):
    """Returns the table of one run with its record, or a sentence if the run is missing."""
    if result is None:
        return "The present version has not been timed yet."
    return _steps(columns, result["figures"], cell) + _run(result)


def _autocast(results):
    lines = []
    for title, name, variant in AUTOCAST:
        figures = results[name]["figures"]
        ours, float32 = (_ratios(figures[x], figures["cast by hand"]) for x in (variant, "float32"))
        lines.append([DEVICES[name.partition(",")[0]], title, *ours, float32[0]])
    head = ["device", "model", "bytes moved", "temporary memory", "bytes moved in float32"]
    return _table(head, lines) + _runs([results[name] for _, name, _ in AUTOCAST])


def _ratios(figures, baseline):
    return [f"{figures[x] / baseline[x]:.2f}" if figures[x] and baseline[x] else NONE for x in COMPARED]


def first_seed(study, key):
    """Returns the runs of a study with its first seed, by the value of `key` and the variant."""
    return {(x[key], x["run"]): x for x in study["runs"] if x["seed"] == 0}


def _batches(study):
    """Returns the losses of the first seed, and the skips, by the number by which the loss is divided."""
    found = first_seed(study, "batch tokens")
    lines = []
    for tokens in sorted({tokens for tokens, _ in found}):
        losses = [f"{found[tokens, name]['loss']:.3f}" for name in VARIANTS]
        zero = f"{found[tokens, 'float16']['zero gradients']:.1%}"
        lines.append([f"2^{tokens.bit_length() - 1}", *losses, zero, str(found[tokens, VARIANTS[2]]["skipped"])])
    scaled = ["float16 with jmpscale", "zeros in the gradients, float16", "steps that jmpscale skips"]
    return _table(["loss divided by", "float32", "float16", *scaled], lines) + _run(study, is_timed=False)


def _bfloat16(study):
    """Returns the losses of the programs, and their errors at the first step and after training."""
    lines = []
    for program in study["programs"]:
        errors = [_error(program[f"{when} error"]) for when in ("first", "late")]
        losses = [f"{program[f'{dtype} loss']:.2g}" for dtype in ("bfloat16", "float32")]
        lines.append([program["program"], *losses, *errors])
    head = ["in bfloat16", "loss", "loss in float32", "error, first step", "error, after training"]
    return _table(head, lines) + _run(study, is_timed=False)


def _error(error):
    return f"over {TOO_LARGE:.0%}" if error > TOO_LARGE else f"{error:.0%}"


def _rules(study):
    """Returns the skips, the underflow and the steps to recover with each rule that adjusts the scale."""
    replayed, lines = study["replayed"], []
    for rule in next(iter(replayed.values())):
        cells = [_rule_cell(figure, replayed[task][rule][figure]) for task, figure in RULES.values()]
        lines.append([f"`{rule}`", *cells])
    return _table(["rule", *RULES], lines) + _run(study, is_timed=False)


def _rule_cell(figure, value):
    if figure == "underflow":
        return f"{value:.2%}"
    return "never" if value == NEVER else str(value)


def _rounding(study):
    """Returns the error of the first gradients, and the losses after training in float32 and in half precision."""
    lines = [
        [name, f"{100 * x['gradient_error']:.3g}%", f"{x['loss, float32']:.2g}", f"{x['loss, half precision']:.2g}"]
        for name, x in study["figures"].items()
    ]
    head = ["program", "error", "loss, trained in float32", "loss, trained in half precision"]
    return _table(head, lines) + _run(study, is_timed=False)


def _table(head, lines):
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |".replace("| --- ", "|---").replace("--- |", "---|") for cells in rows)


# --- records


def _run(result, is_timed=True):
    """Returns the record of a measurement as a sentence after its table; the load of the machine changes only times."""
    about = result["about"]
    load = f", load {about['load']} at the start" if is_timed else ""
    machine = f"{about['device']}, {about['cpu']}, {about['cores']} cores{load}"
    return f"\n\nMeasured on {about['date']} by `{about['command']}`: {machine}, {_libraries(about['versions'])}."


def _runs(results):
    """Returns the records of compilations as a sentence after their table."""
    dates = sorted({result["about"]["date"] for result in results})
    shown = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    versions = sorted({_libraries(result["about"]["versions"]) for result in results})
    # Some environments have only a part of the libraries, in the same versions.
    versions = [x for x in versions if not any(other != x and other.startswith(x) for other in versions)]
    return f"\n\nCompiled on {shown} with {'; '.join(versions)}."


def _libraries(versions):
    names = {"jax": "JAX", "optax": "optax", "flax": "Flax", "jmp": "jmp", "mixed-precision-for-jax": "mpx"}
    return ", ".join(f"{title} {versions[name]}" for name, title in names.items() if versions.get(name))


def paths():
    """Returns the files with tables or figures: all pages of the documentation, and two files named README.md."""
    return [record.ROOT / "README.md", STUDIES / "README.md", *sorted(DOCS.rglob("*.md"))]


def rewrite(text, new, known):
    """Returns a page with each table between its two marks replaced, and each figure that a comment names."""
    for name, table in new.items():
        marks = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
        if not re.search(marks, text, flags=re.DOTALL):
            raise ValueError(f"the page needs a line <!-- {name} -->, and after it a line <!-- /{name} -->")
        text = re.sub(marks, lambda found, table=table: found[1] + table + found[2], text, flags=re.DOTALL)
    return figures.rewrite(text, known)


def main():
    """Rewrites the tables and figures of the pages, and prints the tables."""
    results = read_results()
    tables, known = pages(results), figures.figures(results)
    for path in paths():
        new = tables.get(path, {})
        print(*new.values(), sep="\n\n")
        path.write_text(rewrite(path.read_text(), new, known))


if __name__ == "__main__":
    main()
