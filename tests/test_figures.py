"""Every figure on a page is in a file of results: tables are written from them again, and so are sentences."""

import functools
import math
import pathlib
import re
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import __main__ as main
from benchmarks import autocast, cards, diagnosis, record, steps, table

import pages

SMALL, MODEL = table.GPU.values()
ENSEMBLE = "h100, 1 devices, 6 of 1024, batch 32, adamw, float16, gradients in float32, 4 members"
H100 = [name for name in table.COMPILED if name.startswith("H100")]
TPU = ["TPU v5e, 2 layers of width 8192"]
JMPSCALE = ("functional", "functional, norm as check", "optax wrapper", "optax wrapper, max_norm")


@functools.cache
def _results():
    return table.read_results()


def _text(page):
    text = (pages.DOCS / page).read_text()
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->|^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(text.split())


def _gpu(case, name, figure):
    return _results()["gpu"]["large"]["figures"][case][name][figure]


def _added_ms(case, name):
    return _gpu(case, name, "ms") - _gpu(case, "clipped", "ms")


def _longer(case, name, base="bare"):
    """Returns the percentage by which a step takes longer than another one."""
    return 100 * (_gpu(case, name, "ms") / _gpu(case, base, "ms") - 1)


def _longer_on_cpu(part, case):
    """Returns the percentages by which a step takes longer than the bare step and than the clipped step."""
    figures = _results()["cpu"][part]["figures"][case]["functional"]
    return [100 * (figures[ratio] - 1) for ratio in ("bare_ratio", "ratio")]


def _ratios_on_cpu(names):
    """Returns the smallest and the largest ratio of these steps' times to the clipped step's."""
    figures = [_results()["cpu"]["steps"]["figures"][case] for case in table.CPU.values()]
    ratios = [network[name]["ratio"] for network in figures for name in names]
    return min(ratios), max(ratios)


def _memory(name, column):
    """Returns the temporary memory of a compiled step, divided by the clipped step's."""
    figures = _results()["compilers"][table.COMPILED[column]]["figures"]
    return figures[name]["temp_bytes"] / figures["clipped"]["temp_bytes"]


def _added_microseconds():
    added = [1000 * _added_ms(SMALL, name) for name in JMPSCALE]
    return min(added), max(added)


def _added_kernels(names, columns=H100):
    compiled = _results()["compilers"]
    added = []
    for column in columns:
        kernels = {name: x["kernels"] for name, x in compiled[table.COMPILED[column]]["figures"].items()}
        added += [kernels[name] - kernels["clipped"] for name in names]
    return min(added), max(added)


def _range(low, high):
    return f"{low} to {high}" if low < high else str(low)


def _on_tpu(name, figure):
    return _results()["compilers"][table.COMPILED[TPU[0]]]["figures"][name][figure]


def _ensemble(names, figure):
    figures = _results()["compilers"][ENSEMBLE]["figures"]
    found = [figures[name][figure] / figures["clipped"][figure] for name in names]
    return min(found), max(found)


def _autocast(model, variant, figure):
    return _results()["autocast"][model]["figures"][variant][figure]


def _ratio(model, variant, figure):
    return _autocast(model, variant, figure) / _autocast(model, autocast.BY_HAND, figure)


def _tracing(name):
    figures = _results()["tracing"]["figures"][name]
    return figures["autocast"] / figures["float32"]


def _update_seconds(kind, optimizer):
    return _results()["tracing"]["figures"][f"{kind} update"][optimizer]


def _diagnoses():
    programs = _results()["diagnosis"]["figures"]
    ratios = {name: figures["first diagnosis"] / figures["step"] for name, figures in programs.items()}
    overflow = ratios.pop(diagnosis.OVERFLOW)
    return min(ratios.values()), max(ratios.values()), overflow


def _language_model_ms():
    """Returns the times of a step in float32 and in bfloat16."""
    return [_gpu(f"language model, {dtype}", "bare", "ms") for dtype in ("float32", "bfloat16")]


