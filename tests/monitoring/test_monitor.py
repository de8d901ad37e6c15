"""metrics returns the state; RunMonitor hears a run that is stuck, and names the cause of its skips.

warn_after_skips reports skips from inside a program.
"""

import collections
import concurrent.futures
import copy
import functools
import os
import pathlib
import pickle
import re
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jmpscale

import meshes
import reference
from compiling import FAST
from tables import names, rows

INF, NAN = np.inf, np.nan

# --- metrics are the arrays of the state ---


def test_metrics_are_the_arrays_of_the_state(variant):
    state = jmpscale.update(jmpscale.dynamic(1024.0), False)
    logged = variant(jmpscale.metrics)(state)
    expected = reference.step(state.config, reference.INITIAL | {"loss_scale": 1024.0}, finite=False)
    assert {name: value.item() for name, value in logged.items()} == expected
    assert all(isinstance(value, jax.Array) for value in logged.values())


def test_metrics_of_an_optimizer_state_contain_the_norm():
    opt_state = jmpscale.WithLossScalingState(jmpscale.dynamic(), (), jnp.float32(5.0))
    for state in ([opt_state], jax.tree.map(nnx.Variable, opt_state)):
        logged = jmpscale.metrics(state)
        assert (logged["grad_norm"], logged["loss_scale"]) == (5.0, 2.0**16)
    assert "grad_norm" not in jmpscale.metrics(opt_state._replace(grad_norm=None))


# --- RunMonitor names the cause of the skips in one state ---

DYNAMIC = jmpscale.dynamic(8.0)


def _is_scaler(x):
    return isinstance(x, jmpscale.ScalerState)


def _stuck(**fields):
    fields = {"total_steps": 99, "total_skips": 5, "consecutive_skips": 3, "last_skip_reason": 1} | fields
    return DYNAMIC._replace(**{name: np.asarray(x, getattr(DYNAMIC, name).dtype) for name, x in fields.items()})


STUCK = _stuck()
ROUNDED_LIMIT = _stuck(loss_scale=0.3)._replace(config=jmpscale.ScalerConfig(min_scale=0.3))
DIAGNOSES = {  # the tree, and the words of the diagnosis; if several apply, the first is given
    "scale-nan": (_stuck(loss_scale=NAN, last_skip_reason=2), "the loss scale is nan.*The loss scale is invalid"),
    "scale-zero": (_stuck(loss_scale=0.0), "the loss scale is 0.*The loss scale is invalid"),
    "scale-large": (_stuck(loss_scale=2.0**126 * 1.5), "The loss scale is invalid"),
    "scale-largest": (_stuck(loss_scale=2.0**126), "The scale is still backing off"),
    "loss": (_stuck(last_skip_reason=2), "the loss that was passed was not finite.*diagnose with the same batch names"),
    "limit": (
        _stuck(loss_scale=1.0, total_skips=3),
        "cannot back off any further.*by a different scaler.*inverted.*diagnose with such a.*decrease min_scale",
    ),
    "rounded-limit": (ROUNDED_LIMIT, r"the loss scale is 0\.3\. .*cannot back off any further"),
    "static": (
        STUCK._replace(config=jmpscale.static(8.0).config),
        "static and does not back off.*diagnose with the same batch prints the scales.*to scaled_backward",
    ),
    "start": (_stuck(total_skips=3), r"\(3 in total\).*the first skips of this run.*scales that fit, for init_scale"),
    "backing-off": (STUCK, r"\(5 in total\); the loss scale is 8\. .*is still backing off\. Allow.*diagnose names"),
}


def _raise_if_stuck(*states, limit=2):
    monitor = jmpscale.RunMonitor(max_consecutive_skips=limit)
    for state in states:
        monitor.raise_if_stuck(state)


@pytest.mark.parametrize("leaf", [jnp.asarray, np.asarray, np.ndarray.item], ids=["jax", "numpy", "python"])
@pytest.mark.parametrize("name", DIAGNOSES)
def test_run_monitor_names_the_cause(name, leaf):
    tree, words = DIAGNOSES[name]
    tree = jax.tree.map(lambda x: jax.tree.map(leaf, x) if _is_scaler(x) else x, tree, is_leaf=_is_scaler)
    with pytest.raises(FloatingPointError, match=f"^3 consecutive steps were skipped .*{words}"):
        _raise_if_stuck(tree, limit=2)
    _raise_if_stuck(tree, limit=3)


ENDS = {  # a state at the end of a run, and whether the first call of a monitor raises, which allows 10 skips
    "most skipped": (_stuck(total_steps=30, total_skips=20, last_skip_reason=2, loss_scale=2.0**32), True),
    "half skipped": (_stuck(total_steps=40, total_skips=20, last_skip_reason=2, loss_scale=2.0**32), False),
    "few steps": (_stuck(total_steps=14, total_skips=10, last_skip_reason=2, loss_scale=2.0**32), False),
    "after an initial backoff of 19": (_stuck(total_steps=30, total_skips=20, loss_scale=2.0**13), False),
    "at min_scale, with others": (_stuck(total_steps=999, total_skips=99, last_skip_reason=3, loss_scale=1.0), False),
    "static": (STUCK._replace(config=jmpscale.static(8.0).config, total_steps=21, total_skips=11), True),
}


@pytest.mark.parametrize("name", ENDS)
def test_run_monitor_judges_a_whole_run_at_its_first_call(name):
    state, is_stuck = ENDS[name]
    if not is_stuck:
        _raise_if_stuck(state, limit=10)
        return
    words = (
        rf"^{state.total_skips} of the last {state.total_steps} steps were skipped .*read step_applied of the scaler"
    )
    with pytest.raises(FloatingPointError, match=words):
        _raise_if_stuck(state, limit=10)


# --- RunMonitor hears each run that is stuck, and no other ---


