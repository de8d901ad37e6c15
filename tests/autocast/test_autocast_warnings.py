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
from jmpscale._autocast import kept

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
    words = (
        rf"autocast keeps the setting jax_default_matmul_precision='?{setting}'?, which may be from a package that the "
        r"program imports\. Set it only .*; jax\.config\.update\(\"jax_default_matmul_precision\", None\) unsets it\."
    )
    assert re.search(words, str(warning.message))


def test_autocast_converts_matmuls_after_the_setting_of_a_package_is_unset():
    """Some packages, such as dynamax, set the precision of the whole process when they are imported."""
    before = jax.config.values["jax_default_matmul_precision"]
    try:
        jax.config.update("jax_default_matmul_precision", "float32")
        assert len(warnings_of(jmpscale.autocast(lambda x, w: x @ w))[0]) == 1
        jax.config.update("jax_default_matmul_precision", None)
        assert not warnings_of(jmpscale.autocast(lambda x, w: x @ w))[0]
    finally:
        jax.config.update("jax_default_matmul_precision", before)


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


# --- most of the work is in functions with their own derivative rules


def with_rule(fun):
    """Returns a function with its own derivative rule, which computes what JAX computes without the rule."""
    own = jax.custom_vjp(fun)
    own.defvjp(lambda *args: jax.vjp(fun, *args), lambda vjp, g: vjp(g))
    return own


@jax.custom_jvp
def square_with_rule(x):
    return x @ x


square_with_rule.defjvp(lambda primals, tangents: (square_with_rule(*primals), tangents[0] @ primals[0]))

layer = with_rule(lambda x, w: jnp.tanh(x @ w))
in_rule = " in float32. {} of {} matmuls, at {{line}}: {}_call runs as written. Use autocast in its function, or wrap "
in_rule += 'the function that returns the gradients. If they must be in float32, set precision="highest".'
MOSTLY_IN_RULES = {  # a function, and the words of the warning
    "3 of 4 layers": (
        lambda x, w: layer(layer(layer(x, w), w), w) @ w,
        "leaves 75% of the multiplications of <lambda>" + in_rule.format(3, 4, "custom_vjp"),
    ),
    "one large layer": (
        lambda x, w: layer(jnp.tile(x, (4, 1)), w)[:N] @ w @ w,
        "leaves 66% of the multiplications of <lambda>" + in_rule.format(1, 3, "custom_vjp"),
    ),
    "custom_jvp": (
        lambda x, w: square_with_rule(square_with_rule(x)) @ w,
        "leaves 66% of the multiplications of <lambda>" + in_rule.format(2, 3, "custom_jvp"),
    ),
    "layers in a scan": (
        lambda x, w: jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, length=3)[0] @ w,
        "leaves 75% of the multiplications of <lambda>" + in_rule.format(1, 2, "custom_vjp"),
    ),
    "convolution": (
        lambda x, w: with_rule(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"))(x[None, None], w[None, None]) * (x @ w),
        "leaves 88% of the multiplications of <lambda>" + in_rule.format(1, 2, "custom_vjp"),
    ),
}


@pytest.mark.parametrize("row", rows(MOSTLY_IN_RULES))
def test_autocast_warns_once_if_most_work_is_in_derivative_rules(row):
    fun, words = row
    (warning,), line = warnings_of(jmpscale.autocast(fun))
    assert re.sub(rf"{FILE}:\d+ \([^ ]*\)", "{line}", str(warning.message)) == f"autocast {words}"
    assert (warning.category, warning.filename, warning.lineno) == (UserWarning, __file__, line)


attend = with_rule(lambda q, k, v: jax.nn.softmax(q @ k.mT) @ v)


def transformer(x, w):
    """A layer with 12 N^2 parameters, as in GPT, whose attention has its own derivative rule."""
    q, k, v = (x @ w for _ in range(3))
    x = x + attend(q, k, v) @ w
    return x + jax.nn.gelu(x @ jnp.tile(w, (1, 4))) @ jnp.tile(w, (4, 1))


