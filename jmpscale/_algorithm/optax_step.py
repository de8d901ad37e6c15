"""A training step of an optax optimizer that `apply_if` gates."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jmpscale._algorithm.optax import Transformation, with_extra_args
from jmpscale._base.tree import PyTree
from jmpscale._guards import optax_step as guards


def optax_step(
    tx: Transformation, grads: PyTree, **extra_args: Any
) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Creates the step that `apply_if` gates: it computes the updates of an optax optimizer and applies them.

    Args:
      tx: the optimizer. It must not be wrapped in `with_loss_scaling`, which skips steps by itself.
      grads: the unscaled gradients.
      **extra_args: extra arguments of `tx.update`, such as `value=`.

    Returns:
      `step(params, opt_state) -> (params, opt_state)`, in which parameters without an update are unchanged.

    Raises:
      TypeError: `tx` is not a gradient transformation, or `grads` contains a scaler. From the step: `tx` is wrapped in
        `with_loss_scaling`, or the arguments are not the parameters and the optimizer state, in this order.

    Warns:
      UserWarning: from the step, if a gradient of float32 parameters, or an average of gradients, is float16.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> import optax
    >>> tx, params = optax.sgd(1.0), {"w": jnp.array(3.0)}
    >>> step = jmpscale.optax_step(tx, {"w": jnp.array(1.0)})
    >>> jmpscale.apply_if(True, step, params, tx.init(params))[0]
    {'w': Array(2., dtype=float32)}
    """
    guards.created(tx, grads)
    optimizer = with_extra_args(tx)

    def step(*carry: PyTree) -> tuple[PyTree, PyTree]:
        guards.called(grads, carry)
        params, opt_state = carry
        updates, opt_state = optimizer.update(grads, opt_state, params, **extra_args)

        def apply(update: PyTree, param: PyTree) -> PyTree:
            return param if update is None else optax.apply_updates(param, update)

        return jax.tree.map(apply, updates, params, is_leaf=lambda x: x is None), opt_state

    return step
