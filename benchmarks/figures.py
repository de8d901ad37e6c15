"""The figures in the sentences of the pages, as text, from the results of earlier runs.

On a page, a comment behind a number has the name of the figure: `takes 2.2<!-- trace wrapper --> seconds`. `python -m
benchmarks.table` writes the number. Only the page has the words around it.
"""

import itertools
import math
import re

import jax

from benchmarks import __main__ as cpu
from benchmarks import autocast, diagnosis, record, steps

STUDIES = record.ROOT / "benchmarks" / "studies"
OURS = ("functional", "functional, norm as check", "optax wrapper", "optax wrapper, max_norm")
FIGURE = re.compile(r"-?\d[\d,.]*(?: to \d[\d,.]*)?(?=<!-- (?P<name>[^>]*) -->)")
RESTORED = ("DynamicScale, statistics selected", "jmpscale, autocast")  # of benchmarks.studies.one_infinite_pixel
H100 = "h100, 1 devices, {}, adamw, {}, gradients in float32"
COMPILED = {  # the step, as the pages call it, and the name of its result
    "layers": H100.format("8 of 2048, batch 32", "float16"),
    "language model": H100.format("language model", "float16"),
    "embedding": H100.format("embedding of 32,000 x 1,024", "float32"),
    "ensemble": H100.format("6 of 1024, batch 32", "float16") + ", 4 members",
    "TPU": "tpu-v5e, 1 devices, 2 of 8192, batch 32, adamw, bfloat16, gradients in float32",
}


MASTER_PARAMS = {  # the same for parameters in half precision
    "layers": "h100, 1 devices, 8 of 2048, batch 32, adamw, bfloat16, gradients in bfloat16",
    "language model": "h100, 1 devices, language model, adamw, bfloat16, gradients in bfloat16",
    "TPU": "tpu-v5e, 1 devices, 2 of 8192, batch 32, adamw, bfloat16, gradients in bfloat16",
}


def figures(results):
    """Returns the figures of all pages by name; `results` are what `benchmarks.table` reads."""
    groups = [_sizes(), _studies()]
    groups += [group(results) for group in (_gpu, _cpu, _compiled, _autocast, _master_params, _other)]
    return {name: text for group in groups for name, text in group.items()}


def rewrite(text, known):
    """Returns a page with each figure that a comment names replaced."""

    def value(found):
        if (name := found["name"]) not in known:
            raise ValueError(f"the page names the figure {name!r}, which benchmarks/figures.py does not have")
        return known[name]

    return FIGURE.sub(value, text)


