"""What torch's GradScaler costs over torch's own steps. Run by a Python that has torch, and nothing else of ours."""

import json
import statistics
import sys
import time

import torch

SHAPES = {
    "16 layers of 512, batch 256": (16, 512, 256),
    "100 of 256, batch 32": (100, 256, 32),
    "16 of 1024, batch 32": (16, 1024, 32),
}


def make(layers, width, batch, scaling, clipping):
    """Returns a function that takes one step of AdamW."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    model, x = torch.nn.Sequential(*parts), torch.randn(batch, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scaling)

    def step():
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if clipping:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e4)
        scaler.step(optimizer)
        scaler.update()

    return step


def measure(shape, seconds):
    """Times the ways in turns; ratios are to the clipped step, as everywhere, and to the bare one."""
    ways = {"bare": (False, False), "clipped": (False, True), "GradScaler": (True, False)}
    turns = {name: make(*shape, *way) for name, way in (ways | {"GradScaler, clipping": (True, True)}).items()}
    taken = {name: [] for name in turns}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken["bare"]) < 7:
        for name, step in turns.items():
            start = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - start)
    figures = {}
    for name, times in taken.items():
        times = times[2:]
        figures[name] = {"ms": round(1e3 * statistics.median(times), 3), "rounds": len(times)}
        for floor, key in (("clipped", "ratio"), ("bare", "ratio_to_bare")):
            ratios = [own / base for own, base in zip(times, taken[floor][2:], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            figures[name] |= {key: round(middle, 3), f"{key}_quartiles": [round(low, 3), round(high, 3)]}
    return figures


if __name__ == "__main__":
    steps = {name: measure(shape, float(sys.argv[1])) for name, shape in SHAPES.items()}
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "steps": steps}))