def _millions(task):
    params = jax.eval_shape(lambda: task()[1])
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) / 1e6


def _losses(study, key, value):
    """Returns the losses of the first seed in float32, in float16 and with jmpscale."""
    runs = table.first_seed(record.read(table.STUDIES / f"{study}.json"), key)
    return [runs[value, name]["loss"] for name in table.VARIANTS]


def _batches(*sizes):
    return [_losses("batch_size", "batch tokens", size) for size in sizes]


def _words():
    return [*_losses("vocabulary", "vocabulary", 2**15), _losses("vocabulary", "vocabulary", 2**7)[0]]


PIXEL_RUNS = ("DynamicScale", "DynamicScale, no infinite pixel", "DynamicScale, statistics selected")
PIXEL_RUNS += ("jmpscale, float16 layers", "jmpscale, autocast")


def _pixel(name, seeds=range(5)):
    """Returns the smallest and largest loss, the smallest and largest accuracy, and whether statistics are finite."""
    runs = record.read(table.STUDIES / "one_infinite_pixel.json")["runs"]
    runs = [run for run in runs if run["run"] == name and run["seed"] in seeds]
    losses, accuracies = ([run[key] for run in runs] for key in ("loss", "accuracy"))
    [finite] = {run["finite statistics"] for run in runs}
    return min(losses), max(losses), 100 * min(accuracies), 100 * max(accuracies), "finite" if finite else "NaN"


def _checks():
    """Returns the times of `check_step`."""
    rows = record.read(table.STUDIES / "check_step.json")["steps"]
    assert len(rows) == 4
    return rows


