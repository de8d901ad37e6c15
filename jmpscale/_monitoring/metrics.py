"""The values of a scaler that are worth logging."""

import jax

from jmpscale._base.tree import PyTree, find_instances
from jmpscale._get_scaler import find_scaler
from jmpscale._guards.checks import warn_if_inside_another
from jmpscale._state import ARRAY_FIELDS, WithLossScalingState


def metrics(scaler: PyTree) -> dict[str, jax.Array]:
    """Returns the values of a scaler that are worth logging.

    Args:
      scaler: a scaler, a batch of scalers, or any pytree that contains exactly one, such as the optimizer state of
        `with_loss_scaling`.

    Returns:
      A dict of the arrays of the `ScalerState`, by the names of its fields. For an optimizer state of
      `with_loss_scaling(max_norm=...)` it also contains `grad_norm`, f32[], the global norm before clipping. The values
      are the arrays of the state itself, so read or copy them before the state is donated. `loss_scale` is the scaler's
      own; the backward pass of `scaled_backward(fun, number)` uses the number instead.

    Raises:
      ValueError: `scaler` does not contain exactly one scaler.

    Warns:
      UserWarning: `with_loss_scaling` is inside another transformation of optax that keeps it from its work.

    >>> import jmpscale
    >>> {name: float(value) for name, value in jmpscale.metrics(jmpscale.dynamic(8.0)).items() if "scale" in name}
    {'loss_scale': 8.0}
    """
    found = find_scaler(scaler, allow_batch=True)
    warn_if_inside_another(scaler)
    values = {name: getattr(found, name) for name in ARRAY_FIELDS}
    for state in find_instances(scaler, WithLossScalingState):
        norm = jax.tree.leaves(state.grad_norm)  # an optimizer of Flax NNX wraps it; without max_norm it is None
        values |= {"grad_norm": norm[0]} if norm else {}
    return values
