"""autocast warns if it has no effect, with the reason, and if a constant overflows in a matmul."""

import inspect
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas

import jmpscale

from tables import rows

RANDOM = np.random.default_rng(0)
N = 8
X, W = (jnp.asarray(RANDOM.standard_normal((N, N)), jnp.float32) for _ in range(2))
BIG = jnp.full((N, N), 1e6)
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


def gather(scores, w):
    return jax.nn.log_softmax(scores) @ jax.nn.one_hot(jnp.arange(N), N) @ w


def attention(x):
    return jax.nn.dot_product_attention(x[None, :, None], x[None, :, None], x[None, :, None], is_causal=True)


# --- no matmul is converted


NOT_CONVERTED = {  # a function, and the explanation in the warning; {line} is the line of the function
    "no matmul": (
        lambda x, w: x * w,
        "It contains none; kernels, sparse matmuls and compiled functions run as written.",
    ),
    "half precision already": (
        lambda x, w: x.astype(jnp.float16) @ w.astype(jnp.float16),
        "1 of 1 matmuls, at {line}: The operands are float16 and float16. If the function is in half precision "
        "already, remove autocast, which converts float32 parameters and inputs by itself.",
    ),
    "autocast already": (
        lambda x, w: jmpscale.autocast(lambda x, w: x @ w)(x, w),
        "1 of 1 matmuls, at {line}: The operands are float16 and float16.",
    ),
    "other dtypes": (
        lambda x, w: x.astype(jnp.bfloat16) @ w,
        "1 of 1 matmuls, at {line}: The operands are bfloat16 and float32.",
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


# --- constants


def many_additions(x):
    for _ in range(400):
        x = x + 0.01 * jnp.sin(x)
    return x


CONSTANTS = {  # a function, and the largest constant that enters a matmul
    "closed-over array": (lambda x, w: x @ BIG, "1e+06"),
    "NumPy array": (lambda x, w: x @ np.full((N, N), 1e6, np.float32), "1e+06"),
    "literal": (lambda x, w: x @ jnp.full((N, N), -1e9), "1e+09"),
    "indices": (lambda x, w: jax.nn.one_hot(jnp.arange(4), 80_000) @ jnp.arange(80_000.0), "79999"),
    "symexp bins": (lambda x, w: x @ jnp.expm1(jnp.linspace(0, 20, N)), "4.85165e+08"),
    "gather of masked scores": (lambda x, w: gather(jnp.where(x > 0, x @ w, -1e9), w), "1e+09"),
    "added mask": (lambda x, w: gather(x @ w + jnp.where(jnp.arange(N) > 2, -1e9, 0.0), w), "1e+09"),
    "optax.ctc_loss": (
        lambda x, w: optax.ctc_loss(
            (x @ w + jnp.where(jnp.arange(N) == 5, -1e9, 0.0))[None],
            jnp.zeros((1, N)),
            jnp.array([[1, 2, 1]]),
            jnp.zeros((1, 3)),
        ),
        "1e+09",
    ),
    "after many operations": (lambda x, w: many_additions(jnp.where(x > 0, x, -1e6)) @ w, "1e+06"),
    "in jit": (lambda x, w: jax.jit(lambda x: x @ jnp.full((N, N), 1e6))(x), "1e+06"),
    "in scan": (
        lambda x, w: jax.lax.scan(lambda x, _: (jnp.where(x > 0, x, -1e6) @ w, None), x, None, length=2)[0],
        "1e+06",
    ),
}
NOT_REPORTED = {
    "masked softmax": lambda x, w: jax.nn.softmax(jnp.where(x > 0, x @ w, -1e9)) @ w,
    "attention": lambda x, w: attention(x @ w),
    "relu of a mask": lambda x, w: jax.nn.relu(jnp.where(x > 0, x @ w, -1e9)) @ w,
    "loss of optax": lambda x, w: optax.ctc_loss(
        (x @ w)[None], jnp.zeros((1, N)), jnp.array([[1, 2, 1]]), jnp.zeros((1, 3))
    ),
    "float16's largest number": lambda x, w: x @ jnp.full((N, N), 65504.0),
    "infinity": lambda x, w: jnp.where(x > 0, x, -jnp.inf) @ w,
    "in a matmul that runs as written": lambda x, w: highest(1e6 * jnp.ones((N, N)), x) + x @ w,
    "not in a matmul": lambda x, w: x @ w * 1e6 + jnp.arange(80_000.0)[-1],
}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("row", rows(CONSTANTS, default={"NumPy array", "literal", "after many operations", "in scan"}))
@pytest.mark.parametrize(
    "transform", [lambda fun: fun, pytest.param(jax.jit, marks=pytest.mark.full)], ids=["eager", "jit"]
)
def test_autocast_warns_once_about_constants_that_overflow(row, transform):
    fun, largest = row
    half_fun = jmpscale.autocast(fun)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        line = inspect.currentframe().f_lineno + 1
        transform(half_fun)(X, W)
        half_fun(X, W)
    (warning,) = found
    assert str(warning.message).startswith(f"a constant of {largest} enters the matmul at {FILE}:")
    assert (warning.category, warning.filename, warning.lineno) == (UserWarning, __file__, line)


@pytest.mark.parametrize("fun", rows(NOT_REPORTED, {"attention", "loss of optax"}))
def test_autocast_does_not_warn_about_other_constants(fun):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jmpscale.autocast(fun)(X, W)
        jmpscale.autocast(lambda x, w: x @ w)(1e9 * X, W)  # arguments are not constants
    assert not found


def test_constant_is_named_at_the_line_that_calls_a_library_function():
    def fun(x):
        return jnp.convolve(jnp.where(x > 0, x, -1e9), jnp.ones(3))

    with pytest.warns(UserWarning, match=rf"enters the matmul at {FILE}:\d+ \(fun\)"):
        jmpscale.autocast(fun)(X[0])


def test_constants_of_symbolic_shape_are_not_computed():
    def fun(x, w):
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0])))
        return jnp.where(mask > 0, x @ x.T, -1e9) @ x @ w + jnp.zeros((x.shape[0], N)) @ w

    x = jax.ShapeDtypeStruct((jax.export.symbolic_shape("b")[0], N), jnp.float32)
    with pytest.warns(UserWarning, match="a constant of 1e\\+09"):
        jax.export.export(jax.jit(jmpscale.autocast(fun)))(x, W)


@pytest.mark.parametrize("debug", [jax.debug_nans, jax.debug_infs])
def test_constants_that_a_mask_hides_pass_the_debug_flags(debug):
    def fun(x, w):
        n = jnp.arange(float(N))
        return (x + jnp.where(n > 0, (n - n) / n + 1 / n, 0.0)) @ w

    with debug(True):
        assert jnp.isfinite(jax.jit(jmpscale.autocast(fun))(X, W)).all()