class _Run:
    """A training run of one scaler, by the rule of update in plain Python."""

    def __init__(self, scaler):
        self.config, self.now = scaler.config, {name: getattr(scaler, name).item() for name in reference.FIELDS}

    def step(self, outcome):
        """Takes an applied step ("."), or skips one because of the gradients ("G") or of the loss ("L")."""
        self.now = reference.step(self.config, self.now, outcome == ".", outcome != "L")

    @property
    def state(self):
        dtypes = {"loss_scale": np.float32}
        return jmpscale.ScalerState(
            **{name: np.array(x, dtypes.get(name, np.int32)) for name, x in self.now.items()}, config=self.config
        )


def _above(largest, *, loss=0.0, overflow=0.0):
    """Returns outcomes of steps: an overflow above a scale, and at random, and a loss that is not finite at random."""
    random = np.random.default_rng(0)

    def outcome(step, scale):
        if scale > largest or random.random() < overflow:
            return "G"
        return "L" if random.random() < loss else "."

    return outcome


def _calls(outcome, scaler=None, *, steps=3000, every=100, updates=1):
    """Yields the states at the calls in a loop of `steps` iterations of `updates` steps each."""
    run = _Run(jmpscale.dynamic() if scaler is None else scaler)
    for i in range(steps if callable(outcome) else len(outcome)):
        for _ in range(updates):
            run.step(outcome(i, run.now["loss_scale"]) if callable(outcome) else outcome[i])
        if i % every == 0:
            yield run.state


def _resumed(steps_before, scaler, *, seen=False):
    """A run that resumes from a checkpoint, after the monitor has perhaps seen a new scaler."""
    run = _Run(scaler)
    if seen:
        yield run.state
    for _ in range(steps_before):
        run.step("G" if run.now["loss_scale"] > 2.0**12 else ".")
    yield from _calls(_above(2.0**12), run.state)


def _rolled_back(rollbacks):
    """A loop that restores a checkpoint of 990 steps ago, and later repeats it."""
    run, saved = _Run(jmpscale.dynamic(growth_interval=50)), None
    for i in range(1000 * (rollbacks + 2)):
        run.step("G" if run.now["loss_scale"] > 2.0**12 else ".")
        saved = run.now if i % 1000 == 0 else saved
        if i % 1000 == 990 and i < 1000 * rollbacks:
            run.now = saved
        if i % 100 == 0:
            yield run.state


def _epochs(steps, every, outcome, *, new_scaler):
    run = _Run(jmpscale.dynamic(2.0**12))
    for _ in range(40):
        run = _Run(jmpscale.dynamic(2.0**12)) if new_scaler else run
        for i in range(steps):
            run.step(outcome(i))
            if i % every == 0:
                yield run.state


def _population(members, outcome, exploit=None, steps=6000):
    """Runs of which the first is replaced by the second, scaler included, as in population-based training."""
    runs = [_Run(scaler) for scaler in members]
    for i in range(steps):
        for k, run in enumerate(runs):
            run.step(outcome(k, i, run.now["loss_scale"]))
        if i == exploit:
            runs[0].now = runs[1].now
        if i % 100 == 0:
            yield jax.tree.map(lambda *fields: np.stack(fields), *(run.state for run in runs))


def _touches_min_scale(first, interval, steps):
    """Overflows of a burst that takes the scale to min_scale for a moment."""
    calm = _above(2.0**12)
    scaler = jmpscale.dynamic(2.0**12, growth_interval=interval)
    return _calls(lambda i, scale: "G" if first <= i < first + 14 else calm(i, scale), scaler, steps=steps)


