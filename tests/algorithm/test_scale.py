"""`scale`, `unscale` and `unscale_and_check` are exact, in every dtype and under every transformation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

import jmpscale

from messages import HALF_LOSS

F16, BF16, F32, F64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64
E5M2, E4M3 = jnp.float8_e5m2, jnp.float8_e4m3fn
C64, C128 = jnp.complex64, jnp.complex128

ignore_narrow_losses = pytest.mark.filterwarnings("ignore:the loss is float:UserWarning")


def _normal(size, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(size).astype(dtype)


# scale


@ignore_narrow_losses
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("dtype", "out"), [(E5M2, F32), (F16, F32), (BF16, F32), (F32, F32), (F64, F64)])
def test_scale_widens_to_at_least_float32(dtype, out, variant):
    scaled = variant(lambda x: jmpscale.scale(jmpscale.dynamic(), x))(jnp.ones(3, dtype))
    assert scaled.dtype == out
    np.testing.assert_array_equal(scaled, 65536.0)


def test_scale_maps_over_a_tree():
    tree = {"a": F16(4), "b": (jnp.ones((2, 2)), 0.5), "c": None, "d": np.float32(3)}
    scaled = jmpscale.scale(jmpscale.static(2.0), tree)
    expected = {"a": F32(8), "b": (jnp.full((2, 2), 2.0), F32(1)), "c": None, "d": F32(6)}
    chex.assert_trees_all_equal(scaled, expected)
    chex.assert_trees_all_equal_dtypes(scaled, expected)


@pytest.mark.guards
def test_scale_of_a_float16_loss_overflows_in_the_backward_pass():
    def gradient(scale):
        with pytest.warns(UserWarning, match=f"{HALF_LOSS}.*Return it in float32"):
            return jax.grad(lambda w: jmpscale.scale(jmpscale.static(scale), w.astype(F16)))(F32(0.5))

    assert gradient(2.0**15) == 2.0**15
    assert jnp.isinf(gradient(2.0**16))


# unscale


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("dtype", "out"),
    [(E5M2, F32), (E4M3, F32), (F16, F32), (BF16, BF16), (F32, F32), (F64, F64), (C64, C64), (C128, C128)],
)
def test_unscale_widens_only_float16_and_float8(dtype, out, variant):
    unscaled = variant(lambda x: jmpscale.unscale(jmpscale.static(4.0), x))(jnp.full(2, 2.0).astype(dtype))
    assert unscaled.dtype == out
    np.testing.assert_array_equal(unscaled.astype(C128), 0.5)


@pytest.mark.parametrize(
    "x", [1.5, jnp.asarray(1.5), F32(1.5), np.float32(1.5)], ids=["Python", "weakly typed", "strongly typed", "NumPy"]
)
def test_unscale_keeps_weak_types(x):
    out = jmpscale.unscale(jmpscale.static(4.0), x)
    assert out == 0.375
    assert jax.typeof(out) == jax.typeof(jnp.asarray(x))


def test_unscale_returns_leaves_without_gradients_unchanged():
    float0 = jax.grad(lambda n: n * 1.0, allow_int=True)(3)
    others = [jnp.arange(3), jnp.array(True), jax.random.key(0), float0, None, "name", jnp.tanh, 3]
    out, finite = jmpscale.unscale_and_check(jmpscale.dynamic(), [*others, F32(65536.0)])
    assert all(before is after for before, after in zip(others, out[:-1], strict=True))
    assert out[-1] == 1.0
    assert finite


def test_unscale_returns_statistics_of_fp8_layers_unchanged():
    statistics = {"scale": [jnp.array([2.0])]}  # as in flax.linen.fp8_ops
    grads = {"params": {"w": jnp.array([8.0])}, "_overwrite_with_gradient": {"dense": statistics}}
    for tree in (grads, [grads, jnp.array([8.0])], FrozenDict(grads)):
        unscaled, finite = jmpscale.unscale_and_check(jmpscale.dynamic(4.0), tree)
        assert jax.tree.structure(unscaled) == jax.tree.structure(tree)
        assert sorted(x.item() for x in jax.tree.leaves(unscaled)) == [2.0] * len(jax.tree.leaves(tree))
        assert finite


def test_unscale_recognizes_statistics_of_fp8_layers_outside_their_collection():
    """A pair of a scale and a history with the same owner; either name alone is a parameter."""
    pair = {"input_scale": jnp.float32(2.0), "input_amax_history": jnp.ones(3)}
    grads = {"layer": pair | {"kernel": jnp.float32(2.0)}, "norm": {"input_scale": jnp.float32(2.0)}}
    out = jmpscale.unscale(jmpscale.static(2.0), ({"w": jnp.float32(2.0)}, grads))
    expected = {"layer": pair | {"kernel": jnp.float32(1.0)}, "norm": {"input_scale": jnp.float32(1.0)}}
    chex.assert_trees_all_equal(out, ({"w": jnp.float32(1.0)}, expected))


@pytest.mark.parametrize("tree", [{}, (), None, jnp.zeros((0, 4), F16)], ids=str)
def test_unscale_and_check_accepts_trees_without_elements(tree):
    out, finite = jmpscale.unscale_and_check(jmpscale.dynamic(), tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert finite


# Unscaling is exact


@pytest.mark.parametrize("exponent", [-126, -1, 16, 126])
def test_unscale_inverts_scale_bit_for_bit(exponent):
    scaler = jmpscale.static(2.0**exponent)
    x = _normal(1000)
    scaled = np.asarray(jmpscale.scale(scaler, x))
    normal = np.isfinite(scaled) & (np.abs(scaled) >= np.finfo(np.float32).tiny)
    assert normal.any()
    np.testing.assert_array_equal(np.asarray(jmpscale.unscale(scaler, scaled))[normal], x[normal])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("dtype", "rtol"), [(F16, 1.3e-7), (BF16, 4e-3), (F32, 1.3e-7), (F64, 3e-16)])
def test_unscale_rounds_to_its_dtype(dtype, rtol):
    x = jnp.linspace(1, 2, 999).astype(dtype)
    for loss_scale in (3.0, 1000.0, 0.7):
        out = jmpscale.unscale(jmpscale.static(loss_scale), x)
        np.testing.assert_allclose(np.float64(out), np.float64(x) / np.float64(np.float32(loss_scale)), rtol=rtol)


@pytest.mark.parametrize(
    ("loss_scale", "grad", "expected"),
    [
        pytest.param(1.0, BF16(1.171875), 1.171875, id="scale_1"),
        pytest.param(2.0**24, BF16(2.0**-100), 2.0**-124, id="bfloat16"),
        pytest.param(2.0**126, F32(2.0**100), 2.0**-26, id="largest_scale"),
        pytest.param(2.0**-126, F32(2.0**-100), 2.0**26, id="smallest_scale"),
        pytest.param(2.0, C64(complex(np.inf, 4)), complex(np.inf, 2), id="complex_infinity"),
        pytest.param(2.0, C64(complex(4, -np.inf)), complex(2, -np.inf), id="complex_infinite_imaginary"),
    ],
)
def test_unscale_is_exact_for_extreme_values(loss_scale, grad, expected):
    assert jmpscale.unscale(jmpscale.static(loss_scale), grad) == expected


# unscale_and_check


@pytest.mark.parametrize(
    ("loss_scale", "grad", "finite"),
    [(4.0, 3e38, True), (4.0, np.inf, False), (4.0, np.nan, False), (2.0**-20, 1e30, True), (2.0**-20, 3e38, False)],
)
def test_unscale_and_check_tests_the_unscaled_values(loss_scale, grad, finite, variant):
    check = variant(lambda grads: jmpscale.unscale_and_check(jmpscale.static(loss_scale), grads))
    unscaled, flag = check({"a": jnp.ones(3), "b": F32(grad)})
    assert (flag.shape, flag.dtype) == ((), bool)
    assert flag == finite
    assert jnp.isfinite(unscaled["b"]) == finite


def test_unscale_and_check_combines_over_axis_name():
    def check(axis_name):
        check = jax.vmap(lambda x: jmpscale.unscale_and_check(scaler, x, axis_name=axis_name)[1], axis_name="batch")
        return check(jnp.array([1.0, jnp.inf])).tolist()

    scaler = jmpscale.static(2.0)
    assert check("batch") == [False, False]
    assert check(()) == [True, False]


# Every transformation is supported


def test_scale_and_unscale_are_differentiable():
    scaler = jmpscale.static(8.0)
    assert jax.grad(lambda x: jmpscale.scale(scaler, x))(F32(3)) == 8.0
    assert jax.grad(lambda x: jmpscale.unscale(scaler, x))(F32(3)) == 0.125


def test_scale_and_unscale_use_each_scaler_of_a_batch():
    batch = jax.tree.map(lambda x: np.stack([x] * 2), jmpscale.dynamic())._replace(loss_scale=np.float32([2, 8]))
    x = np.ones((2, 3), np.float32)
    scaled = jax.vmap(jmpscale.scale)(batch, x)
    np.testing.assert_array_equal(scaled, [[2] * 3, [8] * 3])
    np.testing.assert_array_equal(jax.vmap(jmpscale.unscale)(batch, scaled), x)


def test_scale_and_unscale_work_with_disable_jit():
    scaler = jmpscale.dynamic()._replace(loss_scale=8.0)  # scan without jit passes Python numbers
    with jax.disable_jit():
        assert jmpscale.scale(scaler, 2.0) == 16.0
        assert jmpscale.unscale(scaler, jnp.ones(1)).tolist() == [0.125]


# disabled() changes nothing


def test_disabled_returns_its_input():
    scaler = jmpscale.disabled()
    tree = {"a": jnp.full(2, jnp.nan, F16), "n": 3}
    assert jmpscale.scale(scaler, tree) is tree
    assert jmpscale.unscale(scaler, tree) is tree
    grads, finite = jmpscale.unscale_and_check(scaler, tree)
    assert grads is tree
    assert finite
    assert finite.dtype == bool
