"""Compares trees bit for bit: NaN equals NaN, and -0.0 does not equal 0.0."""

import jax
import numpy as np


def assert_equal_bits(one, other):
    ours, theirs = map(jax.tree_util.tree_leaves_with_path, (one, other))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, x), (_, y) in zip(ours, theirs, strict=True):
        assert _bits(x) == _bits(y), f"{jax.tree_util.keystr(path)}: {x} and {y}"


def _bits(leaf):
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.dtype, _bits(jax.random.key_data(leaf))
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()
    return type(leaf), repr(leaf) if isinstance(leaf, (int, float, complex)) else leaf
