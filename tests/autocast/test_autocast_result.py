"""autocast with float32 results rounds the operands of matmuls, in forward and backward passes, and nothing else."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_autocast as default_form
from jax.interpreters import ad, mlir

import jmpscale
from jmpscale._autocast import half_operands
from jmpscale.testing import check_step

import meshes
from compiling import FAST
from precision import F16, F32, assert_close, matmul_dtypes
from tables import rows
from transformations import TRANSFORMATIONS, N, W, X, loss, random_array

BF16 = np.dtype(jnp.bfloat16)
in_half = functools.partial(jmpscale.autocast, result_dtype=jnp.float32)


def signatures(fun, *args):
    """Returns the dtypes of the operands and results of the matmuls that a function is lowered to for a GPU."""
    text = jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    types = re.findall(r"(?:stablehlo\.dot_general|chlo\.ragged_dot).*: \((.*)\) -> (.*)", text)
    return {tuple(re.findall(r"x(b?f\d+)>", " ".join(found))) for found in types}


def by_hand(fun, dtype=F16):
    """Returns a bilinear float32 function whose operands, and in the backward pass its cotangents, are rounded."""

    def rounded(x):
        return x.astype(dtype).astype(F32)

    @jax.custom_vjp
    def run(a, b):
        return fun(rounded(a), rounded(b))

    def backward(saved, g):
        return jax.vjp(fun, *map(rounded, saved))[1](rounded(g))

    run.defvjp(lambda a, b: (run(a, b), (a, b)), backward)
    return run


# --- the oracle: operands and cotangents are rounded, results are not


EQUATIONS = {  # a matmul with any order of its axes, and the shapes of its operands
    "matrices": ("ik,kj->ij", (5, 7), (7, 6)),
    "a batch and two contracted axes": ("lbik,jklb->jbi", (3, 2, 5, 6), (7, 6, 3, 2)),
    "vector": ("kij,k->ij", (7, 3, 5), (7,)),
}


@pytest.mark.full
@pytest.mark.parametrize("dtype", [F16, pytest.param(BF16, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("case", rows(EQUATIONS, default={"a batch and two contracted axes"}))
def test_autocast_with_float32_results_equals_rounded_operands(case, dtype):
    equation, *shapes = case
    random = np.random.default_rng(0)
    a, b = (random_array(shape, random) for shape in shapes)
    einsum = functools.partial(jnp.einsum, equation)

    def run(fun):
        def results(a, b):
            y, vjp = jax.vjp(fun, a, b)
            return y, vjp(jnp.cos(y))

        return jax.jit(results, **FAST)(a, b)

    with jax.numpy_rank_promotion("allow"):
        result, exact = run(in_half(einsum, dtype=dtype)), run(einsum)
        assert_close(result, run(by_hand(einsum, dtype)), rtol=1e-6)
    assert all(jnp.abs(x - y).max() > 1e-5 for x, y in zip(*map(jax.tree.leaves, (result, exact)), strict=True))


def attend(h, w, matmul):
    q, k = matmul(h, w), matmul(h, w.T)
    return matmul(jax.nn.softmax(matmul(q, k.T)), h)


def scan(h, w, matmul):
    layer = jax.checkpoint(lambda h, _: (jnp.tanh(matmul(h, w)), None), policy=jax.checkpoint_policies.dots_saveable)
    return jax.lax.scan(layer, h, length=2)[0]


LAYERS = {
    "layer": lambda h, w, matmul: jnp.tanh(matmul(h, w)),
    "residual": lambda h, w, matmul: h + matmul(jax.nn.gelu(matmul(h, w)), w.T),
    "attention": attend,
    "scan": scan,
    "jit": lambda h, w, matmul: jax.jit(lambda h: matmul(jax.nn.standardize(h), w))(h),
    "vmap": lambda h, w, matmul: jax.vmap(lambda a: matmul(a, w))(h.reshape(2, N // 2, N)).reshape(N, N),
    "cond": lambda h, w, matmul: jax.lax.cond(h[0, 0] > 0, lambda h: matmul(h, w), lambda h: matmul(w, h), h),
}


@pytest.mark.full
@hypothesis.given(st.permutations(sorted(LAYERS)), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=5)
def test_random_programs_equal_casts_by_hand(names, seed):
    """Every program has every kind of layer, in a random order."""
    w = jnp.asarray(np.random.default_rng(seed).standard_normal((N, N)) / 4, jnp.float32)

    def program(w, x, matmul):
        for name in names:
            x = LAYERS[name](x, w, matmul)
        return jnp.mean(x**2)

    def gradients(matmul, wrap=lambda fun: fun):
        grad = jax.value_and_grad(wrap(functools.partial(program, matmul=matmul)), (0, 1))
        return jax.jit(grad, **FAST)(w, X)

    result, expected = gradients(jnp.matmul, in_half), gradients(by_hand(jnp.matmul))
    assert_close(result, expected, rtol=2e-4)  # float32's rounding of a cotangent may change how float16 rounds it


ON_ACCELERATORS = {name: row for name, row in TRANSFORMATIONS.items() if name != "compute_on"}


@pytest.mark.filterwarnings("ignore:The function .* includes a pmap")  # of JAX 0.7, about its speed
@pytest.mark.parametrize("transform", rows(ON_ACCELERATORS, default={"grad inside", "shard_map"}))
def test_transformations_keep_operands_in_half_precision_and_results_in_float32(transform):
    half, expected = transform(in_half), transform(lambda fun: fun)
    assert signatures(half, W, X) == {("f16", "f16", "f32")}
    assert_close(jax.jit(half, **FAST)(W, X), jax.jit(expected, **FAST)(W, X), rtol=3e-3)


@pytest.mark.full
@pytest.mark.parametrize("derivative", rows(default_form.DERIVATIVES, default={"forward mode"}))
def test_all_derivatives_multiply_in_half_precision(derivative):
    result = derivative(in_half(loss))
    assert signatures(result, W, X) == {("f16", "f16", "f32")}
    assert_close(result(W, X), derivative(loss)(W, X), rtol=5e-3)


# --- results do not overflow, and operands that do give NaN

LARGE = default_form.LARGE
OPERANDS = {  # the first operand has one row that is infinite in float16
    "matmul": lambda a, b: 1 / (a @ b),
    "ragged_dot": lambda a, b: 1 / jax.lax.ragged_dot(a, jnp.stack([b, b]), jnp.array([3, N - 3], jnp.int32)),
    "infinite operand": lambda a, b: 1 / (jnp.where(a > 1e4, -jnp.inf, a) @ b),
    "scan": lambda a, b: jax.lax.scan(lambda h, _: (1 / (h @ b), None), a, None, length=1)[0],
}


@pytest.mark.parametrize("fun", rows(OPERANDS, default={"matmul"}))
def test_operand_that_is_infinite_in_float16_gives_nan(fun):
    result = jax.jit(in_half(fun))(LARGE.at[0].set(70_000.0), LARGE)
    assert jnp.isnan(result[0]).all()
    assert_close(result[1:], jax.jit(fun)(LARGE, LARGE)[1:], rtol=1e-5)  # float16 holds 300


def test_result_above_the_largest_float16_number_is_finite_and_accurate():
    product = in_half(jnp.matmul)
    np.testing.assert_array_equal(product(LARGE, LARGE), LARGE @ LARGE)
    assert jnp.isnan(jmpscale.autocast(jnp.matmul)(LARGE, LARGE)).all()


def test_result_that_the_program_requests_in_float16_is_nan_if_infinite():
    result = in_half(lambda a, b: jnp.dot(a, b, preferred_element_type="float16"))(LARGE, LARGE)
    assert result.dtype == F16
    assert jnp.isnan(result).all()


@pytest.mark.full
@pytest.mark.parametrize("amplitude", [10, 60])
def test_attention_is_as_accurate_as_with_casts_by_hand(amplitude):
    """With an amplitude of 60, scores exceed the largest number of float16."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((16, 64, 2, 64)).astype(np.float32) for _ in range(3))
    q, k = q * amplitude, k * amplitude
    attention = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        hand = attention(*(x.astype(F16) for x in (q, k, v))).astype(F32)
        errors = [float(jnp.linalg.norm(x - attention(q, k, v))) for x in (in_half(attention)(q, k, v), hand)]
    assert errors[0] <= 1.001 * errors[1]


