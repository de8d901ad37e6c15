"""autocast warns if it has no effect, with the reason."""

import inspect
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.experimental.pallas import tpu

import jmpscale

from tables import rows

pytestmark = pytest.mark.usefixtures("standard_promotion_and_ranks")
RANDOM = np.random.default_rng(0)
N = 8
X, W = (jnp.asarray(RANDOM.standard_normal((N, N)), jnp.float32) for _ in range(2))
FILE = pathlib.Path(__file__).name


def pallas_matmul(x, w):
    def kernel(x, w, out):
        def body(product):  # JAX holds it as a jaxpr whose constants are the references
            product[...] = jnp.dot(x[...], w[...])
            out[...] = product[...]

        pallas.run_scoped(body, tpu.VMEM((N, N), jnp.float32))

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
    "other dtypes": (
        lambda x, w: x.astype(jnp.bfloat16) @ w,
        "1 of 1 matmuls, at {line}: The operands are bfloat16 and float32, but autocast converts float32. Pass float32 "
        "values, or remove autocast.",
    ),
    "the other half-precision dtype beside an inner product": (
        lambda x, w: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), jnp.vdot(x, w)),
        "1 of 2 matmuls, at {line}: The operands are bfloat16 and bfloat16, but",
    ),
    "complex": (
        lambda x, w: (x + 1j) @ w.astype(jnp.complex64),
        "1 of 1 matmuls, at {line}: The operands are complex64 and complex64, but autocast converts float32.",
    ),
    "custom derivative rule": (
        lambda x, w: custom_matmul(x, w),
        "1 of 1 matmuls, at {line}: custom_vjp_call runs as written. Use autocast in its function, or wrap the "
        "function that returns the gradients.",
    ),
    "kernel": (
        lambda x, w: pallas_matmul(x, w),
        "1 of 1 matmuls, at {line}: pallas_call runs as written.",
    ),
}


def warnings_of(half_fun):
    """Returns the warnings of two calls of a function, and the line of the calls."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        jax.eval_shape(lambda x, w: (half_fun(x, w), half_fun(x, w)), X, W)
    return found, line


@pytest.mark.parametrize("row", rows(NOT_CONVERTED))
def test_autocast_without_effect_warns_once(row):
    fun, explanation = row
    (warning,), line = warnings_of(jmpscale.autocast(fun))
    message = re.sub(rf"{FILE}:\d+ \([^ ]*\)", "{line}", str(warning.message))
    start = "autocast has no effect: it converts no matmul or convolution of <lambda>. "
    assert message.startswith(start + explanation)
    assert (warning.category, warning.filename, warning.lineno) == (UserWarning, __file__, line)


@pytest.mark.parametrize("setting", ["highest", "BF16_BF16_F32"])
def test_autocast_under_a_global_precision_warns(setting):
    """The program itself does not request a precision: the setting may be in another file."""
    with jax.default_matmul_precision(setting):
        (warning,), _ = warnings_of(jmpscale.autocast(lambda x, w: x @ w))
    assert "1 of 1 matmuls, at " in str(warning.message)
    words = rf"autocast keeps the setting jax_default_matmul_precision='?{setting}'?\. Set it only"
    assert re.search(words, str(warning.message))


@pytest.mark.parametrize("setting", ["high", "bfloat16"])
def test_autocast_does_not_blame_a_global_precision_that_it_ignores(setting):
    with jax.default_matmul_precision(setting):
        assert not warnings_of(jmpscale.autocast(highest))[0]


HALF_OR_PRECISE = {
    "matmul": lambda x, w: x @ w,
    "matmul of float16 and float32": lambda x, w: x.astype(jnp.float16) @ w,
    "matmul beside a complex one": lambda x, w: jnp.fft.irfft(jnp.fft.rfft(x @ w) @ jnp.fft.rfft(w).T),
    "matmul beside a kernel": lambda x, w: pallas_matmul(x, w) @ w,
    "matmul in a scan": lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0],
    "highest precision": highest,
    "highest precision beside an inner product": lambda x, w: highest(x, w) * jnp.vdot(x, w),
    "half precision already": lambda x, w: x.astype(jnp.float16) @ w.astype(jnp.float16),
    "autocast already": lambda x, w: jmpscale.autocast(lambda x, w: x @ w)(x, w),
    "inner product": lambda x, w: jnp.vdot(x, w),
    "outer product": lambda x, w: jnp.einsum("i,j->ij", x[0], w[0]),
    "contraction of 4 elements": lambda x, w: x[:, :4] @ w[:4],
    "algorithm": lambda x, w: jnp.dot(x, w, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32),
}


@pytest.mark.parametrize("fun", rows(HALF_OR_PRECISE))
def test_autocast_does_not_warn_without_a_mistake(fun):
    assert not warnings_of(jmpscale.autocast(fun))[0]