RIGHT = {
    "attention with a rule": transformer,
    "one layer of a scan with a rule": lambda x, w: (
        jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0] @ w + layer(layer(layer(x, w), w), w)
    ),
    "autocast inside": lambda x, w: with_rule(jmpscale.autocast(jnp.matmul))(x, w) @ w[:, :4],
    "autocast with float32 results inside": lambda x, w: (
        with_rule(jmpscale.autocast(jnp.matmul, result_dtype=jnp.float32))(x, w) @ w[:, :4]
    ),
    "casts inside": lambda x, w: (
        with_rule(lambda x, w: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32))(x, w) @ w[:, :4]
    ),
    "highest precision inside": lambda x, w: with_rule(highest)(x, w) @ w[:, :4],
    "kernel with a rule": lambda x, w: with_rule(pallas_matmul)(x, w) @ w[:, :4],
    "solver": lambda x, w: jax.scipy.sparse.linalg.cg(lambda y: (x @ x.T + 9 * jnp.eye(N)) @ y, w)[0] @ w[:, :4],
    "relu": lambda x, w: jax.nn.relu(x @ w) @ w,
}


@pytest.mark.parametrize("fun", rows(RIGHT))
def test_autocast_does_not_warn_of_derivative_rules_in_a_right_program(fun):
    assert not warnings_of(jmpscale.autocast(fun))[0]


def test_autocast_does_not_warn_of_derivative_rules_after_differentiation():
    def grad(x, w):
        return jax.grad(lambda x: jnp.sum(layer(layer(x, w), w)))(x)

    assert not warnings_of(jmpscale.autocast(grad))[0]


# --- the table of what autocast keeps


MULTIPLIED = {  # a function of two matrices, and the number of multiplications
    "matmul": (jnp.matmul, N**3),
    "batch": (lambda x, w: jnp.einsum("bij,bjk->bik", x.reshape(2, 4, N), w.reshape(2, N, 4)), 2 * 4 * N * 4),
    "two contracted axes": (lambda x, w: jnp.einsum("aij,ijb->ab", x.reshape(2, 4, N), w.reshape(4, N, 2)), 4 * N * 4),
    "ragged": (lambda x, w: jax.lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([3, N - 3], jnp.int32)), N**3),
    "strided convolution": (
        lambda x, w: jax.lax.conv(x.reshape(1, 1, N, N), w.reshape(4, 1, 4, 4), (2, 2), "SAME"),
        4 * 4 * 4 * 16,
    ),
    "grouped convolution": (
        lambda x, w: jax.lax.conv_general_dilated(
            x.reshape(1, 4, 4, 4), w.reshape(4, 1, 4, 4), (1, 1), "SAME", feature_group_count=4
        ),
        4 * 4 * 4 * 16,
    ),
    "scan": (lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0], 5 * N**3),
    "scan in a scan": (
        lambda x, w: jax.lax.scan(
            lambda x, _: (jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0], None), x, None, length=2
        )[0],
        10 * N**3,
    ),
    "compiled function that is called twice": (
        lambda x, w: jax.jit(jnp.matmul)(jax.jit(jnp.matmul)(x, w), w),
        2 * N**3,
    ),
}


@pytest.mark.parametrize("row", rows(MULTIPLIED))
def test_table_counts_multiplications(row):
    fun, expected = row
    (group,) = kept.groups_of_matmuls(jax.make_jaxpr(fun)(X, W).jaxpr, np.dtype("float16"))
    assert (group.reason, group.multiplications) == (None, expected)


def test_table_has_each_reason_with_its_matmuls():
    def fun(x, w):
        y = layer(layer(x, w), w) @ w
        y = highest(pallas_matmul(y, w), w)
        return y.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), jnp.vdot(x, w), with_rule(pallas_matmul)(x, w)

    found = kept.groups_of_matmuls(jax.make_jaxpr(fun)(X, W).jaxpr, np.dtype("float16"))
    assert [(group.reason, group.holder, group.number) for group in found] == [
        (kept.Kept.HELD, "custom_vjp_call", 2),
        (None, "", 1),
        (kept.Kept.HELD, "pallas_call", 2),
        (kept.Kept.PRECISION, "", 1),
        (kept.Kept.DTYPE, "", 1),
        (kept.Kept.SMALL, "", 1),
    ]
    assert [group.line.partition(" ")[2] for group in found if group.holder] == ["(<lambda>)", "(body)"]