# --- what else differs from the default form, and what does not


MIXED = {
    "float16 operand": lambda w, x: x.astype(jnp.float16) @ w,
    "float16 parameters": lambda w, x: x @ w.astype(jnp.float16),
    "int32": lambda w, x: jnp.arange(N**2).reshape(N, N) @ w,
    "bool": lambda w, x: (x > 0) @ w,
}


@pytest.mark.parametrize("fun", rows(MIXED, default={"float16 operand"}))
def test_float32_results_of_other_operands(fun):
    with jax.numpy_dtype_promotion("standard"):
        half, expected = (jax.value_and_grad(lambda w, x, f=f: jnp.mean(f(w, x) ** 2)) for f in (in_half(fun), fun))
        assert signatures(half, W, X) == {("f16", "f16", "f32")}
        assert_close(half(W, X), expected(W, X), rtol=2e-3)


def test_convolutions_have_half_precision_results():
    convolve = in_half(lambda x, w: jax.lax.conv(x[None, None], w[None, None], (1, 1), "SAME"))
    assert matmul_dtypes(convolve, X, W) == {(F16,): 1}


@pytest.mark.filterwarnings("ignore:autocast has no effect")
@pytest.mark.parametrize(
    "fun", rows(default_form.KEPT | default_form.KEPT_BY_PRECISION, default={"inner products of rows"})
)
def test_programs_that_the_default_form_leaves_unchanged_are_unchanged(fun):
    texts = [str(jax.make_jaxpr(f)(X, W)) for f in (in_half(fun), fun)]
    assert re.sub(r" at 0x\w+", "", texts[0]) == re.sub(r" at 0x\w+", "", texts[1])