SENTENCES = {  # the sentences on each page, with the figures in them
    "../benchmarks/studies/README.md": [
        (
            "the same, no infinite pixel | {:.3f} to {:.3f} | {:.1f}% to {:.1f}% | {} | "
            "| the same, batch statistics selected by `is_fin`, too | {:.3f} to {:.3f} | {:.1f}% to {:.1f}% | {} | "
            "| jmpscale, float16 layers | {:.3f} to {:.3f} | {:.1f}% to {:.1f}% | {} | "
            "| jmpscale, float32 layers and `autocast` | {:.3f} to {:.3f} | {:.1f}% to {:.1f}% | {} |",
            lambda: [figure for name in PIXEL_RUNS[1:] for figure in _pixel(name)],
        ),
        (
            "| `DynamicScale`, as in Flax's ImageNet example | {:.3f} to {:.3f} | {:.1f}% | {} |",
            lambda: [*_pixel("DynamicScale")[:3], _pixel("DynamicScale")[4]],
        ),
        (
            "ends at {:.2f} nats in float32, {:.2f} in float16 and {:.2f} in float16 with jmpscale; with a vocabulary "
            "of 2^7, all three end at {:.2f}",
            _words,
        ),
    ],
    "common_mistakes.md": [
        (
            "In four measured steps, a check takes {:.1f} to {:.1f} times as long as compiling the step",
            lambda: [f(row["ratio"] for row in _checks()) for f in (min, max)],
        )
    ],
    "../README.md": [
        (
            "on 2026-11-23, on an H100, loss scaling added {:.0f}% to a float16 step of a language model with {:.1f} "
            "million parameters, and {:.0f}% to a step of a small network. The language model's step took {:.1f} ms in "
            "float32 (TF32), {:.1f} ms in bfloat16, {:.1f} ms in float16 without loss scaling, and {:.1f} ms with it.",
            lambda: [
                _longer(MODEL, "functional"),
                _millions(steps.language_model),
                _longer(SMALL, "functional"),
                *_language_model_ms(),
                _gpu(MODEL, "bare", "ms"),
                _gpu(MODEL, "functional", "ms"),
            ],
        ),
        (
            "ends at {0:.2f} nats per character in float32 and at {1:.2f} in float16. As one of 512 devices that share "
            "2^19 tokens, it ends at {3:.2f} in float32, {4:.2f} in float16, and {5:.2f} in float16 with jmpscale.",
            lambda: [loss for losses in _batches(2**10, 2**19) for loss in losses],
        ),
        (
            "| as in Flax's example | {:.3f} | {:.1f}%: the running averages are NaN | "
            "| the same, without the infinite pixel | {:.3f} | {:.1f}% | | jmpscale | {:.3f} | {:.1f}% |",
            lambda: [
                figure
                for name in ("DynamicScale", "DynamicScale, no infinite pixel", "jmpscale, autocast")
                for figure in _pixel(name, seeds=[0])[1:3]
            ],
        ),
    ],
    "costs.md": [
        (
            "On an H100, loss scaling makes a step of a language model {:.0f}% to {:.0f}% longer, and a step of a "
            "small network {:.0f}% to {:.0f}%; on a CPU, it makes a step with AdamW up to {:.0f}% longer or up to "
            "{:.0f}% shorter. With `autocast`, a step of GPT-2 small moves {:.2f} times the bytes of casts by hand, "
            "where float32 moves {:.2f} times;",
            lambda: [
                *(_longer(case, "functional", base) for case in (MODEL, SMALL) for base in ("clipped", "bare")),
                max(percent for case in table.CPU.values() for percent in _longer_on_cpu("steps", case)),
                -min(percent for case in table.CPU.values() for percent in _longer_on_cpu("steps", case)),
                *(_ratio("h100, GPT-2 small", x, "moved_bytes") for x in (autocast.AUTOCAST, autocast.FLOAT32)),
            ],
        ),
        (
            "| H100, a language model with {:.1f} million parameters | {:.0f}% | {:.0f}% | "
            "| H100, 8 layers of width 2048, a batch of 32 | {:.0f}% | {:.0f}% |",
            lambda: [
                _millions(steps.language_model),
                *(_longer(case, "functional", base) for case in (MODEL, SMALL) for base in ("bare", "clipped")),
            ],
        ),
        (
            " ".join(f"| CPU, {name} | {{:.0f}}% | {{:.0f}}% |" for name in [*table.CPU, "the same with SGD"]),
            lambda: [
                *(percent for case in table.CPU.values() for percent in _longer_on_cpu("steps", case)),
                *_longer_on_cpu("optimizers", "sgd"),
            ],
        ),
        (
            "the steps of jmpscale take {:.2f} to {:.2f} times as long as the clipped step, the steps of jmp, Flax "
            "`DynamicScale` and mpx {:.2f} to {:.2f} times, and optax `apply_if_finite` {:.2f} to {:.2f} times.",
            lambda: [
                ratio
                for names in ((*JMPSCALE, "scaled_backward"), steps.PEERS[:3], steps.PEERS[3:])
                for ratio in _ratios_on_cpu(names)
            ],
        ),
        (
            "but {:.2f} times with `apply_if_finite` in the embedding, and {:.2f} times on the TPU.",
            lambda: [_memory("optax apply_if_finite", column) for column in [H100[2], *TPU]],
        ),
        (
            "takes {:.2f} (SGD), {:.2f} (momentum) and {:.2f} (Adafactor) times as long as the clipped step with the "
            "functional API, and {:.2f}, {:.2f} and {:.2f} times with jmp.",
            lambda: [
                _results()["cpu"]["optimizers"]["figures"][optimizer][name]["ratio"]
                for name in ("functional", "jmp")
                for optimizer in ("sgd", "momentum", "adafactor")
            ],
        ),
        (
            "a step with the functional API takes {:.2f} ms longer than the clipped step, although the current "
            "version's programs move as many bytes.",
            lambda: [_added_ms(MODEL, "functional")],
        ),
        ("a language model with {:.1f} million parameters", lambda: [_millions(steps.language_model)]),
        (
            "The bare step of the language model takes {:.1f} ms in float32 (TF32) and {:.1f} ms in bfloat16.",
            _language_model_ms,
        ),
        ("its steps take {:.0f} to {:.0f} microseconds longer than the clipped step.", _added_microseconds),
        (
            "On the H100, a dynamic scale of jmpscale adds {} to {} kernels to the clipped step, and the other "
            "libraries add {} to {}. On the TPU, where moves of scalars count too, it adds {} to {}, and the other "
            "libraries add {} to {}.",
            lambda: [
                *_added_kernels(JMPSCALE),
                *_added_kernels(steps.PEERS),
                *_added_kernels(JMPSCALE, TPU),
                *_added_kernels(steps.PEERS, TPU),
            ],
        ),
        (
            "the clipped step needs {:.1f} MB and the bare step {:.1f} MB.",
            lambda: [_on_tpu(name, "temp_bytes") / 1e6 for name in ("clipped", "bare")],
        ),
        (
            "jmpscale moves {:.2f} to {:.2f} times the bytes and needs {:.2f} to {:.2f} times the temporary memory; "
            "the other libraries move {:.2f} to {:.2f} times the bytes and need {:.2f} times the memory.",
            lambda: [
                *_ensemble(main.OURS, "moved_bytes"),
                *_ensemble(main.OURS, "temp_bytes"),
                *_ensemble(steps.PEERS, "moved_bytes"),
                max(_ensemble(steps.PEERS, "temp_bytes")),
            ],
        ),
        (
            "Tracing the gradient of 96 unrolled transformer blocks with `autocast` takes {:.1f} times as long as in "
            "float32, and in a `scan` {:.1f} times",
            lambda: [_tracing("unrolled"), _tracing("scan")],
        ),
        (
            "Tracing an Adam update of 1,000 parameters takes {:.1f} seconds of CPU time with the optax wrapper and "
            "{:.1f} with optax, or {:.1f} with `max_norm` and {:.1f} with optax and a clip",
            lambda: [
                _update_seconds("traced", name) for name in ("wrapper", "optax", "wrapper, max_norm", "optax, clipped")
            ],
        ),
        (
            "an Adam update of 300 parameters takes {:.1f} times as long as with optax",
            lambda: [_update_seconds("eager", "wrapper") / _update_seconds("eager", "optax")],
        ),
        (
            "GPT-2 with 2 layers, compiled for an H100, moves {:.2f} times the bytes, and needs {:.2f} times the "
            "memory, of a step in which autocast converts these contractions.",
            lambda: [
                _autocast(f"h100, {autocast.LORA}", autocast.AUTOCAST, figure)
                / _autocast(f"h100, {autocast.LORA}", autocast.SMALL, figure)
                for figure in ("moved_bytes", "temp_bytes")
            ],
        ),
        ("GPT-2 small has {:.1f} million parameters", lambda: [_millions(autocast.MODELS["GPT-2 small"][0])]),
    ],
    "diagnose.md": [
        (
            "On a CPU, a diagnosis takes {:.1f} to {:.1f} times the CPU time of compiling and running the step, if a "
            "scale fits, and {:.1f} times for 12 layers of which one overflows",
            _diagnoses,
        ),
    ],
    "dtypes.md": [
        (
            "With float16, by `autocast` or by hand, all {} are in float16. With bfloat16, all {} are in float32, and "
            "the step moves {:.2f} times the bytes",
            lambda: [
                _autocast("t4, GPT-2 small, 2 layers", autocast.AUTOCAST, "matmuls")["f16"],
                _autocast("t4, GPT-2 small, 2 layers", autocast.BFLOAT16, "matmuls")["f32"],
                _ratio("t4, GPT-2 small, 2 layers", autocast.BFLOAT16, "moved_bytes"),
            ],
        ),
    ],
    "how_it_works.md": [
        (
            "The branch of `optax.apply_if_finite` moves {:.2f} times the bytes on a TPU.",
            lambda: [_on_tpu("optax apply_if_finite", "moved_bytes") / _on_tpu("clipped", "moved_bytes")],
        ),
    ],
    "comparison.md": [
        (
            "| {} | not compared | {} | {} | {} | {} |",
            lambda: [_range(*_added_kernels(names)) for names in (JMPSCALE, *([name] for name in steps.PEERS))],
        ),
    ],
    "guides/devices.md": [
        (
            "equal gradients is wrong by {:.1%} over 256 devices, by {:.1%} over 1,024 and by {:.1%} over 4,096; with "
            "noise of ten times their mean, by {:.1%}, {:.1%} and {:.1%}",
            lambda: [
                _results()["float16_sums"]["figures"][devices][noise]
                for noise in ("equal", "noisy")
                for devices in ("256", "1024", "4096")
            ],
        ),
    ],
    "guides/autocast.md": [
        (
            "GPT-2 small, compiled for an H100, moves {:.2f} times the bytes of [casts by "
            "hand](../costs.md#autocast-and-casts-by-hand) with it, {:.2f} times with float32 results, and {:.2f} "
            "times in float32.",
            lambda: [
                _ratio("h100, GPT-2 small", variant, "moved_bytes")
                for variant in (autocast.AUTOCAST, autocast.RESULTS_IN_FLOAT32, autocast.FLOAT32)
            ],
        ),
        (
            "ResNet-34 moves {:.2f} times the bytes of [casts by hand]",
            lambda: [_ratio("h100, ResNet-34", autocast.AUTOCAST, "moved_bytes")],
        ),
        (
            "with blocks that return half precision, ResNet-34 moves {:.2f} times the bytes.",
            lambda: [_ratio("h100, ResNet-34", autocast.STORED, "moved_bytes")],
        ),
        (
            "GPT-2 small needs {:.2f} times the memory of casts by hand without `jax.checkpoint`.",
            lambda: [
                _autocast("h100, GPT-2 small, scan, dots saved", autocast.AUTOCAST, "temp_bytes")
                / _autocast("h100, GPT-2 small, scan", autocast.BY_HAND, "temp_bytes")
            ],
        ),
        (
            "GPT-2 with 2 layers communicates {:.2f} times the bytes of casts by hand, not {:.2f} times.",
            lambda: [
                _ratio("h100, GPT-2 small, 2 layers, FSDP", variant, "communicated_bytes")
                for variant in (autocast.EMBEDDED, autocast.AUTOCAST)
            ],
        ),
    ],
}