SHORT = jmpscale.dynamic(growth_interval=200)
BELOW = jmpscale.dynamic(2.0**12)
NO_FIT = jmpscale.dynamic(2.0**4, growth_interval=100)
SHORT_INTERVAL = jmpscale.dynamic(growth_interval=100)
HEALTHY = {
    "settles": lambda: _calls(_above(2.0**12)),
    "growth after 20 steps": lambda: _calls(_above(2.0**12), jmpscale.dynamic(growth_interval=20)),
    "growth in each step": lambda: _calls(_above(2.0**12), jmpscale.dynamic(growth_interval=1), every=99),
    "growth by 1.001": lambda: _calls(_above(2.0**12), jmpscale.dynamic(growth_factor=1.001, growth_interval=1)),
    "backoff by 2^-26 with gaps": lambda: _calls(
        lambda i, scale: "G" if scale > 2.0**5 and i % 3 < 2 else ".", jmpscale.dynamic(2.0**32), every=10
    ),
    "hysteresis": lambda: _calls(_above(2.0**12), jmpscale.dynamic(2.0**24, hysteresis=2, growth_interval=100)),
    "hysteresis with gaps": lambda: _calls(
        lambda i, scale: "G" if scale > 2.0**12 and i % 5 < 4 else ".",
        jmpscale.dynamic(2.0**120, max_scale=2.0**120, hysteresis=4, hysteresis_reset="finite"),
    ),
    "hysteresis 4, reset by finite steps": lambda: _calls(
        _above(2.0**12), jmpscale.dynamic(hysteresis=4, hysteresis_reset="finite", growth_interval=100)
    ),
    "static, 1% overflow": lambda: _calls(_above(INF, overflow=0.01), jmpscale.static(2.0**10)),
    "30% of the losses": lambda: _calls(_above(2.0**14, loss=0.3), BELOW, steps=10_000),
    "one loss in two": lambda: _calls(lambda i, scale: ".L"[i % 2], BELOW, every=10),
    "at max_scale": lambda: _calls(_above(2.0**18), jmpscale.dynamic(max_scale=2.0**16), every=1000, steps=8000),
    "max_scale of the user": lambda: _calls(_above(INF), jmpscale.dynamic(max_scale=2.0**24, growth_interval=100)),
    "2^32 from the start": lambda: _calls(_above(INF), jmpscale.dynamic(2.0**32, growth_interval=100)),
    "2^32 after a skip": lambda: _calls("." * 99 + "G" + "." * 2900, SHORT_INTERVAL),
    "2^32 after an overflow and a NaN loss": lambda: _calls("." * 99 + "GL" + "." * 2900, SHORT_INTERVAL),
    "2^32 after an overflow between NaN losses": lambda: _calls("LGL" + "." * 2900, SHORT_INTERVAL),
    "2^32 after an overflow and a NaN loss before the first call": lambda: list(
        _calls("GL" + "." * 2900, SHORT_INTERVAL, every=10)
    )[1:],
    "2^32 after an overflow without a backoff": lambda: _calls(
        "." * 150 + "GL" + "." * 2900, jmpscale.dynamic(growth_interval=100, hysteresis=2)
    ),
    "counters at their limit": lambda: _calls(
        _above(INF), BELOW._replace(total_steps=np.int32(2**31 - 300), finite_steps=np.int32(2**31 - 300))
    ),
    "320 updates between calls": lambda: _calls(_above(2.0**12), SHORT, steps=200, every=5, updates=320),
    "20 updates between calls, at max_scale": lambda: _calls(
        _above(2.0**18), jmpscale.dynamic(max_scale=2.0**16), steps=200, every=1, updates=20
    ),
    "one update in 5 iterations": lambda: _calls(_above(2.0**12), every=20, steps=600),
    "a call in each step": lambda: _calls(_above(2.0**12), steps=600, every=1),
    "100,000 steps, then min_scale for a moment": lambda: _touches_min_scale(20_010, 200, 25_000),
    "100,000 steps at min_scale": lambda: _calls(
        lambda i, scale: "G" if scale > 1.0 or i == 100_000 else ".",
        jmpscale.dynamic(growth_interval=1000),
        steps=110_000,
        every=1000,
    ),
    "1% overflow at min_scale": lambda: _calls(_above(1.0, overflow=0.01), jmpscale.dynamic(1.0), steps=8000),
    "1% overflow at the only scale": lambda: _calls(
        _above(INF, overflow=0.01), jmpscale.dynamic(8.0, min_scale=8.0, max_scale=8.0), steps=8000
    ),
    "1% overflow at min_scale, rare calls": lambda: _calls(
        _above(1.0, overflow=0.01), jmpscale.dynamic(1.0), steps=12_000, every=6000
    ),
    "min_scale twice, with NaN losses between": lambda: _calls(
        lambda i, scale: "G" if scale > 2.0**12 or 585 <= i <= 600 else ".L"[i % 6 == 0],
        jmpscale.dynamic(1.0, growth_interval=20),
        steps=1000,
    ),
    "resumed": lambda: _resumed(30_000, jmpscale.dynamic(growth_interval=20)),
    "restored after the first call": lambda: _resumed(30_000, SHORT_INTERVAL, seen=True),
    "two rollbacks": lambda: _rolled_back(2),
    "four rollbacks": lambda: _rolled_back(4),
    "epochs": lambda: _epochs(90, 30, lambda i: ".", new_scaler=False),
    "an epoch of a new scaler": lambda: [*_calls(_above(2.0**12), steps=500), *_calls(_above(2.0**12), steps=400)],
    "other settings": lambda: [
        *_calls("." * 101, every=10),
        *_calls("." * 101, jmpscale.static(8.0), every=10),
        *_calls("." * 101, every=10),
    ],
    "three hooks": lambda: (state for state in _calls(_above(2.0**12), steps=600) for _ in range(3)),
    "three calls at the end": lambda: [list(_calls(_above(2.0**12)))[-1]] * 3,
    "invalid scales": lambda: [_stuck(loss_scale=scale, consecutive_skips=0) for scale in (8.0, 0.0, NAN)],
    "population": lambda: _population(
        [SHORT] * 3, lambda k, i, scale: "G" if scale > 2.0 ** (30, 12, 13)[k] else ".", exploit=5000
    ),
    "population with noise": lambda: _population(
        [SHORT] * 3, lambda k, i, scale: "G" if scale > 2.0**12 else ".L"[k == 1 and i % 50 == 0], exploit=5500
    ),
    "one member is not trained": lambda: (
        jax.tree.map(lambda *fields: np.stack(fields), BELOW, state) for state in _calls(_above(2.0**12))
    ),
    "disabled": lambda: [jmpscale.disabled()] * 20,
    "empty batch": lambda: [jax.tree.map(lambda x: np.zeros((0,), x.dtype), BELOW)] * 20,
}
LOST, GROWN = "At 3 calls total_steps of the scaler had not risen", r"The loss scale has grown to its limit, 2\^32,"
LOSS, NO_BACKOFF = "the loss that was passed was not finite", "The scale is static and does not back off"
NO_LIMIT = "at the smallest allowed scale .*cannot back off any further"
UNHEALTHY = {  # the run, and what the monitor says
    "all losses": (lambda: _calls("L" * 400), f"^101 consecutive steps were skipped .*{LOSS}"),
    "60% of the losses": (lambda: _calls(_above(2.0**13, loss=0.6), BELOW), f"of the last 100 steps .*{LOSS}"),
    "60% of the losses, late": (
        lambda: _calls(lambda i, scale: "." if i < 1000 else ".LLL."[i % 5], SHORT),
        rf"^60 of the last 100 steps were skipped \(60 in total\); .*{LOSS}",
    ),
    "60% of the losses, a call after 10 steps": (
        lambda: _calls(lambda i, scale: ".LLL."[i % 5], BELOW, every=10),
        f"of the last .* steps were skipped .*{LOSS}",
    ),
    "60% of the losses, 20 updates between calls": (
        lambda: _calls(lambda i, scale: ".LLL."[i % 5], BELOW, updates=20, every=7),
        f"^100 of the last 140 steps .*{LOSS}",
    ),
    "60% of the losses, 320 updates between calls": (
        lambda: _calls(_above(2.0**14, loss=0.6), SHORT, updates=320, every=1),
        f"of the last (2|3)..? steps .*{LOSS}",
    ),
    "losses and overflows": (lambda: _calls("LL.G" * 700, jmpscale.dynamic(2.0**32)), f"^150 of the last 200 .*{LOSS}"),
    "70% overflow at a static scale": (
        lambda: _calls(_above(INF, overflow=0.7), jmpscale.static(8.0)),
        f"of the last 100 steps .*{NO_BACKOFF}",
    ),
    "60% overflow at each scale, hysteresis": (
        lambda: _calls(_above(2.0**32, overflow=0.6), jmpscale.dynamic(2.0**12, hysteresis=2)),
        "of the last .* steps were skipped .*cannot back off any further",
    ),
    "hysteresis that finite steps reset": (
        lambda: _calls(".GGG" * 700, jmpscale.dynamic(hysteresis=4, hysteresis_reset="finite")),
        "of the last 100 steps were skipped .*The scale is still backing off",
    ),
    "a third overflows at each scale": (lambda: _calls("G.." * 1000, SHORT), f"^67 of the last 200 .*{NO_LIMIT}"),
    "a twentieth overflows at each scale": (
        lambda: _calls(lambda i, scale: ".G"[i % 20 == 0], NO_FIT),
        rf"^65 of the last 1300 steps were skipped {NO_LIMIT}",
    ),
    "a tenth overflows at min_scale, late": (
        lambda: _calls(lambda i, scale: ".G"[bool(scale > 1.0) or (i > 5000 and i % 10 == 0)], NO_FIT, steps=7000),
        f"^67 of the last 1300 steps were skipped {NO_LIMIT}",
    ),
    "epochs": (
        lambda: _epochs(90, 30, lambda i: "L."[i % 10 == 0], new_scaler=False),
        f"^54 of the last 60 steps .*{LOSS}",
    ),
    "a member": (
        lambda: _population([BELOW] * 2, lambda k, i, scale: ".L"[k == 1 and i % 3 > 0]),
        f"^67 of the last 100 steps .*{LOSS}",
    ),
    "a population after an exchange": (
        lambda: _population([BELOW] * 2, lambda k, i, scale: ".L"[k == 0 and i > 3000 and i % 3 > 0], exploit=2000),
        f"of the last 100 steps .*{LOSS}",
    ),
    "NaN scale": (lambda: _calls("G" * 400, BELOW._replace(loss_scale=np.float32(NAN))), "The loss scale is invalid"),
    "never returned": (lambda: [BELOW] * 10, f"{LOST} since the call before, and it never exceeded 0 between them"),
    "lost after 500 steps": (lambda: [*_calls("." * 500), *[_stuck(total_steps=500, consecutive_skips=0)] * 4], LOST),
    "a new scaler in each epoch": (lambda: _epochs(50, 10, lambda i: ".", new_scaler=True), f"{LOST} .*exceeded 41 "),
    "a new scaler, a call in each epoch": (
        lambda: _epochs(50, 50, lambda i: ".", new_scaler=True),
        f"{LOST} .*exceeded 1 .*Create it once, not in each epoch",
    ),
    "a new scaler in each epoch, other calls": (
        lambda: list(_epochs(50, 1, lambda i: ".", new_scaler=True))[::7],
        f"{LOST} .*exceeded 50 ",
    ),
    "a batch is lost": (lambda: [jax.tree.map(lambda x: np.stack([x] * 3), BELOW)] * 10, LOST),
    "grows to 2^32": (lambda: _calls(_above(INF), SHORT_INTERVAL), GROWN),
    "grows to 2^32 in each step": (lambda: _calls(_above(INF), jmpscale.dynamic(growth_interval=1), every=10), GROWN),
    "grows to 2^32, default interval": (lambda: _calls(_above(INF), steps=33_000, every=500), f"{GROWN}.*2\\.0.*60"),
    "grows to 2^32 after a NaN loss": (lambda: _calls("...L" + "." * 2900, SHORT_INTERVAL), GROWN),
    "grows to 2^32 after a NaN loss before the first call": (lambda: _calls("L" + "." * 2900, SHORT_INTERVAL), GROWN),
    "grows to 2^32 with NaN losses": (lambda: _calls(_above(INF, loss=0.1), SHORT_INTERVAL), GROWN),
    "grows to 2^32 after another run": (
        lambda: [*_calls("G" + "." * 200, SHORT_INTERVAL), *_calls("." * 2900, SHORT_INTERVAL)],
        GROWN,
    ),
    "grows by 1.5 with NaN losses": (
        lambda: _calls(_above(INF, loss=0.1), jmpscale.dynamic(growth_factor=1.5, growth_interval=20)),
        GROWN,
    ),
    "grows by 1.5": (
        lambda: _calls(_above(INF), jmpscale.dynamic(growth_factor=1.5, growth_interval=100), steps=6000),
        GROWN,
    ),
}


