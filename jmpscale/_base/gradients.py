"""The calls of `value_and_grad`, and of functions of `scaled_backward`, which `diagnose_step` observes."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jmpscale._base.tree import PyTree


class GradientCall(NamedTuple):
    """A call `value_and_grad(fun, argnums, has_aux, transform=transform)(scaler, *args, **kwargs)`."""

    fun: Callable[..., Any]
    argnums: Any
    has_aux: bool
    transform: Callable[..., Any]
    scaler: PyTree
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]


class ScaledCall(NamedTuple):
    """A call `scaled_backward(fun, scale, has_aux=has_aux)(*args, **kwargs)`, which may be differentiated."""

    fun: Callable[..., Any]
    scale: Any
    has_aux: bool
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]


Observer = Callable[[GradientCall | ScaledCall], None]
_OBSERVER: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("jmpscale_observer", default=None)


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Passes these calls to a function, which may raise."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def observe(call: GradientCall | ScaledCall) -> None:
    """Passes a call to the observer, if there is one."""
    if (observer := _OBSERVER.get()) is not None:
        observer(call)
