"""Options of functions, which a call gives by name."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from jmpscale._base.text import describe

P = ParamSpec("P")
T = TypeVar("T")


def requires_names(fun: Callable[P, T]) -> Callable[P, T]:
    """Makes a function raise an error with the names of its keyword-only parameters if one is passed by position.

    Python's own error states only how many positional arguments there may be.
    """
    return _requires_names(fun, "Write")


def requires_names_in(call: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns `requires_names` with an error that shows the usual call, for functions to which more may be passed."""

    def decorate(fun: Callable[P, T]) -> Callable[P, T]:
        return _requires_names(fun, f"Call {call}; for an option, write")

    return decorate


def _requires_names(fun: Callable[P, T], remedy: str) -> Callable[P, T]:
    parameters = inspect.signature(fun).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    count = len(parameters) - len(names)

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > count:
            raise TypeError(
                f"{fun.__qualname__.removesuffix('.__init__')} takes {', '.join(names)} by name, got "
                f"{describe(args[count])} by position. {remedy} the name before the value, such as {names[0]}=..."
            )
        return fun(*args, **kwargs)

    return call