def span(values, form="{:.2f}"):
    """Returns the smallest and the largest value as text, or one text if both are equal."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _sizes():
    tasks = {"language model": steps.language_model, "GPT-2 small": autocast.MODELS["GPT-2 small"][0]}
    return {f"millions of parameters, {name}": f"{_millions(task):.1f}" for name, task in tasks.items()}


def _millions(task):
    params = jax.eval_shape(lambda: task()[1])
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) / 1e6


def _gpu(results):
    timed = results["gpu"]["large"]["figures"]
    found = {}
    for case, name in (("8 of 2048, batch 32, float16", "layers"), ("language model, float16", "language model")):
        ms = {step: figures["ms"] for step, figures in timed[case].items()}
        for base in ("bare", "clipped"):
            found[f"H100 {name}: functional over {base}"] = f"{100 * (ms['functional'] / ms[base] - 1):.0f}"
        found |= {f"H100 {name}: {step} ms": f"{ms[step]:.1f}" for step in ("bare", "functional")}
        found[f"H100 {name}: added ms"] = f"{ms['functional'] - ms['clipped']:.2f}"
        found[f"H100 {name}: added us"] = span([1000 * (ms[step] - ms["clipped"]) for step in OURS], "{:.0f}")
    for dtype in ("float32", "bfloat16"):
        found[f"H100 language model: {dtype} ms"] = f"{timed[f'language model, {dtype}']['bare']['ms']:.1f}"
    ratio = timed["language model, float32"]["bare"]["ms"] / timed["language model, float16"]["functional"]["ms"]
    return found | {"H100 language model: float32 over functional": f"{ratio:.1f}"}


def _cpu(results):
    networks, found = results["cpu"]["steps"]["figures"], {}
    sgd = results["cpu"]["optimizers"]["figures"]["sgd"]
    for name, figures in {**networks, "SGD": sgd}.items():
        for base, ratio in (("bare", "bare_ratio"), ("clipped", "ratio")):
            found[f"CPU {name}: functional over {base}"] = f"{100 * (figures['functional'][ratio] - 1):.0f}"
    longer = [100 * (x["functional"][ratio] - 1) for x in networks.values() for ratio in ("bare_ratio", "ratio")]
    found |= {"CPU: most longer": f"{max(longer):.0f}", "CPU: most shorter": f"{-min(longer):.0f}"}
    groups = {"ours": (*OURS, "scaled_backward"), "peers": steps.PEERS[:3], "apply_if_finite": steps.PEERS[3:]}
    for group, names in groups.items():
        found[f"CPU {group}: ratio"] = span([figures[name]["ratio"] for figures in networks.values() for name in names])
    for optimizer in ("sgd", "momentum", "adafactor"):
        figures = results["cpu"]["optimizers"]["figures"][optimizer]
        found |= {f"CPU {optimizer}: {name} ratio": f"{figures[name]['ratio']:.2f}" for name in ("functional", "jmp")}
    return found


def _compiled(results):
    compiled, found = {name: results["compilers"][key]["figures"] for name, key in COMPILED.items()}, {}

    def ratios(step, names, figure):
        return [compiled[step][name][figure] / compiled[step]["clipped"][figure] for name in names]

    def added(columns, names, count):
        return span([count(compiled[x][name]) - count(compiled[x]["clipped"]) for x in columns for name in names], "{}")

    def kernels(x):
        return x["kernels"]

    def scalar_operations(x):
        return x["scalar_operations"]

    def other_kernels(x):
        return kernels(x) - scalar_operations(x)

    on_h100 = ("layers", "language model", "embedding")
    for group, names in {"ours": OURS, "peers": steps.PEERS, **{peer: [peer] for peer in steps.PEERS}}.items():
        found[f"H100 added kernels, {group}"] = added(on_h100, names, kernels)
        found[f"TPU added kernels, {group}"] = added(["TPU"], names, other_kernels)
        found[f"TPU added operations on scalars, {group}"] = added(["TPU"], names, scalar_operations)
    for step in ("embedding", "TPU"):
        found[f"{step}: memory of apply_if_finite"] = span(ratios(step, steps.PEERS[3:], "temp_bytes"))
    found["TPU: bytes of apply_if_finite"] = span(ratios("TPU", steps.PEERS[3:], "moved_bytes"))
    for name in ("clipped", "bare"):
        found[f"TPU {name} MB"] = f"{compiled['TPU'][name]['temp_bytes'] / 1e6:.1f}"
    found["ensemble: bytes, ours"] = span(ratios("ensemble", cpu.OURS, "moved_bytes"))
    found["ensemble: memory, ours"] = span(ratios("ensemble", cpu.OURS, "temp_bytes"))
    found["ensemble: bytes, peers"] = span(ratios("ensemble", steps.PEERS, "moved_bytes"))
    found["ensemble: memory, peers"] = f"{max(ratios('ensemble', steps.PEERS, 'temp_bytes')):.2f}"
    return found


def _autocast(results):
    def value(model, variant, figure="moved_bytes"):
        return results["autocast"][model]["figures"][variant][figure]

    def ratio(model, variant, figure="moved_bytes"):
        return f"{value(model, variant, figure) / value(model, autocast.BY_HAND, figure):.2f}"

    gpt2, t4, fsdp = "h100, GPT-2 small", "t4, GPT-2 small, 2 layers", "h100, GPT-2 small, 2 layers, FSDP"
    saved = value(f"{gpt2}, scan, dots saved", autocast.AUTOCAST, "temp_bytes")
    lora = f"h100, {autocast.LORA}"
    return {
        **{f"bytes of GPT-2 small, {x}": ratio(gpt2, x) for x in (autocast.AUTOCAST, autocast.FLOAT32)},
        "bytes of GPT-2 small, float32 results": ratio(gpt2, autocast.RESULTS_IN_FLOAT32),
        "bytes of ResNet-34": ratio("h100, ResNet-34", autocast.AUTOCAST),
        "bytes of ResNet-34, blocks return half": ratio("h100, ResNet-34", autocast.STORED),
        "memory of GPT-2 small, dots saved": f"{saved / value(f'{gpt2}, scan', autocast.BY_HAND, 'temp_bytes'):.2f}",
        "communication of GPT-2, embedding converted": ratio(fsdp, autocast.EMBEDDED, "communicated_bytes"),
        "communication of GPT-2": ratio(fsdp, autocast.AUTOCAST, "communicated_bytes"),
        "T4 matmuls in float16": str(value(t4, autocast.AUTOCAST, "matmuls")["f16"]),
        "T4 matmuls in float32": str(value(t4, autocast.BFLOAT16, "matmuls")["f32"]),
        "T4 bytes in bfloat16": ratio(t4, autocast.BFLOAT16),
        **{
            f"{name} of LoRA": f"{value(lora, autocast.AUTOCAST, figure) / value(lora, autocast.SMALL, figure):.2f}"
            for name, figure in (("bytes", "moved_bytes"), ("memory", "temp_bytes"))
        },
    }


def _other(results):
    traces, found = results["tracing"]["figures"], {}
    for form in ("unrolled", "scan"):
        found[f"trace {form}"] = f"{traces[form]['autocast'] / traces[form]['float32']:.1f}"
    found |= {f"trace {name}": f"{seconds:.1f}" for name, seconds in traces["traced update"].items()}
    found["eager update"] = f"{traces['eager update']['wrapper'] / traces['eager update']['optax']:.1f}"
    for devices, errors in results["float16_sums"]["figures"].items():
        found |= {f"{kind} sum over {devices}": f"{100 * error:.1f}" for kind, error in errors.items()}
    for release, result in results["diagnosis"].items():
        ratios = {name: x["first diagnosis"] / x["step"] for name, x in result["figures"].items()}
        found[f"diagnosis with an overflow, {release}"] = f"{ratios.pop(diagnosis.OVERFLOW):.1f}"
        found[f"diagnosis, {release}"] = span(ratios.values(), "{:.1f}")
    return found


def _studies():
    found = {}
    for study, key, short in (("batch_size", "batch tokens", "batch"), ("vocabulary", "vocabulary", "vocabulary")):
        for run in record.read(STUDIES / f"{study}.json")["runs"]:
            if run["seed"] == 0:
                found[f"{short} 2^{run[key].bit_length() - 1}: {run['run']}"] = f"{run['loss']:.2f}"
    checks = [step["ratio"] for step in record.read(STUDIES / "check_step.json")["steps"]]
    found |= {"check_step": span(checks, "{:.1f}")}
    whole = record.read(STUDIES / "whole_step.json")["steps"]
    for name, is_faulty in (("whole step", False), ("whole step, bfloat16 parameters", True)):
        ratios = [step["ratio"] for step in whole if (step["form"] == "bfloat16 parameters") == is_faulty]
        found[name] = span(ratios, "{:.1f}")
    ratios = [run["ratio"] for run in record.read(STUDIES / "whole_run.json")["runs"]]
    found["whole run"] = span(ratios, "{:.1f}")
    found |= {"near a minimum, other examples": span(_near_minimum(), "{:.3f}")}
    return found | _runs() | _rules() | _rounding() | _infinite_pixel()


def _runs():
    """Returns the numbers of right runs and of faults in runs, and how many of them are accused."""
    study = record.read(STUDIES / "runs.json")
    right = study["right"] + study["right, small batches"]
    shown = [row for row in study["faults"] if row["expected"]]
    named = [(row["expected"], [*row["named"], *itertools.chain(*row["named"].values())]) for row in shown]
    return {
        "runs: right": str(len(right)),
        "runs: accused": str(sum(bool(row["named"]) for row in right)),
        "runs: faults": str(len(shown)),
        "runs: found": str(sum(expected in names for expected, names in named)),
    }


def _master_params(results):
    """Returns figures of `with_master_params`, relative to float32 parameters that the step casts."""
    runs = record.read(STUDIES / "master_params.json")["runs"]
    found = {f"master params: {x['parameters']}, {x['optimizer']}": f"{x['loss']:.3f}" for x in runs}
    arguments = []
    for name, result in MASTER_PARAMS.items():
        ours, float32 = (results["compilers"][result]["figures"][x] for x in ("with_master_params", "bare"))
        found[f"master params: bytes, {name}"] = f"{ours['moved_bytes'] / float32['moved_bytes']:.3f}"
        arguments.append(ours["argument_bytes"] / float32["argument_bytes"])
    return found | {"master params: memory of arguments": span(arguments)}


def _rules():
    """Returns figures of the rule with a shorter growth interval."""
    plain, short = "plain", "plain, growth_interval=200"
    replayed = record.read(STUDIES / "calibration.json")["replayed"]
    recovery = replayed["text, collapse, from 2^16"][short]["right again after step 4030"]
    additional = max(rules[short]["skipped"] - rules[plain]["skipped"] for rules in replayed.values())
    return {"rules: steps to recover": str(recovery), "rules: additional skips": str(additional)}


def _rounding():
    """Returns the error that two programs share, of which one is harmed, and how many times larger its loss becomes."""
    programs = record.read(STUDIES / "rounding.json")["figures"]
    harmed, harmless = programs["time steps up to 1,000, bfloat16"], programs["ResNet-18, 8 images, float16"]
    times = harmed["loss, half precision"] / harmed["loss, float32"]
    errors = [100 * program["gradient_error"] for program in (harmed, harmless)]
    return {"rounding: error": span(errors, "{:.0f}"), "rounding: times the loss": f"{round(times, -3):,.0f}"}


def _near_minimum():
    """Returns the ratio of the losses of other examples, of the programs of which only a minimum nearby was said."""
    programs = record.read(STUDIES / "healthy_steps.json")["programs"].values()
    found = [x for x in programs if x["summary"].startswith("The gradients") and "near a minimum" in x["summary"]]
    return [x["loss of other examples"]["ratio"] for x in found]


def _infinite_pixel():
    """Returns losses and accuracies in percent, of all seeds and of seed 0."""
    runs, found = record.read(STUDIES / "one_infinite_pixel.json")["runs"], {}
    for name in {run["run"] for run in runs}:
        for when, seeds in (("", range(5)), (", seed 0", [0])):
            of_seeds = [run for run in runs if run["run"] == name and run["seed"] in seeds]
            found[f"pixel loss, {name}{when}"] = span([run["loss"] for run in of_seeds], "{:.3f}")
            found[f"pixel accuracy, {name}{when}"] = span([100 * run["accuracy"] for run in of_seeds], "{:.1f}")
    restored = [run for run in runs if run["run"] in RESTORED and run["seed"] == 0]
    found["pixel loss, restored, seed 0"] = span([run["loss"] for run in restored], "{:.3f}")
    found["pixel accuracy, restored, seed 0"] = span([100 * run["accuracy"] for run in restored], "{:.1f}")
    return found