def _watch(states, limit=50):
    """Calls a monitor with each state, and returns what it says."""
    monitor = jmpscale.RunMonitor(max_consecutive_skips=limit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for state in states:
                monitor.raise_if_stuck(state)
        except FloatingPointError as error:
            return [str(error)]
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("states", rows(HEALTHY))
def test_run_monitor_accepts_a_healthy_run(states):
    assert _watch(states()) == []


@pytest.mark.parametrize(("states", "words"), [pytest.param(*row, id=name) for name, row in UNHEALTHY.items()])
def test_run_monitor_hears_a_run_that_is_stuck(states, words):
    [message] = _watch(states())
    assert re.search(words, message), message
    assert ("read step_applied of the scaler after each step" in message) == (" of the last " in message)


WITHOUT_STEPS = {  # loops that take no step between some calls, as those that lose the state seem to do
    "a call in each micro-batch": lambda: (state for state in _calls("." * 12, BELOW, every=1) for _ in range(8)),
    "a network that is trained at times": lambda: _epochs(90, 30, lambda i: ".", new_scaler=True),
    "two batches of scalers": lambda: [*[BELOW] * 5, *[jax.tree.map(lambda x: np.stack([x] * 3), BELOW)] * 5],
}


@pytest.mark.parametrize("states", rows(WITHOUT_STEPS))
def test_run_monitor_says_once_that_the_state_may_be_lost(states):
    [message] = _watch(states())
    assert re.search(f"{LOST} .*Ignore this if no step was taken .*not trained yet, or gradients are accum", message)


def test_run_monitor_is_called_from_several_threads():
    """Each thread takes steps and calls the monitor, at times later than another thread with a later state."""
    monitor, run, lock = jmpscale.RunMonitor(max_consecutive_skips=50), _Run(BELOW), threading.Lock()

    def call(_):
        for _ in range(100):
            with lock:
                run.step(".")
                state = run.state
            monitor.raise_if_stuck(state)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            list(threads.map(call, range(8)))  # raises the errors and warnings of the threads
    finally:
        sys.setswitchinterval(interval)
    assert run.state.total_steps == BELOW.total_steps + 800


COPIES = {
    "pickle": lambda monitor: pickle.loads(pickle.dumps(monitor)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("copied", rows(COPIES))
def test_run_monitor_remembers_its_calls_in_a_copy(copied):
    monitor = jmpscale.RunMonitor(max_consecutive_skips=2)
    monitor.raise_if_stuck(_stuck(total_steps=5000, total_skips=5, consecutive_skips=0, last_skip_reason=2))
    later = _stuck(total_steps=5009, total_skips=11, consecutive_skips=1, last_skip_reason=2)
    with pytest.raises(FloatingPointError, match=r"^6 of the last 9 steps were skipped"):
        copied(monitor).raise_if_stuck(later)


# Random runs: at most 2% of the steps are skipped, or at least 65%.


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(12, 50))])
@pytest.mark.parametrize("is_stuck", [False, True])
def test_run_monitor_tells_random_runs_apart(seed, is_stuck):
    random = np.random.default_rng(seed)
    settings = {
        "growth_interval": int(random.choice([20, 200, 2000])),
        "hysteresis": int(random.choice([1, 1, 2, 4])),
        "hysteresis_reset": str(random.choice(["growth", "finite"])),
        "backoff_factor": float(random.choice([0.5, 0.25])),
        "growth_factor": float(random.choice([2.0, 1.5])),
        "min_scale": 2.0**-20,
        "max_scale": 2.0**24,
    }
    scaler = jmpscale.static(2.0**12) if seed % 3 == 0 else jmpscale.dynamic(2.0**12, **settings)
    limit = max(int(random.choice([5, 20, 50])), 4 * scaler.config.hysteresis)
    every = int(random.choice([1, 7, 50, 100, 333]))
    rate = float(random.uniform(0.65, 0.97) if is_stuck else random.uniform(0, 0.02))
    outcome = _above(2.0**13, **{str(random.choice(["loss", "overflow"])): rate})
    pinned = False

    def states():
        nonlocal pinned
        for state in _calls(outcome, scaler, every=every):
            pinned |= bool(state.loss_scale == 2.0**-20)
            yield state

    heard = _watch(states(), limit)
    if is_stuck:
        assert " steps were skipped" in heard[0]
    elif heard:  # overflows at every scale have taken the scale to its lower limit, where it trains nothing
        assert pinned
        assert "steps were skipped at the smallest allowed scale" in heard[0]


