"""Plants an overflow in the backward pass."""

import jax
import jax.numpy as jnp


def overflow_backward(x, when):
    """Returns an array, and makes the first element of its cotangent infinite if a flag is true."""
    identity = jax.custom_vjp(lambda x, when: x)

    def backward(when, cotangent):
        is_first = (jnp.arange(cotangent.size) == 0).reshape(cotangent.shape)
        return jnp.where(is_first & when, jnp.inf, cotangent), None

    identity.defvjp(lambda x, when: (x, when), backward)
    return identity(x, when)