def test_autocast_takes_the_result_in_a_decorator():
    @jmpscale.autocast(dtype=jnp.bfloat16, result_dtype=jnp.float32)
    def predict(x, w):
        return x @ w

    assert signatures(predict, X, W) == {("bf16", "bf16", "f32")}
    assert signatures(jmpscale.autocast(jnp.matmul, result_dtype=jnp.float16), X, W) == {("f16", "f16", "f16")}


@pytest.mark.full
@pytest.mark.parametrize("options", [{"result_dtype": jnp.float32}, {"dtype": jnp.bfloat16}, {}], ids=str)
def test_autocast_is_transposed_by_solvers_unless_results_are_float16(options, monkeypatch):
    """The check for infinity, which only float16 results have, cannot be transposed."""
    # lineax, which other tests import, adds a rule to JAX.
    monkeypatch.delitem(ad.primitive_transposes, jax.lax.stop_gradient_p, raising=False)
    matrix = jnp.eye(8) * 4 + jnp.ones((8, 8))
    product = jmpscale.autocast(lambda x: (matrix @ jnp.stack([x, x], axis=1))[:, 0], **options)
    if not options:
        with pytest.raises(NotImplementedError, match="for 'stop_gradient' not implemented"):
            jax.scipy.sparse.linalg.gmres(product, jnp.ones(8))
        return
    for solve in jax.scipy.sparse.linalg.gmres, jax.scipy.sparse.linalg.bicgstab:
        np.testing.assert_allclose(solve(product, jnp.ones(8))[0], 1 / 12, rtol=1e-2)


def test_inner_autocast_decides():
    both = jmpscale.autocast(lambda w, x: jnp.mean(in_half(jnp.matmul)(x, w)) + jnp.mean(jnp.tanh(x) @ w))
    assert signatures(both, W, X) == {("f16", "f16", "f32"), ("f16", "f16", "f16")}


@pytest.mark.full
def test_attention_alone_can_have_float32_results():
    attention = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    q = 45 * random_array((1, 32, 2, 16), np.random.default_rng(0)) * 2  # scores exceed 65504

    def loss(q, attend):
        return attend(q, q, q) @ W

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        nested = functools.partial(jmpscale.autocast(loss), attend=in_half(attention))
        assert signatures(nested, q) == {("f16", "f16", "f32"), ("f16", "f16", "f16")}
        assert_close(nested(q), loss(q, attention), rtol=2e-3)
        assert jnp.isnan(jmpscale.autocast(loss)(q, attention)).any()


@pytest.mark.full
def test_program_with_float32_results_is_exported_for_several_platforms():
    program = jax.jit(jax.grad(in_half(loss)))
    exported = jax.export.export(program, platforms=("cpu", "cuda", "tpu"))(W, X)
    stored = jax.export.deserialize(exported.serialize())
    matmuls = re.findall(r"stablehlo\.dot_general .*", stored.mlir_module())
    assert {tuple(re.findall(r"x(f\d+)>", line)) for line in matmuls} == {("f16", "f16", "f32"), ("f32", "f32", "f32")}
    assert_close(stored.call(W, X), program(W, X), rtol=1e-5)


def test_algorithms_of_jax_are_lowered_as_before():
    in_half(jnp.matmul)(X, W)
    with pytest.raises(ValueError, match=r"F16_F16_F32.* is not supported"):
        jnp.matmul(X, W, precision=jax.lax.DotAlgorithmPreset.F16_F16_F32)
    assert signatures(jnp.matmul, X, W) == {("f32", "f32", "f32")}


ALGORITHM = jax.lax.DotAlgorithm(F16, F16, F32)  # has the fields of the precision by which autocast converts operands


def with_algorithm(x, w):
    return jnp.matmul(x, w, precision=ALGORITHM)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["autocast first", "algorithm first"])