# --- RunMonitor in training loops ---


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("wraps_multi_steps", [True, False])
def test_run_monitor_accepts_gradient_accumulation(wraps_multi_steps):
    """The wrapper updates its scaler with each micro-batch; a loop that sums gradients itself does so after four."""
    inner = optax.MultiSteps(optax.sgd(0.1), 4) if wraps_multi_steps else optax.sgd(0.1)
    tx = jmpscale.with_loss_scaling(inner)
    update = jax.jit(lambda grads, opt_state: tx.update(grads, opt_state, 1.0, value=grads)[1])
    opt_state, monitor = tx.init(1.0), jmpscale.RunMonitor(max_consecutive_skips=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for micro_batch in range(60):
            if wraps_multi_steps or micro_batch % 4 == 3:
                opt_state = update(jnp.float32(1.0), opt_state)
            if micro_batch % 4 == 3:
                monitor.raise_if_stuck(opt_state)
    assert caught == []
    assert opt_state.scaler.total_steps == (60 if wraps_multi_steps else 15)


def _put_back_by_step(tx):
    """Flax's ImageNet example selects the old state after an overflow, which with the wrapper keeps the scale."""

    def step(opt_state, grads):
        new, finite = tx.update(grads, opt_state)[1], jmpscale.all_finite(grads)
        return jax.tree.map(functools.partial(jnp.where, finite), new, opt_state)

    return step


def _skipped_by_loop(tx):
    """coix skips non-finite steps itself, and does not call the optimizer."""

    def step(opt_state, grads):
        return jax.lax.cond(jnp.isfinite(grads), lambda: tx.update(grads, opt_state)[1], lambda: opt_state)

    return step


def _lost_by_step(tx):
    return lambda opt_state, grads: (tx.update(grads, opt_state), opt_state)[1]


LOOPS = {  # the step, the scaler, and the number of finite steps at first
    "lost": (_lost_by_step, jmpscale.dynamic(), 0),
    "lost, static": (_lost_by_step, jmpscale.static(8.0), 0),
    "put back": (_put_back_by_step, jmpscale.dynamic(8.0, growth_interval=20), 75),
    "skipped by the loop": (_skipped_by_loop, jmpscale.dynamic(8.0, growth_interval=20), 90),
}


@pytest.mark.parametrize("name", LOOPS)
def test_run_monitor_warns_of_a_loop_that_loses_the_state(name):
    create, scaler, finite_steps = LOOPS[name]
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), scaler)
    step, opt_state = jax.jit(create(tx)), tx.init(1.0)

    def states():
        state = opt_state
        for i in range(200):
            state = step(state, np.float32(1.0 if i < finite_steps else INF))
            if i % 10 == 0:
                yield state

    [message] = _watch(states())
    assert message.startswith(f"{LOST} since the call before, and it never exceeded {finite_steps} between them")
    assert "Do not put back the old state" in message
    assert "warn_if_not_finite=True" in message


