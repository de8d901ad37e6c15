"""Measures which loss scales fit: runs a step at powers of two, and compares its gradients with float32."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpscale._diagnosis.float32 import compiler_options, run_in_float32, widen
from jmpscale._diagnosis.measure import is_finite, is_zero, relative_error
from jmpscale._diagnosis.step import Step
from jmpscale._state import LARGEST_SCALE, SMALLEST_SCALE

# Gradients with a larger error are useless.
LARGEST_ERROR = 0.25
# A scale fits if no error exceeds the error at the best scale by more than this.
_TOLERANCE = 0.01
_ULP = 2.0**-22  # the relative change of the arguments by which rounding noise in float32 is recognized
_ROUNDING = 2.0**-10  # the relative change of the arguments that rounding to half precision makes, and some more

_LOWEST, _HIGHEST = round(math.log2(SMALLEST_SCALE)), round(math.log2(LARGEST_SCALE))


class Reference(NamedTuple):
    """The loss and the gradients in float32."""

    loss: jax.Array
    grads: list[jax.Array]
    finite: bool  # whether the loss and all gradients are finite
    decisive: list[bool]  # whether each gradient is more than rounding noise
    loss_rounding: float  # the change of the loss that follows from rounding the arguments to half precision


class Scales(NamedTuple):
    """What was measured.

    Attributes:
      loss: the loss as written.
      error: the largest error of a gradient at the present scale.
      errors: the largest error of a gradient for each power of two that was tried.
      fitting: the exponents of the smallest and largest scales that fit, or None.
      best: the exponent of a scale with finite gradients whose error is smallest; None if there is none.
    """

    loss: Any
    error: float
    errors: dict[int, float]
    fitting: tuple[int, int] | None
    best: int | None


def compile_in_float32(step: Step) -> Callable[[list[Any]], list[Any]]:
    """Returns a function of the arrays of a step that returns the loss and the gradients in float32, at scale 1."""
    run = jax.jit(
        lambda consts: run_in_float32(step.jaxpr, consts, [jnp.float32(1.0)]), compiler_options=compiler_options()
    )
    return lambda consts: run(_widened(consts))


def _widened(consts: list[Any]) -> list[Any]:
    return [widen(jnp.asarray(x)) for x in consts]


def run_reference(step: Step) -> Reference:
    """Computes the loss and the gradients in float32, at a scale of 1, and which gradients are rounding noise."""
    run, consts = compile_in_float32(step), _widened(step.consts)
    loss, *grads = run(consts)
    changed_loss, *changed_grads = run(_perturbed(consts))
    # The gradient of a bias before a normalization is zero. In a computed one there is only rounding noise, which the
    # smallest change of the arguments replaces by other noise.
    pairs = zip(grads, changed_grads, strict=True)
    return Reference(
        loss,
        grads,
        finite=all(map(is_finite, (loss, *grads))),
        decisive=[not is_zero(x) and relative_error(x, y) < LARGEST_ERROR for x, y in pairs],
        loss_rounding=relative_error(loss, changed_loss) / _ULP * _ROUNDING,
    )


@jax.jit
def _perturbed(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_perturb(x) if jnp.issubdtype(x.dtype, np.floating) else x for x in arrays]


def _perturb(x: jax.Array) -> jax.Array:
    """Changes values by about one unit in the last place, up or down, depending on their bits."""
    bits = jax.lax.bitcast_convert_type(x.astype(np.float32), np.int32)
    up = ((bits ^ (bits >> 7) ^ (bits >> 13)) & 1) == 1
    return x * jnp.where(up, 1 + _ULP, 1 - _ULP).astype(x.dtype)


def measure_scales(step: Step, scale: float, reference: Reference, progress: Callable[[str], None]) -> Scales:
    """Runs a step as written at powers of two, and compares the gradients with float32.

    Args:
      step: the step.
      scale: the present scale.
      reference: the gradients in float32.
      progress: a function that is called with a description of the work so far.
    """
    run = jax.jit(
        lambda consts, scale: jax.core.eval_jaxpr(step.jaxpr, consts, scale),
        compiler_options=compiler_options(),
    )
    errors: dict[int, np.ndarray | None] = {}

    @functools.cache
    def outputs_at(scale: float) -> tuple[Any, np.ndarray | None]:
        """Returns the loss and the error of each decisive gradient, or None if one is not finite."""
        loss, *grads = run(step.consts, np.float32(scale))
        if not all(map(is_finite, grads)):
            return loss, None
        decisive = zip(reference.grads, grads, reference.decisive, strict=True)
        return loss, np.array([relative_error(x, y) for x, y, decides in decisive if decides])

    def error(exponent: int) -> np.ndarray | None:
        if exponent not in errors:
            errors[exponent] = outputs_at(2.0**exponent)[1]
            progress(f"{len(errors)} runs at powers of two")
        return errors[exponent]

    loss, present = outputs_at(scale)
    fitting, best = search(error, round(math.log2(scale)))
    return Scales(loss, _largest(present), {k: _largest(errors[k]) for k in sorted(errors)}, fitting, best)


def _largest(errors: np.ndarray | None) -> float:
    return math.inf if errors is None else float(errors.max(initial=0.0))


def search(error: Callable[[int], np.ndarray | None], present: int) -> tuple[tuple[int, int] | None, int | None]:
    """Returns the exponents of the smallest and largest scales that fit, and the exponent of the best one.

    Args:
      error: returns the error of each gradient at a power of two, or None if a gradient is not finite.
      present: the exponent of the present scale.
    """
    starts = [present, 0, 12, -12, -24, -40, -60, -90, _LOWEST]
    start = next((k for k in starts if error(k) is not None), None)
    if start is None:
        return None, None
    highest = _last(lambda k: error(k) is not None, start, 1)

    def best_of(exponents: list[int]) -> int:
        return min(exponents, key=lambda k: _largest(error(k)))

    # The error is constant from the largest scale down to where values begin to underflow, unless the backward pass
    # clips, or compares scaled values with others: then smaller scales may be better.
    candidates = _with_finite_gradients(error, highest, highest - 3, highest - 6)
    on_plateau = best_of(candidates)
    if _largest(error(on_plateau)) > _TOLERANCE:
        candidates += _with_finite_gradients(error, 0, *range(highest - 12, highest - 49, -6))
    best = best_of(candidates)
    if _largest(error(best)) > LARGEST_ERROR:
        return None, on_plateau  # not a smaller one, at which all gradients are zero and the error is only 100%
    known = [found for found in map(error, candidates) if found is not None]
    smallest = np.min(known, axis=0)  # of each gradient

    def fits(k: int) -> bool:
        found = error(k)
        return found is not None and bool((found <= 1.1 * smallest + _TOLERANCE).all())

    return (_last(fits, best, -1), _last(fits, best, 1)), best


def _with_finite_gradients(error: Callable[[int], np.ndarray | None], *exponents: int) -> list[int]:
    return [k for k in exponents if k >= _LOWEST and error(k) is not None]


def _last(holds: Callable[[int], bool], start: int, direction: int) -> int:
    """Returns the last integer for which a condition holds, from `start`, for which it holds, in a direction."""
    step, end = 1, _HIGHEST if direction > 0 else _LOWEST
    good = start
    while good != end:
        k = good + direction * min(step, abs(end - good))
        if not holds(k):
            break
        good, step = k, 2 * step
    else:
        return good
    bad = k
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
