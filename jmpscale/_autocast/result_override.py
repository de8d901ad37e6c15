"""Traces a program as if all its calls of `autocast` had `result_dtype=jnp.float32`, to measure the difference."""

import contextlib
import contextvars
from collections.abc import Iterator

import numpy as np

_request: contextvars.ContextVar["Request | None"] = contextvars.ContextVar("request", default=None)


class Request:
    """A request for results in float32, and whether it has changed a call of `autocast`."""

    is_used = False


@contextlib.contextmanager
def results_in_float32() -> Iterator[Request]:
    """Changes the results of all calls of `autocast` in its context to float32, as the argument `result_dtype` does."""
    request = Request()
    token = _request.set(request)
    try:
        yield request
    finally:
        _request.reset(token)


def with_override(chosen: np.dtype) -> np.dtype:
    """Returns the dtype of the results of `autocast`, given the dtype that its caller has chosen."""
    request = _request.get()
    if request is None or chosen == np.float32:
        return chosen
    request.is_used = True
    return np.dtype(np.float32)