OPTIMIZERS = {  # an optimizer, and whether its state has averages of the gradients
    "adam": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), True),
    "momentum": (optax.sgd(1e-3, momentum=0.9), True),
    "sgd": (optax.sgd(1e-3), False),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("wraps", [False, True], ids=["arrays", "NNX"])
@pytest.mark.parametrize("name", names(OPTIMIZERS, {"momentum"}))
def test_run_monitor_accepts_a_scale_that_grows_to_its_limit_for_tiny_gradients(name, wraps):
    inner, has_averages = OPTIMIZERS[name]
    tx = jmpscale.with_loss_scaling(inner, jmpscale.dynamic(2.0**28, growth_interval=10))
    update = jax.jit(lambda grads, opt_state: tx.update(grads, opt_state)[1])

    def states(gradient):
        opt_state = tx.init({"w": jnp.zeros(2)})
        for i in range(100):
            opt_state = update({"w": jnp.float32([gradient, 0.0])}, opt_state)
            if i % 10 == 0:
                yield jax.tree.map(nnx.Variable, opt_state) if wraps else opt_state

    assert len(_watch(states(1e-3))) == 1
    assert len(_watch(states(-1e-6))) == (not has_averages)


INNER = jmpscale.with_loss_scaling(optax.adam(1e-3))
AROUND = {  # an optimizer around the wrapper, and the words of the warning, or None for a right one
    "MultiSteps": (optax.MultiSteps(INNER, 2), "inside optax.MultiSteps"),
    "masked": (optax.masked(INNER, {"a": True, "b": False}), "inside optax.masked or optax.partition"),
    "partition": (
        optax.partition({"a": INNER, "b": optax.adam(1e-3)}, {"a": "a", "b": "b"}),
        "inside optax.masked or optax.partition",
    ),
    "apply_if_finite": (optax.apply_if_finite(INNER, 5), "inside optax.apply_if_finite"),
    "frozen": (optax.partition({"a": INNER, "b": optax.set_to_zero()}, {"a": "a", "b": "b"}), None),
    "inside": (jmpscale.with_loss_scaling(optax.MultiSteps(optax.adam(1e-3), 2)), None),
}


@pytest.mark.guards
@pytest.mark.parametrize("read", [jmpscale.metrics, _raise_if_stuck], ids=["metrics", "RunMonitor"])
@pytest.mark.parametrize("name", AROUND)
def test_monitoring_warns_of_a_wrapper_inside_another_transformation(name, read):
    tx, words = AROUND[name]
    opt_state = tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(opt_state)
    assert [words in str(warning.message) for warning in caught] == [True] * (words is not None)


# --- warn_after_skips reports from the program, once per streak ---

# Three skips, a finite step, four skips, and two finite steps.
FINITE = [False] * 3 + [True] + [False] * 4 + [True] * 2
GRADS = np.where(FINITE, np.float32(1.0), np.float32(np.inf))
TX = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(2.0**20), warn_after_skips=3)


def _step(opt_state, grad):
    return TX.update(grad, opt_state)[1]


def _loop(step, opt_state, grads):
    for grad in grads:
        opt_state = step(opt_state, grad)
    return opt_state


def _scan(opt_state, grads):
    return jax.lax.scan(lambda state, grad: (_step(state, grad), None), opt_state, grads)[0]


def _replicated(opt_state, grads):
    return jax.device_put((opt_state, grads), jax.NamedSharding(meshes.make_mesh(d=8), P()))


def _scan_on_each_device(*args):
    return jax.jit(jax.shard_map(_scan, mesh=meshes.make_mesh(d=8), in_specs=P(), out_specs=P()))(*args)


PROGRAMS = {  # a training loop, and the number of times that it reports each of the two streaks
    "outside jit": (functools.partial(_loop, _step), 1),
    "jit": (functools.partial(_loop, jax.jit(_step)), 1),
    "donated": (functools.partial(_loop, jax.jit(_step, donate_argnums=0)), 1),
    "scan": (jax.jit(_scan), 1),
    "replicated": (lambda *args: jax.jit(_scan)(*_replicated(*args)), 1),
    "shard_map": (_scan_on_each_device, 8),
}


def _warnings_of(run, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = jax.block_until_ready(run(*args))
    return state, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("program", rows(PROGRAMS, {"outside jit", "donated", "replicated"}))
def test_wrapper_warns_once_per_streak(program):
    run, reports = program
    state, messages = _warnings_of(run, TX.init(1.0), GRADS)
    first = "3 consecutive steps were skipped (3 in total); the loss scale is 2^17. In the most recent skip"
    second = "3 consecutive steps were skipped (6 in total); the loss scale is 2^14. In the most recent skip"
    starts = [message[: len(first)] for message in sorted(messages)]  # devices report in any order
    assert starts == [first] * reports + [second] * reports
    assert sum("the first skips of this run" in message for message in messages) == reports
    expected, _ = _warnings_of(_loop, lambda state, grad: PLAIN.update(grad, state)[1], TX.init(1.0), GRADS)
    assert jax.tree.map(float, state) == jax.tree.map(float, expected)


PLAIN = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(2.0**20))


@pytest.mark.full
def test_wrapper_warns_of_each_member_of_an_ensemble():
    grads = np.stack([GRADS, np.ones_like(GRADS)], axis=1)
    run = jax.jit(lambda grads: _loop(jax.vmap(_step), jax.vmap(TX.init)(jnp.ones(2)), grads))
    state, messages = _warnings_of(run, grads)
    assert [message[:32] for message in messages] == ["3 consecutive steps were skipped"] * 2
    assert state.scaler.total_skips.tolist() == [7, 0]


