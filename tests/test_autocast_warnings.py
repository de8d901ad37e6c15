"""autocast warns if it has no effect, with the reason, and if it leaves complex matmuls unchanged."""

import inspect
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import jmpscale

RANDOM = np.random.default_rng(0)
N = 8
X, W = (jnp.asarray(RANDOM.standard_normal((N, N)), jnp.float32) for _ in range(2))
FILE = pathlib.Path(__file__).name


@pytest.fixture(autouse=True)
def standard_promotion_and_ranks():
    """Allows implicit promotion of dtypes and ranks, on which optax relies."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def pallas_matmul(x, w):
    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...])

    return pallas.pallas_call(kernel, jax.ShapeDtypeStruct((N, N), jnp.float32), interpret=True)(x, w)


@jax.custom_vjp
def custom_matmul(x, w):
    return x @ w


custom_matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def highest(x, w):
    with jax.default_matmul_precision("highest"):
        return x @ w


# --- no matmul is converted


NOT_CONVERTED = {  # a function, and the explanation in the warning; {line} is the line of the function
    "no matmul": (
        lambda x, w: x * w,
        "It contains none; kernels, sparse matmuls and compiled functions run as written.",
    ),
    "half precision already": (
        lambda x, w: x.astype(jnp.float16) @ w.astype(jnp.float16),
        "1 of 1 matmuls, at {line}: The operands are float16 and float16, and autocast converts only float32. Pass "
        "float32 parameters and inputs, or, if the function is in half precision already, remove autocast.",
    ),
    "autocast already": (
        lambda x, w: jmpscale.autocast(lambda x, w: x @ w)(x, w),
        "1 of 1 matmuls, at {line}: The operands are float16 and float16, and",
    ),
    "other dtypes": (
        lambda x, w: x.astype(jnp.bfloat16) @ w,
        "1 of 1 matmuls, at {line}: The operands are bfloat16 and float32, and",
    ),
    "complex": (
        lambda x, w: (x + 1j) @ w.astype(jnp.complex64),
        "1 of 1 matmuls, at {line}: No complex dtype has parts in half precision. Compute the real and imaginary parts "
        "by matmuls of their own, or pass precision='highest' to keep them as they are.",
    ),
    "custom derivative rule": (
        lambda x, w: custom_matmul(x, w),
        "1 of 1 matmuls, at {line}: custom_vjp_call runs as written. Use autocast inside the function that it runs, or "
        "wrap the function that returns the gradients.",
    ),
    "kernel": (
        lambda x, w: pallas_matmul(x, w),
        "1 of 1 matmuls, at {line}: pallas_call runs as written.",
    ),
    "inner and outer products": (
        lambda x, w: (jnp.vdot(x, w), jnp.outer(x, w), jnp.einsum("i,j->ij", x[0], w[0]), jnp.vdot(w, w)),
        "2 of 3 matmuls, at {line}: An inner product is a sum, which could overflow. 1 of 3 matmuls, at {line}: An "
        "outer product adds nothing up, so half precision would only round it.",
    ),
}


@pytest.mark.parametrize(("fun", "explanation"), [pytest.param(*row, id=name) for name, row in NOT_CONVERTED.items()])
def test_autocast_without_effect_warns_once(fun, explanation):
    half_fun = jmpscale.autocast(fun)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        half_fun(X, W)
        half_fun(X, W)
        jax.jit(half_fun)(X, W)
    (warning,) = found
    message = re.sub(rf"{FILE}:\d+ \([^ ]*\)", "{line}", str(warning.message))
    start = "autocast has no effect: it converts no matmul or convolution of <lambda> to float16. "
    assert message.startswith(start + explanation)
    assert (warning.category, warning.filename, warning.lineno) == (UserWarning, __file__, line)


def test_autocast_under_a_global_precision_warns():
    """The program itself does not request a precision: the setting may be in another file."""
    half_fun = jmpscale.autocast(lambda x, w: x @ w)
    with jax.default_matmul_precision("highest"), pytest.warns(UserWarning, match="no effect") as found:
        half_fun(X, W)
    assert "1 of 1 matmuls, at " in str(found[0].message)
    assert "autocast keeps the setting jax_default_matmul_precision='highest'. Reset it" in str(found[0].message)


def test_autocast_under_an_algorithm_as_the_global_precision_warns():
    setting = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    with jax.default_matmul_precision(setting.name), pytest.warns(UserWarning, match=setting.name):
        jmpscale.autocast(lambda x, w: x @ w)(X, W)


@pytest.mark.parametrize("setting", ["high", "bfloat16"])
def test_autocast_does_not_blame_a_global_precision_that_it_ignores(setting):
    with warnings.catch_warnings(record=True) as found, jax.default_matmul_precision(setting):
        warnings.simplefilter("always")
        jmpscale.autocast(highest)(X, W)
    assert not found


HALF_OR_PRECISE = {
    "matmul": lambda x, w: x @ w,
    "matmul of float16 and float32": lambda x, w: x.astype(jnp.float16) @ w,
    "matmul beside a kernel": lambda x, w: pallas_matmul(x, w) @ w,
    "matmul in a scan": lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0],
    "highest precision": highest,
    "highest precision beside an inner product": lambda x, w: highest(x, w) * jnp.vdot(x, w),
    "algorithm": lambda x, w: jnp.dot(x, w, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32),
}


@pytest.mark.parametrize("fun", [pytest.param(fun, id=name) for name, fun in HALF_OR_PRECISE.items()])
def test_autocast_with_effect_or_requested_precision_does_not_warn(fun):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jmpscale.autocast(fun)(X, W)
    assert not found


# --- complex matmuls


def spectral(x, w, precision=None):
    """A layer as in Fourier neural operators, with a complex matmul beside a real one."""
    spectrum = jnp.fft.rfft(x @ w)
    return jnp.fft.irfft(jnp.matmul(spectrum, spectrum.T, precision=precision))


def test_autocast_warns_once_about_complex_matmuls_beside_others():
    half_fun = jmpscale.autocast(lambda x, w: spectral(x, w) + jax.jit(spectral)(x, w))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        half_fun(X, W)
        half_fun(X, W)
    (warning,) = found
    assert re.fullmatch(
        rf"autocast does not convert the complex matmuls of <lambda> to float16, 2 in total, the first at {FILE}:\d+ "
        r"\(spectral\)\. No complex dtype has parts in half precision\. Compute .*",
        str(warning.message),
    )
    assert (warning.category, warning.filename) == (UserWarning, __file__)


def test_autocast_does_not_warn_about_complex_matmuls_of_the_highest_precision():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jmpscale.autocast(lambda x, w: spectral(x, w, precision="highest"))(X, W)
    assert not found
