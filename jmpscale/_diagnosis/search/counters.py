"""Finds counters in half precision that will stop, by running the update where they do."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmpscale._base.memory import on_device
from jmpscale._base.types import is_narrow
from jmpscale._diagnosis.run.update_trials import UpdateTrials
from jmpscale._diagnosis.trace.program import Result


class Counter(NamedTuple):
    """A leaf to which each step adds the same number, until it is too small beside the leaf."""

    result: Result
    increment: float
    stop: float  # the value at which it stops


def find_counters(trials: UpdateTrials) -> list[Counter]:
    """Returns the counters that will stop.

    In float32, a counter grows by the same number at another value, with other data and with gradients of zeros, and a
    sum does not. As it is written, it does not grow there in two steps: in the second one, another leaf may add what
    rounding has removed.
    """
    found = {i: counter for i in range(len(trials.results)) if (counter := _find_increment(trials, i))}
    values = {i: trials.filled(i, counter.stop) for i, counter in found.items()}
    grown = trials.grown(values) if found else []
    found = {i: x for i, x in found.items() if _is_near(grown[i] - values[i], x.increment)}
    written = trials.after_two_steps(values) if found else []
    return [x for i, x in found.items() if bool((written[i] == values[i]).all())]


def _find_increment(trials: UpdateTrials, i: int) -> Counter | None:
    """Returns a leaf in half precision, all of whose values change by the same number, and away from zero."""
    result = trials.results[i]
    if not result.is_changed or not is_narrow(result):
        return None
    old = on_device(trials.old(result))
    changes = trials.reference[i] - old
    increment = float(changes.max(initial=-jnp.inf))
    if not increment or not math.isfinite(increment) or not _is_near(changes, increment):
        return None
    # Half of the distance between two numbers from here on is the increment, or more.
    stop = math.copysign(2.0 ** (jnp.finfo(result.dtype).nmant + 1 + math.ceil(math.log2(abs(increment)))), increment)
    is_reached = abs(stop) <= float(jnp.finfo(result.dtype).max) and bool((old * np.sign(stop) >= 0).all())
    return Counter(result, increment, stop) if is_reached else None


def _is_near(changes: Any, increment: float) -> bool:
    """Tests whether changes in float32 are one number, except for rounding."""
    return bool((jnp.abs(changes - increment) <= 1e-3 * abs(increment)).all())