# --- warn_after_skips is heard whatever a compiled loop returns: the compiler removes what no result depends on ---


def _in_scan(step, carry):
    return jax.lax.scan(lambda carry, _: (step(carry), carry[2]), carry, length=8)


def _in_fori_loop(step, carry):
    return jax.lax.fori_loop(0, 8, lambda _, carry: step(carry), carry), None


RETURNED = {  # what a training loop returns, from its last carry and from the losses of all steps
    "parameters": lambda carry, losses: carry[0],
    "losses": lambda carry, losses: carry[2] if losses is None else losses,
    "metrics": lambda carry, losses: jmpscale.metrics(carry[1])["total_skips"],
    "optimizer state": lambda carry, losses: carry[1].inner_state,
}
DEFAULT_RETURNED = {"metrics"}
WRONG_RUNS = {  # the scaler, the gradient divided by the parameters, and the warning
    "skips": (jmpscale.static(8.0), INF, "3 consecutive steps were skipped"),
    "growth": (jmpscale.dynamic(2.0**31, growth_interval=4), 1.0, "The loss scale has grown to its limit"),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("run", rows(WRONG_RUNS))
@pytest.mark.parametrize("returned", rows(RETURNED, default=DEFAULT_RETURNED))
@pytest.mark.parametrize("loop", [_in_scan, pytest.param(_in_fori_loop, marks=pytest.mark.full)])
def test_wrapper_warns_in_a_compiled_loop_that_does_not_return_the_scaler(loop, returned, run):
    scaler, factor, words = run
    tx = jmpscale.with_loss_scaling(optax.adam(0.1), scaler, warn_after_skips=3)

    def step(carry):
        params, opt_state, _ = carry
        updates, opt_state = tx.update(params * factor, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jnp.sum(params**2)

    @functools.partial(jax.jit, **FAST)
    def train(params, opt_state):
        return returned(*loop(step, (params, opt_state, jnp.float32(0.0))))

    _, messages = _warnings_of(train, jnp.ones(2), tx.init(jnp.ones(2)))
    assert [message[: len(words)] for message in messages] == [words]


def _decide_alone(tx, params, grads):
    """Takes steps on each device, whose decisions are its own, and returns the parameters."""
    opt_state = tx.init(params)
    for _ in range(3):
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)])
def test_wrapper_warns_on_each_device_that_decides_alone(check_vma):
    scaler, mesh = jmpscale.static(8.0), meshes.make_mesh(d=8)
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), scaler, axis_name=(), warn_after_skips=3)
    run = jax.shard_map(
        functools.partial(_decide_alone, tx), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma
    )
    grads = np.where(np.arange(8) < 2, np.float32(INF), np.float32(1.0))
    params, messages = _warnings_of(jax.jit(run, **FAST), np.ones(8, np.float32), grads)
    assert np.allclose(params, np.where(np.isinf(grads), 1.0, 0.7))
    assert [message[:32] for message in messages] == ["3 consecutive steps were skipped"] * 2


# --- warn_after_skips notices skips that are not consecutive, and a scale that only grows ---

STATIC = jmpscale.static(8.0)
GROWING = jmpscale.dynamic(2.0**31, growth_interval=4)
MANY = "3 of the last 4 steps were skipped"
SERIES = {  # the scaler, whether each step is finite, and how the warnings start, which count 3 skips
    "one in five": (STATIC, ([True] * 4 + [False]) * 5, []),
    "one in three": (STATIC, [True, True, False] * 8, []),
    "two in three": (STATIC, [True, False, False] * 4, [rf"{MANY} \(3 in total\); the loss scale is 8\. "]),
    "a pause of 15 steps": (
        STATIC,
        ([True, False, False] * 2 + [True] * 15) * 2,
        [rf"{MANY} \({n} in total\)" for n in (3, 7)],
    ),
    "long after many steps": (STATIC, [True] * 500 + [True, False, False] * 2, [MANY]),
    "after consecutive ones": (STATIC, [False] * 3 + [True, False] * 3, [r"3 consecutive steps were skipped \(3 in"]),
    "one in eight": (STATIC, ([True] * 7 + [False]) * 6, []),
    "backing off": (jmpscale.dynamic(2.0**20), [False, True, False] * 4, []),
    "after several growths": (
        jmpscale.dynamic(2.0**20, growth_interval=3),
        [False] + [True] * 12 + [False, True, False] * 2,
        [],
    ),
    "one in five at min_scale": (
        jmpscale.dynamic(1.0),
        ([True] * 4 + [False]) * 5,
        [r"3 of the last 11 steps were skipped at the smallest allowed scale \(3 in total\)"],
    ),
    "after each growth": (jmpscale.dynamic(2.0**20, growth_interval=4), ([True] * 4 + [False]) * 5, []),
    "limit": (GROWING, [True] * 12, [f"{GROWN} and no step was skipped because of its gradients"]),
    "limit after a skip": (GROWING, [False] + [True] * 16, []),
    "limit of the user": (jmpscale.dynamic(2.0, growth_interval=1, max_scale=4.0), [True] * 3, []),
    "limit from the start": (jmpscale.dynamic(2.0**32, growth_interval=1), [True] * 3, []),
    "static": (STATIC, FINITE, ["3 consecutive .*The scale is static and does not back off"] * 2),
    "at min_scale": (jmpscale.dynamic(2.0), FINITE, ["3 consecutive .*The scale cannot back off any further"] * 2),
    "disabled": (jmpscale.disabled(), FINITE, []),
}


