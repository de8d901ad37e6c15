"""Arrays for tests."""

import jax.numpy as jnp
import numpy as np


def normal(seed, *shape, scale=1.0):
    """Returns normally distributed numbers from NumPy, because JAX would compile a program for each shape."""
    return jnp.asarray((scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32))
