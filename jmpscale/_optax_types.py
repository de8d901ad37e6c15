"""The types of optimizers: optax's own, other classes with the same methods, and the result of `with_loss_scaling`."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import optax

from jmpscale._base.text import type_name
from jmpscale._base.tree import PyTree
from jmpscale._state import WithLossScalingState


class Transformation(Protocol):
    """An optimizer of optax, or of a class of its own with the same methods, such as `optax.MultiSteps`."""

    @property
    def init(self) -> Callable[..., Any]: ...
    @property
    def update(self) -> Callable[..., Any]: ...


class _Update(Protocol):
    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, WithLossScalingState]: ...


class LossScalingTransformation(optax.GradientTransformationExtraArgs):
    """A transformation of optax, whose state type checkers know."""

    init: Callable[[PyTree], WithLossScalingState]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: _Update  # pyright: ignore[reportIncompatibleVariableOverride]


def check_transformation(tx: object, name: str, remedy: str) -> None:
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, got {type_name(tx)}. Pass one, such as {remedy}."
        )


def with_extra_args(tx: Transformation) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that accepts any extra argument and passes to `tx` only the arguments that `tx` takes.

    optax does this for its own class. Objects of other classes, such as `optax.MultiSteps`, are inspected.
    """
    if isinstance(tx, optax.GradientTransformation):
        return optax.with_extra_args_support(tx)
    parameters = inspect.signature(tx.update).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, PyTree]:
        passed_on = {name: value for name, value in extra_args.items() if takes_all or name in parameters}
        return tx.update(updates, state, params, **passed_on)

    return optax.GradientTransformationExtraArgs(tx.init, update)
