"""The tables of `benchmarks.accelerator`, for the run in progress and for the records of several devices."""

import numpy as np

from benchmarks import columns, record

FOLDER = record.RESULTS / "accelerators"
NONE = "-"  # not measured, or unknown
SECTION = """\
### By device

Each step is compared to float32 in JAX's default precision (TF32 on NVIDIA GPUs since Ampere), and to its yardstick:
the same casts by hand without loss scaling, or, for `autocast` and JAX's own precisions, casts by hand with the same
loss scaling. Beside each ratio of times is the ratio of the bytes that the compiled steps move. The error of the
gradients is relative to float32 with highest precision. The memory is what the compiled step needs: its arguments and
its temporary memory.
"""
HEAD = ("time", "to float32", "by bytes", "to its yardstick", "by bytes", "memory", "error of gradients")


def read():
    """Returns the record of each device by its name. A quick run counts only if the device has no other record."""
    found = [record.read(path) for path in sorted(FOLDER.glob("*.json"))]
    return {x["about"]["device"]: x for x in sorted(found, key=lambda x: not x["about"]["quick"])}


def tests(found):
    """Returns one sentence about the tests."""
    if "omitted" in found:
        return f"the tests were omitted ({found['omitted']})"
    failed = f": {', '.join(found['failures'])}" if found["failures"] else ""
    return f"{found['passed']} tests passed, {len(found['failures'])} failed{failed}, {len(found['skipped'])} skipped"


def one(results, name):
    """Returns the table of one row of one device, as Markdown."""
    row = results["rows"][name]
    if not row["columns"]:
        return f"omitted: {row.get('omitted', 'not measured')}"
    head = ["step", "losses at the end"] if "steps" in row else ["step", *HEAD]
    return _table(head, [[column, *_cells(row, column, head)] for column in _in_order([row])])


def side_by_side(records):
    """Returns a table for each model, with the devices beside each other, as Markdown."""
    names = list(dict.fromkeys(name for found in records.values() for name in found["rows"]))
    parts = [_compared(name, [x for x in records.values() if name in x["rows"]]) for name in names]
    return "\n\n".join([*parts, *map(_about, records.values())])


def section(records):
    """Returns the section of a page that has the tables and says how to read them, or nothing without a record."""
    return f"{SECTION}\n{side_by_side(records)}" if records else ""


def ratio(row, column, other, figure="seconds"):
    """Returns the median ratio of the times of two columns in the same rounds, or of another figure, or None."""
    mine, theirs = (row["columns"].get(name, {}).get(figure) for name in (column, other))
    return None if not mine or not theirs else float(np.median(np.divide(mine, theirs)))


def _compared(name, found):
    """Returns the table of a model, and why a device has no figures."""
    measured = [x for x in found if x["rows"][name]["columns"]]
    absent = [x for x in found if x not in measured]
    parts = [f"{name} ({x['about']['device']}): {one(x, name)}." for x in absent]
    return "\n\n".join([*([_beside(name, measured)] if measured else []), *parts])


def _beside(name, found):
    devices = [x["about"]["device"] for x in found]
    rows = [x["rows"][name] for x in found]
    shown = ["losses at the end"] if "steps" in rows[0] else list(HEAD)
    lines = [[column, *(cell for row in rows for cell in _cells(row, column, shown))] for column in _in_order(rows)]
    head = ["step", *(f"{device}: {title}" if len(found) > 1 else title for device in devices for title in shown)]
    sizes = "; ".join(f"{device}, batch of {row.get('batch')}" for device, row in zip(devices, rows, strict=True))
    return f"{name} ({sizes}):\n\n{_table(head, lines)}"


def _in_order(rows):
    return [column for column in columns.COLUMNS if any(column in row["columns"] for row in rows)]


def _cells(row, column, shown):
    """Returns the cells of a step of a device: as many as titles, without the title of the step."""
    titles = [title for title in shown if title != "step"]
    found = row["columns"].get(column, {})
    if "omitted" in found:
        return [f"omitted: {found['omitted'].replace('|', '/')[:80]}", *[NONE] * (len(titles) - 1)]
    if "steps" in row:
        return [_known(found.get("last_loss"), "{:.3f}")]
    times = found.get("seconds")
    yardstick = columns.YARDSTICKS.get(column)
    memory = found["temp_bytes"] + found["argument_bytes"] if "temp_bytes" in found else None
    return [
        _time(times) if times else NONE,
        *(_known(ratio(row, column, columns.FLOAT32, x), "{:.3f}") for x in ("seconds", "moved_bytes")),
        *(_known(ratio(row, column, yardstick, x), "{:.3f}") for x in ("seconds", "moved_bytes")),
        _known(memory and memory / 1e9, "{:.2f} GB"),
        _known(found.get("gradient_error"), "{:.2%}"),
    ]


def _time(times):
    low, middle, high = 1e3 * np.percentile(times, (25, 50, 75))
    return f"{middle:#.3g} ms [{low:#.3g}, {high:#.3g}]"


def _known(value, form):
    return NONE if value is None else value if isinstance(value, str) else form.format(value)


def _about(results):
    about = results["about"]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("jax", "optax") if about["versions"][name])
    return (
        f"{about['device']}: measured on {about['date']} by `{about['command']}` with commit {about['commit']}, "
        f"{versions}, in {about['seconds']} seconds; {tests(results['tests'])}."
    )


def _table(head, lines):
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |".replace("| --- ", "|---").replace("--- |", "---|") for cells in rows)
