"""Records state dicts of torch's GradScaler, and what it does in the 100 steps after each.

Run by hand where torch is installed: `python -m benchmarks.torch_state_dicts`. Every step is a whole one:
a scaled backward pass, `step` on an optimizer, `update`; an overflow is an infinite gradient.
"""

import datetime
import json
import pathlib
import random

import torch

STEPS = 100
# Settings, steps taken before the state dict is saved, chance of an overflow. All factors are exact in float32.
RUNS = {
    "defaults, 30 steps before a growth": ({}, 1970, 0.0),
    "defaults, before the first step": ({"init_scale": 2.0**12}, 0, 0.01),
    "interval 5": ({"growth_interval": 5}, 23, 0.15),
    "growth 1.5, backoff 0.75": (
        {"init_scale": 256.0, "growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 3},
        40,
        0.3,
    ),
    "growth 4, backoff 0.25": (
        {"init_scale": 2.0**20, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7},
        37,
        0.12,
    ),
    "interval 1, growth 1.25, backoff 0.625": (
        {"init_scale": 1.0, "growth_factor": 1.25, "backoff_factor": 0.625, "growth_interval": 1},
        11,
        0.4,
    ),
    "far below 1": ({"init_scale": 2.0**-20, "growth_interval": 2}, 9, 0.6),
}


def advance(scaler, found_inf):
    """Takes one step of a training run; returns whether the optimizer was skipped."""
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight * (torch.inf if found_inf else 0.25)).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.item() == 1.0


def follow(scaler, word):
    """Returns the scale after each step of a word of overflows."""
    scales = []
    for found_inf in word:
        assert advance(scaler, found_inf) == bool(found_inf)
        scales.append(scaler.get_scale())
    return scales


def record(settings, before, chance, seed):
    rng = random.Random(seed)
    scaler = torch.amp.GradScaler("cpu", **settings)
    for _ in range(before):
        advance(scaler, rng.random() < chance)
    saved = scaler.state_dict()
    found_inf = [int(rng.random() < chance) for _ in range(STEPS)]
    scales = follow(scaler, found_inf)
    return {"state_dict": saved, "found_inf": found_inf, "scales": scales, "state_dict_after": scaler.state_dict()}


def record_a_lowered_interval():
    """`set_growth_interval` below the finite steps counted so far: torch then misses the moment to grow."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=10)
    follow(scaler, [0] * 7)
    scaler.set_growth_interval(5)
    saved = scaler.state_dict()
    found_inf = [0] * 20 + [1] + [0] * 9
    return {"state_dict": saved, "found_inf": found_inf, "scales": follow(scaler, found_inf)}


def main():
    recorded = {
        "source": "torch.amp.GradScaler('cpu')",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "runs": {name: record(*run, seed) for seed, (name, run) in enumerate(RUNS.items())},
        "lowered_interval": record_a_lowered_interval(),
    }
    path = pathlib.Path(__file__).parent.parent / "tests" / "data" / "torch_state_dicts.json"
    path.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
