"""How a diagnosis observes the calls of `autocast` in a program that it traces, and changes their results."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import numpy as np

_current: contextvars.ContextVar["Observation | None"] = contextvars.ContextVar("observation", default=None)


class Observation:
    """What the calls of `autocast` in a context have done."""

    def __init__(self, with_float32_results: bool) -> None:
        self.with_float32_results = with_float32_results  # whether all of them have `result_dtype=jnp.float32`
        self.has_changed_results = False  # whether one of them has another `result_dtype`
        self.kept: list[str] = []  # the matmuls that they leave in float32, with the reason


@contextlib.contextmanager
def observe(*, with_float32_results: bool = False) -> Iterator[Observation]:
    """Observes all calls of `autocast` in its context; optionally as if their `result_dtype` were `jnp.float32`."""
    observation = Observation(with_float32_results)
    token = _current.set(observation)
    try:
        yield observation
    finally:
        _current.reset(token)


def observed_result_dtype(chosen: np.dtype) -> np.dtype:
    """Returns the dtype of the results of a call of `autocast`, given the dtype that its caller has chosen."""
    observation = _current.get()
    if observation is None or not observation.with_float32_results or chosen == np.float32:
        return chosen
    observation.has_changed_results = True
    return np.dtype(np.float32)


def report_kept(sentences: Sequence[str]) -> None:
    """Reports to the observer of a call of `autocast` what the call leaves in float32."""
    if observation := _current.get():
        observation.kept += sentences


def is_observed() -> bool:
    """Tests whether a call of `autocast` has an observer."""
    return _current.get() is not None