def _loop_on_devices(step, opt_state, grads):
    """Three devices take the same steps, each a random number of steps ahead of the others."""
    states, remaining = [opt_state] * 3, [iter(grads) for _ in range(3)]
    for device in np.random.default_rng(0).permutation([0, 1, 2] * len(grads)):
        states[device] = step(states[device], next(remaining[device]))


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("devices", [3, pytest.param("jit", marks=pytest.mark.full)])
def test_wrapper_warns_of_many_skips_and_of_none(name, devices):
    scaler, finite, expected = SERIES[name]
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), scaler, warn_after_skips=3)
    grads = np.where(finite, np.float32(1.0), np.float32(np.inf))

    def step(state, grad):
        return tx.update(grad, state)[1]

    step = jax.jit(step) if devices == "jit" else step
    _, messages = _warnings_of(_loop_on_devices if devices == 3 else _loop, step, tx.init(1.0), grads)
    reports = collections.Counter(messages)
    assert set(reports.values()) <= {3 if devices == 3 else 1}
    assert all(re.match(words, message) for words, message in zip(expected, reports, strict=True)), messages


def test_wrapper_counts_the_skips_of_each_run():
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), STATIC, warn_after_skips=3)
    for _ in range(3):
        _, messages = _warnings_of(_loop, lambda state, grad: tx.update(grad, state)[1], tx.init(1.0), GRADS[3:6])
        assert messages == []


def test_wrapper_counts_skips_because_of_the_loss():
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), SHORT_INTERVAL, warn_after_skips=3)
    losses = np.where(([True] * 7 + [False]) * 3, np.float32(1.0), np.float32(np.nan))
    sparse, dense = losses, np.append([1.0] * 20, [np.nan, np.nan, 1.0] * 3)

    def step(state, loss):
        return tx.update(loss, state, value=loss)[1]

    assert _warnings_of(_loop, step, tx.init(1.0), sparse)[1] == []
    [message] = _warnings_of(_loop, step, tx.init(1.0), dense)[1]
    assert message.startswith(MANY)
    assert "the loss that was passed was not finite" in message


GROWN_IN_PROGRAM = {  # the losses of the first steps, the gradients of all, and whether the scale grows to its limit
    "a NaN loss": ([NAN], [1.0] * 9, True),
    "NaN losses between steps": ([NAN, 1.0, NAN, 1.0, 1.0, NAN], [1.0] * 12, True),
    "an overflow and a NaN loss": ([1.0, 1.0, NAN], [1.0, INF] + [1.0] * 12, False),
}


@pytest.mark.parametrize("row", rows(GROWN_IN_PROGRAM))
@pytest.mark.parametrize("devices", [3, pytest.param("jit", marks=pytest.mark.full)])
def test_wrapper_warns_of_a_scale_that_grows_to_its_limit_after_nan_losses(row, devices):
    first_losses, grads, grows = row
    losses = first_losses + [1.0] * (len(grads) - len(first_losses))
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), GROWING, warn_after_skips=3)

    def step(state, row):
        return tx.update(row[0], state, value=row[1])[1]

    step = jax.jit(step) if devices == "jit" else step
    run = _loop_on_devices if devices == 3 else _loop
    _, messages = _warnings_of(run, step, tx.init(1.0), np.array([grads, losses], np.float32).T)
    assert [bool(re.match(GROWN, message)) for message in messages] == [True] * grows * (3 if devices == 3 else 1)


# --- reports from a program never raise ---


def test_wrapper_with_warn_after_skips_is_pickled_by_value():
    """Programs that run functions in other processes, such as Ray and joblib, use cloudpickle."""
    cloudpickle = pytest.importorskip("cloudpickle")
    tx = cloudpickle.loads(cloudpickle.dumps(TX))
    _, messages = _warnings_of(_loop, lambda state, grad: tx.update(grad, state)[1], tx.init(1.0), GRADS)
    assert len(messages) == 2


# All devices need the loss of the others, so a device that raised would leave them waiting for ever.
WARNINGS_AS_ERRORS = """
import warnings

import jax
import jax.numpy as jnp
import jmpscale
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

tx = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(2.0**20), warn_after_skips=3)
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
loss_fn = jmpscale.scaled_backward(lambda w, x: jnp.mean(w * x), 2.0**8, warn_if_not_finite=WATCH)


@jax.jit
def step(w, opt_state, x):
    loss, grad = jax.value_and_grad(loss_fn)(w, x)
    updates, opt_state = tx.update(grad, opt_state, w, value=loss)
    return w + updates, opt_state


warnings.simplefilter("error", UserWarning)
w, x = put(jnp.float32(1.0), P()), put(jnp.ones(64).at[3].set(jnp.inf), P("d"))
opt_state = put(tx.init(w), P())
for _ in range(6):
    w, opt_state = step(w, opt_state, x)
print(int(opt_state.scaler.total_skips))
"""


@pytest.mark.full
@pytest.mark.parametrize("watch", [False, True])
def test_warnings_from_a_program_do_not_raise_on_one_of_its_devices(watch):
    command = [sys.executable, "-c", WARNINGS_AS_ERRORS.replace("WATCH", str(watch))]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    root = pathlib.Path(jmpscale.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=100, cwd=root)
    assert done.stdout == "6\n", done.stderr
    assert "3 consecutive steps were skipped (3 in total)" in done.stderr
    assert ("are not finite. If the training loop" in done.stderr) == watch


@pytest.mark.parametrize("compile", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
def test_wrapper_logs_a_warning_that_a_filter_makes_an_error(compile, caplog):
    step = compile(_step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if compile is jax.jit:
            jax.block_until_ready(_loop(step, TX.init(1.0), GRADS))
        else:  # no other device waits
            with pytest.raises(UserWarning, match=r"^3 consecutive steps"):
                _loop(step, TX.init(1.0), GRADS)
    assert [record.name for record in caplog.records] == ["jmpscale"] * 2 * (compile is jax.jit)
    assert all(record.message.startswith("3 consecutive steps") for record in caplog.records)


def test_step_without_warn_after_skips_has_no_callback():
    text = jax.jit(lambda state, grad: PLAIN.update(grad, state)).lower(PLAIN.init(1.0), 1.0).as_text()
    assert "callback" not in text
    assert "callback" in jax.jit(_step).lower(TX.init(1.0), 1.0).as_text()