def test_equal_algorithm_of_the_user_in_one_program_is_lowered_as_before(order):
    """JAX lowers two matmuls with equal parameters once."""
    funs = [in_half(jnp.matmul), with_algorithm]

    def program(x, w):
        return [funs[i](x, w) for i in order]

    text = jax.jit(program).trace(X, W).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.dot_general") == 2
    assert text.count("algorithm =") == 1
    checks = re.findall(r"stablehlo\.subtract (%\w+), \1 ", text)
    assert len(checks) == 2  # of both operands of one matmul


@pytest.mark.parametrize("is_compiled", [True, False])
def test_equal_algorithm_of_the_user_raises_on_a_cpu_as_before(is_compiled):
    meshes.require_cpu()
    dot = functools.partial(
        jax.lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), preferred_element_type=np.dtype(F32)
    )

    def program(x, w):
        return in_half(dot)(x, w), dot(x, w, precision=ALGORITHM)

    with pytest.raises(ValueError, match="not supported"):
        (jax.jit(program) if is_compiled else program)(X, W)


def test_precision_of_autocast_equals_only_itself():
    precision = half_operands.half_operands(F16)
    for other in ALGORITHM, tuple(ALGORITHM), half_operands.half_operands(BF16):
        assert precision != other
        assert other != precision
        assert len({precision, other}) == 2
    assert precision == half_operands.HalfOperands(F16, F16, F32)
    assert len({precision, half_operands.HalfOperands(F16, F16, F32)}) == 1


@pytest.mark.full
def test_dots_saveable_saves_float32_results():
    """The policy finds matmuls by the identity of their primitive; another primitive would be computed twice."""

    def matmuls(policy):
        layer = jax.checkpoint(lambda w, x: jnp.mean(jnp.tanh(x @ w) @ w), policy=policy)
        return matmul_dtypes(jax.grad(in_half(layer)), W, X)

    policies = jax.checkpoint_policies
    saved, recomputed = matmuls(policies.dots_saveable), matmuls(policies.nothing_saveable)
    assert saved == matmuls(policies.everything_saveable)
    assert sum(recomputed.values()) == sum(saved.values()) + 1


def test_autocast_raises_if_jax_has_moved_its_lowering_rules(monkeypatch):
    half_operands.half_operands.cache_clear()
    half_operands._register_lowering.cache_clear()
    monkeypatch.delattr(mlir, "_lowerings")
    with pytest.raises(ImportError, match="jmpscale does not support JAX"):
        in_half(jnp.matmul)(X, W)


# --- diagnosis


def two_layers(w, x):
    hidden = x @ w  # the line of the overflow
    return jnp.mean((jnp.tanh(hidden) @ w) ** 2)


@pytest.mark.full
def test_diagnose_measures_operands():
    """A step with float32 results differs from float32, and by less than with half-precision results."""
    default, ours = (
        jmpscale.diagnose(wrap(two_layers))(jmpscale.static(2.0**8), W, X) for wrap in (jmpscale.autocast, in_half)
    )
    grads, expected = (jax.tree.map(np.asarray, jax.grad(fun)(W, X)) for fun in (in_half(two_layers), two_layers))
    error = np.linalg.norm(grads - expected) / np.linalg.norm(expected)
    assert 0.8 * error <= ours.gradient_error <= 1.25 * error
    assert ours.gradient_error < default.gradient_error
    assert not ours.lines


@pytest.mark.full
def test_diagnose_names_the_line_of_an_operand_that_overflows():
    diagnosis = jmpscale.diagnose(in_half(two_layers))(jmpscale.static(2.0**8), W, 1e5 * X)
    assert [re.sub(r".*:\d+ ", "", line) for line in diagnosis.lines] == ["(two_layers)"]
    assert "overflows: convert_element_type" in diagnosis.summary


@pytest.mark.full
def test_diagnose_has_the_nan_of_an_operand_that_overflows():
    """Without it, the loss would be 0: 1 / infinity."""
    large = jnp.full((N, N), 1e5)
    loss_fn = in_half(lambda w, x: jnp.mean(1 / (x @ w)))
    assert jnp.isnan(loss_fn(large, X + large))
    assert jnp.isnan(jmpscale.diagnose(loss_fn)(jmpscale.static(1.0), large, X + large).loss)


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
def test_check_step_accepts_a_step_with_float32_results():
    tx = jmpscale.with_loss_scaling(optax.adam(1e-3))

    @jax.jit
    def step(state, x):
        params, opt_state = state
        loss, grads = jmpscale.value_and_grad(in_half(two_layers))(opt_state, params, x)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    check_step(step)((W, tx.init(W)), X)