@pytest.mark.parametrize("page", ["costs.md", "index.md"])
def test_tables_equal_the_results(page):
    text = (pages.DOCS / page).read_text()
    assert table.rewrite(text, table.pages(_results())[page]) == text


def _sentences(page):
    """Returns the sentences that must be on a page, with their figures."""
    return [text.format(*figures()) for text, figures in SENTENCES[page]]


@pytest.mark.parametrize("page", SENTENCES)
def test_sentences_have_the_figures_of_the_results(page):
    assert [sentence for sentence in _sentences(page) if sentence not in _text(page)] == []


def test_costs_says_whether_a_device_was_measured():
    assert ("its time on a GPU has not been measured" in _text("costs.md")) == (not cards.read())


def test_other_steps_need_at_most_the_memory_of_the_clipped_step():
    names = {*JMPSCALE, *steps.PEERS} - {"optax apply_if_finite"}
    assert all(_memory(name, column) <= 1.0005 for name in names for column in table.COMPILED)


def test_costs_has_no_other_figures():
    """Each decimal number in the prose of the page is in a sentence that is compared with the results."""
    text = _text("costs.md")
    for sentence in _sentences("costs.md"):
        text = text.replace(sentence, "")
    assert re.findall(r"\d+\.\d+", text) == ["1.0005"]  # a limit in a test


@pytest.mark.parametrize("name", table.FILES)
def test_results_have_a_record_of_each_run(name):
    results = _results()[name]
    for result in [results] if "about" in results else results.values():
        assert {"date", "command", "device", "versions"} <= set(result["about"])
        assert result["about"]["command"].startswith("python -m benchmarks")
