"""`check_step`, which checks a whole training step by running it at several loss scales."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jmpscale._base.options import requires_names_in
from jmpscale._base.text import describe, enumerate_names
from jmpscale._base.tree import is_named, named_leaves
from jmpscale._guards.checks import check_scaler
from jmpscale._state import scale_on_host
from jmpscale.testing._precision import in_float32
from jmpscale.testing._rules import check_handling, first_applied
from jmpscale.testing._runs import Runs, scalers_of
from jmpscale.testing._state import StepOfState, step_of_state


@requires_names_in("check_step(step)(*args)")
def check_step(step: Callable[..., Any], *, ignore: str | Sequence[str] = ()) -> Callable[..., None]:
    """Returns a function with the parameters of a training step that raises if the step mishandles its loss scale.

    It is called like the step, as `check_step(train_step)(params, opt_state, batch)`, and runs the step from this state
    at several loss scales. The state is what the step returns with the structure and the types of an argument, in the
    order of the arguments: parameters, optimizer state, averages, batch statistics, and at least one scaler. Elements
    of tuples, lists, dicts and named tuples count. What gradients depend on, but do not change, is taken for data if
    the step has no other data, such as a batch beside its reconstruction; `check_step` prints its name if it comes back
    changed. A lone array that is not the first argument is state only if it is computed from its old value and has no
    influence on other state.
    Objects of Flax NNX among the arguments belong to the state, also if the step returns their new state, as under
    `jax.jit`. In `jax.pmap`, each device may have a copy of the state.

    A step that is called in another way is written as a function of its state: `check_step(lambda state:
    train_step(*state, batch)[:2])((params, opt_state))`. If gradients are accumulated by hand over several calls, this
    function makes all of these calls.

    At an infinite loss scale, and at the smallest one at which gradients overflow, the step must be skipped, reduce a
    dynamic scale by its `backoff_factor`, and change nothing else. At the smallest one, the loss must be finite, and a
    loop of steps must not skip all of them. A step that is skipped because of its loss must change nothing, either.
    Devices must agree, as for `assert_replicated`. A scale between the scale in the state and `min_scale` must not skip
    the step, and finite steps must let the scale grow.

    If JAX can trace the step, it is also evaluated in float32. There, no change may depend on the scale, on whether the
    scale grows after the step, or on whether the previous step was skipped. Then the gradients that `value_and_grad`,
    `unscale` or a `scaled_backward` function unscales become infinite or NaN, in groups and in single elements: each
    time the step must be skipped, once, unless it does not use them. The flag may be computed before or after the
    unscaling; after it, if scales below 1 are possible. Just below the scale at which the step is skipped, no change
    may differ from the change in float32 by more than half. Differences that the rounding of gradients explains are
    accepted.

    In a skipped step, an integer scalar may grow, and a random key may change, as in an applied step, unless it belongs
    to the state of an optimizer. They are printed in one line. If the state contains several scalers, as in adversarial
    training, each is checked in turn, while the other ones keep their scales.

    It compiles the step, unless it is compiled, and the step in float32. It runs the step about 20 times and the
    float32 step 5 times, and up to 33 times with infinite gradients.

    Args:
      step: training step. Its arguments are copied, so it may donate them. This process must hold all of their arrays.
      ignore: the leaves that a skipped step may change, such as `("state.step", "key")`: a name of an argument of the
        step, and a path in the notation of `jax.tree_util.keystr`, or the path of a node that contains leaves. The
        scaler, and the `grad_norm` of `with_loss_scaling`, are always ignored.

    Returns:
      A function with the parameters of `step`. It returns None.

    Raises:
      AssertionError: the step is not skipped, changes the state although it is skipped, is skipped at every scale of
        its scaler, depends on the scale, keeps the scale from growing, or differs from float32; or devices differ. The
        message names the likely mistakes.
      TypeError: `step` is not a function, returns no argument, or changes the structure or the types of the state; or
        an argument is abstract or traced.
      ValueError: the state contains no scaler, or only disabled ones; `step` unscales no gradients; `ignore` names no
        leaf; an argument was donated to a compiled function; or other processes hold a part of the state.

    Warns:
      UserWarning: JAX cannot trace the step, so it is not compared with float32; or a NaN in the forward pass reduces
        a dynamic scale, because `update` receives no loss, one under another name, or one that hides it.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> import optax
    >>> from jmpscale import testing
    >>> tx = jmpscale.with_loss_scaling(optax.sgd(0.1))
    >>> def train_step(w, opt_state, x):
    ...     loss, grads = jmpscale.value_and_grad(lambda w: jnp.sum((x * w) ** 2))(opt_state, w)
    ...     updates, opt_state = tx.update(grads, opt_state, w, value=loss)
    ...     return optax.apply_updates(w, updates), opt_state, loss
    >>> testing.check_step(train_step)(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3))
    """
    if not callable(step):
        raise TypeError(f"step must be a function, got {describe(step)}. Call check_step(train_step)(*args).")

    @functools.wraps(step, updated=())
    def check(*args: Any, **kwargs: Any) -> None:
        _check(step_of_state(step, args, kwargs), (ignore,) if isinstance(ignore, str) else tuple(ignore))

    return check


def _check(step: StepOfState, ignored: tuple[str, ...]) -> None:
    scalers = scalers_of(step.state)
    positions = [i for i, scaler in enumerate(scalers) if scaler.config.mode != "disabled"]
    if not positions:
        raise ValueError("the state must contain a scaler that checks gradients, got a disabled one. Use another one.")
    for position in positions:
        check_scaler(scalers[position], "state")
        scale_on_host(scalers[position], "state")  # raises for an invalid scale
    paths = [*(path for path, _ in named_leaves(step.state)), *step.others]
    if unknown := [part for part in ignored if not any(is_named(path, [part]) for path in paths)]:
        raise ValueError(f"ignore must name leaves of the state, got {unknown}. The paths are {_enumerate(paths)}.")
    first = Runs(step, step.state, ignored, step.recomputed)
    runs = [dataclasses.replace(first, position=position) for position in positions]
    usual = list(map(first_applied, runs))
    # In the state after a step, averages that were zero are different.
    exact = in_float32(dataclasses.replace(first, state=usual[0].after))
    for own, applied in zip(runs, usual, strict=True):
        try:
            # An infinite gradient is about all scalers.
            check_handling(own, applied, exact.runs, exact.faulty if own is runs[0] else [])
        except AssertionError as error:
            if len(runs) > 1:
                error.add_note(f"This is about scaler {own.position + 1} of {len(scalers)} in the state.")
            raise
    if exact.runs.step is not step and not exact.faulty:
        raise ValueError(
            "step must unscale its gradients by jmpscale, got none that value_and_grad, unscale, unscale_and_check or "
            "a scaled_backward function returns: check_step makes these infinite. Use one of these functions."
        )
    if first.counts:
        print(_describe_counts(first.counts))
    infinite = first.at(math.inf).old
    if others := [name for name in step.changed_others(first.state_with(infinite)) if name not in ignored]:
        print(_describe_others(others))


def _enumerate(paths: Sequence[str], limit: int = 100) -> str:
    """Returns paths in a list, and the number of those that are omitted."""
    more = f", and {len(paths) - limit} more" if len(paths) > limit else ""
    return f"{', '.join(paths[:limit])}{more}"


def _describe_others(names: Sequence[str]) -> str:
    return (
        f"check_step: {enumerate_names(names)} also came back changed from a skipped step, and was taken for data, "
        "because gradients depend on it, and none changes it. If it is state, such as the carry of a recurrent "
        f"network, gate it, too. To omit this line, pass ignore={tuple(names)}."
    )


def _describe_counts(counts: Mapping[str, str]) -> str:
    names = ", ".join(f"{path} ({kind})" for path, kind in counts.items())
    return (
        f"check_step: {names} also changed in a skipped step, which is right for a count of calls, but not of updates, "
        f"and for a random key. To omit this line, pass ignore={tuple(counts)}."
    )
