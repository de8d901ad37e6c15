"""Fills models, reads in which dtype the matmuls of a traced program run, and compares half precision with float32."""

import collections
import math

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
MATMULS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}


def equations(jaxpr):
    """Yields all equations of a jaxpr and of the jaxprs inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for held in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(held, (core.Jaxpr, core.ClosedJaxpr)):
                    yield from equations(held)


def matmul_dtypes(fn, *args):
    """Counts the matmuls of a traced function by the dtypes of their operands and result."""
    counts = collections.Counter()
    for eqn in equations(jax.make_jaxpr(fn)(*args)):
        if eqn.primitive.name in MATMULS and not _is_reduction_or_product(eqn):
            counts.update({tuple(dict.fromkeys(x.aval.dtype for x in (*eqn.invars[:2], *eqn.outvars)))})
    return counts


def _is_reduction_or_product(eqn):
    """Tests whether a matmul is a batch of inner products, or sums nothing."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    batch_size = math.prod(shape[axis] for axis in batch)
    return math.prod(shape[axis] for axis in contracting) == 1 or eqn.outvars[0].aval.size == batch_size


def assert_half(fn, float32_fn, *args, dtype=F16):
    """Checks that each matmul of a function is in half precision, and that none was added or lost."""
    expected = matmul_dtypes(float32_fn, *args)
    assert expected
    assert all(F32 in dtypes for dtypes in expected)
    assert matmul_dtypes(fn, *args) == {(dtype,): expected.total()}


def assert_close(result, expected, rtol):
    """Compares floating-point leaves by their norm, all other leaves and all types exactly."""
    chex.assert_trees_all_equal_structs(result, expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        _assert_same_type(x, y)
        if jnp.issubdtype(y.dtype, jnp.floating):
            assert _distance([x], [y]) <= rtol
        else:
            chex.assert_trees_all_equal(x, y)


def assert_norms_close(result, expected, rtol):
    """Compares two trees of floating-point numbers by their common norm, and all types exactly."""
    chex.assert_trees_all_equal_structs(result, expected)
    leaves = [jax.tree.leaves(tree) for tree in (result, expected)]
    for x, y in zip(*leaves, strict=True):
        _assert_same_type(x, y)
    assert _distance(*leaves) <= rtol


def _assert_same_type(x, y):
    assert (x.shape, x.dtype, jax.typeof(x).weak_type) == (y.shape, y.dtype, jax.typeof(y).weak_type)


def _distance(xs, ys):
    """Returns the norm of the difference of two lists of arrays, relative to the second; NaN if not finite."""
    xs, ys = (np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in arrays]) for arrays in (xs, ys))
    return np.linalg.norm(xs - ys) / np.linalg.norm(ys) if np.any(ys) else np.linalg.norm(xs)


def filled(create, *args, low=0.1, high=0.5):
    """Returns a tree like the result of `create`, with other numbers, because compiling `create` is slow."""
    random = np.random.default_rng(0)

    def fill(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(7)
        is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray((random.uniform(low, high, leaf.shape) * is_floating).astype(leaf.dtype))

    return jax.tree.map(fill, eqx.filter_eval_shape(create, *args))
