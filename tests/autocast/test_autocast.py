"""autocast runs the matmuls of a float32 program in half precision, under every transformation, and nothing else."""

import functools
import gc
import inspect
import re
import weakref

import chex
import jax
import jax.custom_batching
import jax.custom_derivatives
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jmpscale
from jmpscale._autocast import rules

import meshes
import pages
from compiling import FAST, count_compilations
from precision import F16, F32, assert_close, assert_half, matmul_dtypes
from tables import rows
from transformations import TRANSFORMATIONS, N, W, X, custom_product, gradients, layers_in_scan, loss

SCALER = jmpscale.static(2.0**8)
BF16 = np.dtype(jnp.bfloat16)
RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(("dtype", "rtol"), [(F16, 5e-3), (BF16, 4e-2)], ids=str)
def test_autocast_runs_matmuls_in_half_precision(dtype, rtol):
    half, expected = gradients(jmpscale.autocast(loss, dtype=dtype)), gradients(loss)
    assert_half(half, expected, W, X, dtype=dtype)
    assert_close(jax.jit(half, **FAST)(W, X), jax.jit(expected, **FAST)(W, X), rtol)


@pytest.mark.parametrize("half", [jnp.float16, "bfloat16", jnp.bfloat16], ids=str)
def test_autocast_takes_the_dtype_in_a_decorator(half):
    @jmpscale.autocast(dtype=half)
    def predict(x, w):
        """Returns a prediction."""
        return x @ w

    assert (predict.__name__, predict.__doc__) == ("predict", "Returns a prediction.")
    assert matmul_dtypes(predict, X, W) == {(jnp.dtype(half),): 1}


DEFAULT = {"grad inside", "scan over layers"}


@pytest.mark.filterwarnings("ignore:The function .* includes a pmap")  # of JAX 0.7, about its speed
@pytest.mark.parametrize("transform", rows(TRANSFORMATIONS, default=DEFAULT))
def test_autocast_enters_transformations(transform):
    half, expected = transform(jmpscale.autocast), transform(lambda fun: fun)
    assert_half(half, expected, W, X)
    assert_close(jax.jit(half, **FAST)(W, X), jax.jit(expected, **FAST)(W, X), rtol=5e-3)


@pytest.mark.full
def test_autocast_is_exported_with_symbolic_shapes():
    (batch,) = jax.export.symbolic_shape("batch")
    types = jax.ShapeDtypeStruct((N, N), jnp.float32), jax.ShapeDtypeStruct((batch, N), jnp.float32)
    program = jax.jit(gradients(jmpscale.autocast(loss)))
    stored = jax.export.deserialize(jax.export.export(program)(*types).serialize())
    chex.assert_trees_all_close(stored.call(W, X[:3]), program(W, X[:3]), rtol=1e-3)
    matmuls = re.findall(r" stablehlo.dot_general .*", stored.mlir_module())
    assert [re.findall(r"x(f\d+)>", line) for line in matmuls] == [["f16"] * 3] * 6


@pytest.mark.parametrize(
    "axis_type", [pytest.param(AxisType.Auto, marks=pytest.mark.full), AxisType.Explicit], ids=["Auto", "Explicit"]
)
@pytest.mark.parametrize("order", ["grad outside", pytest.param("grad inside", marks=pytest.mark.full)])
def test_autocast_keeps_shardings(axis_type, order):
    mesh = meshes.make_mesh(axis_type, data=4, model=2)
    is_explicit = axis_type is AxisType.Explicit

    def sharded_loss(w, x):
        hidden = jnp.einsum("bi,ij->bj", x, w, out_sharding=jax.P("data") if is_explicit else None)
        hidden = hidden if is_explicit else jax.lax.with_sharding_constraint(hidden, jax.P("data"))
        return jnp.mean(jnp.tanh(hidden) ** 2), hidden

    def step(wrap):
        if order == "grad outside":
            return jax.value_and_grad(wrap(sharded_loss), has_aux=True)
        return wrap(jax.value_and_grad(sharded_loss, has_aux=True))

    with jax.set_mesh(mesh):
        w, x = jax.device_put(W, jax.P() if is_explicit else jax.P(None, "model")), jax.device_put(X, jax.P("data"))
        run, expected = step(jmpscale.autocast), step(lambda fun: fun)
        assert_half(run, expected, w, x)
        result, expected = (jax.jit(fn, **FAST)(w, x) for fn in (run, expected))
    assert_close(result, expected, rtol=5e-3)
    assert jax.tree.map(jax.typeof, result) == jax.tree.map(jax.typeof, expected)
    same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), result, expected)
    assert jax.tree.all(same)


# --- one operand is float32


def in_blocks_that_return(dtype):
    """Blocks of a matmul and a convolution whose results, and therefore residuals, are stored in half precision."""

    def fun(w, x):
        for _ in range(2):
            x = jnp.tanh(x @ w).astype(dtype)
        images = jax.lax.conv(x.astype(jnp.float32)[None, None], w[None, None], (1, 1), "SAME")
        return jnp.mean(jnp.einsum("ij,jk", images[0, 0].astype(dtype), w) ** 2)

    return fun


def two_matmuls(w, x):
    return jnp.mean(jnp.tanh(x @ w / 9) @ w)


MIXED = {
    "blocks that return float16": lambda wrap: (wrap(in_blocks_that_return(jnp.float16)), W, X),
    "float16 inputs": lambda wrap: (wrap(two_matmuls), W, X.astype(jnp.float16)),
    "float16 parameters": lambda wrap: (wrap(two_matmuls), W.astype(jnp.float16), X),
    "bool inputs": lambda wrap: (wrap(two_matmuls), W, X > 0),
    "uint8 inputs": lambda wrap: (wrap(two_matmuls), W, jnp.arange(N, dtype="uint8")),
    "int32 inputs": lambda wrap: (wrap(two_matmuls), W, jnp.arange(N**2).reshape(N, N)),
    "float16 result": lambda wrap: (wrap(lambda w, x: jnp.mean(jnp.dot(x, w, preferred_element_type="float16"))), W, X),
    "float16 by bfloat16": lambda wrap: (
        wrap(lambda w, x: jnp.mean(jax.lax.dot(x, w, preferred_element_type=jnp.float32)), dtype=jnp.bfloat16),
        W,
        X.astype(jnp.bfloat16),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("case", rows(MIXED, default={"blocks that return float16"}))
def test_autocast_converts_matmuls_with_one_float32_operand(case):
    expected, *args = case(lambda fun, **_: jax.value_and_grad(fun))
    outside, *_ = case(lambda fun, **options: jax.value_and_grad(jmpscale.autocast(fun, **options)))
    inside, *_ = case(lambda fun, **options: jmpscale.autocast(jax.value_and_grad(fun), **options))
    dtype = BF16 if any(x.dtype == BF16 for x in args) else F16
    with jax.numpy_dtype_promotion("standard"):
        expected_result = jax.jit(expected, **FAST)(*args)
        for half in (outside, inside):
            assert_half(half, expected, *args, dtype=dtype)
            assert_close(jax.jit(half, **FAST)(*args), expected_result, rtol=2e-2)


# --- kernels get half-precision operands by hand


@pytest.mark.parametrize("order", ["grad outside", "grad inside"])
def test_recipe_of_the_guide_runs_fused_attention(monkeypatch, order):
    """The kernel is only traced, with the check for the library stubbed."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_, **__: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda *_: False, raising=False)
    page = (pages.DOCS / "guides" / "autocast.md").read_text()
    (recipe,) = re.findall(r"^```py\n(def attend.*?)^```", page, flags=re.M | re.S)
    namespace = {"jax": jax, "jnp": jnp, "jmpscale": jmpscale}
    exec(recipe, namespace)

    def fun(w, x, attend):
        q, k, v = (jnp.reshape(x @ w * i, (1, N, 1, N)) for i in (1, 2, 3))
        return jnp.mean(attend(q, k, v) ** 2)

    def unchanged(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    def gradients(attend):
        loss_fn = functools.partial(fun, attend=attend)
        grad = jax.grad(jmpscale.autocast(loss_fn)) if order == "grad outside" else jmpscale.autocast(jax.grad(loss_fn))
        return jax.make_jaxpr(grad)(W, X)

    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(NotImplementedError, match="Q must be fp16/bf16"):
            gradients(unchanged)
        kernels = [eqn for eqn in gradients(namespace["attend"]).eqns if "dot_product_attention" in eqn.primitive.name]
    assert len(kernels) == 2  # forward and backward
    assert all(x.aval.dtype == F16 for eqn in kernels for x in eqn.invars[:3])


# --- some operations run as written


def with_precision(precision):
    return lambda x, w: jnp.dot(x, w, precision=precision)


def with_default_precision(precision):
    def fun(x, w):
        with jax.default_matmul_precision(precision):
            return jnp.tanh(x @ w) @ w

    return fun


def in_dtype(dtype):
    return lambda x, w: x.astype(dtype) @ w.astype(dtype)


KEPT_BY_PRECISION = {
    "precision='highest'": with_precision("highest"),
    "precision of one operand": with_precision(("highest", "default")),
    "default_matmul_precision": with_default_precision("highest"),
    "algorithm": with_precision(jax.lax.DotAlgorithmPreset.F32_F32_F32),
    "algorithm as default": with_default_precision("BF16_BF16_F32_X3"),
    "convolution": lambda x, w: jax.lax.conv(x[None, None], w[None, None], (1, 1), "SAME", precision="highest"),
}
KEPT = {
    "inner products of rows": lambda x, w: jnp.einsum("ij,ij->i", x, w),
    "inner product of a row and a column": lambda x, w: x[:1] @ w[:, :1],
    "outer product of a column and a row": lambda x, w: x[:, :1] @ w[:1],
    "bfloat16 result": lambda x, w: jax.lax.dot(x, w, preferred_element_type=jnp.bfloat16),
    "inner product of float16 and float32": lambda x, w: jax.lax.dot(
        x[0].astype(jnp.float16), w[0], preferred_element_type=jnp.float32
    ),
    "custom_jvp": custom_product,
    "linear solve": lambda x, w: jnp.linalg.solve(x + 9 * jnp.eye(N), w),
}
DEFAULT_KEPT = {"inner products of rows", "outer product of a column and a row", "precision='highest'"}
DEFAULT_KEPT |= {"default_matmul_precision", "algorithm", "convolution"}


@pytest.mark.filterwarnings("ignore:autocast has no effect")
@pytest.mark.parametrize("fun", rows(KEPT | KEPT_BY_PRECISION, default=DEFAULT_KEPT))
def test_autocast_leaves_program_unchanged(fun):
    """The functions without effect in test_autocast_warnings.py are unchanged as well."""
    assert _text(jax.make_jaxpr(jmpscale.autocast(fun))(X, W)) == _text(jax.make_jaxpr(fun)(X, W))


def _text(jaxpr):
    return re.sub(r" at 0x\w+", "", str(jaxpr))


@pytest.mark.full
def test_autocast_runs_unknown_primitives_as_written(monkeypatch):
    """A new version of JAX may have other primitives that hold jaxprs."""
    monkeypatch.setattr(jmpscale._programs.rewrite, "TRANSPARENT", set())
    monkeypatch.setattr(rules, "check_primitives", lambda: None)

    def fun(w, x):
        return layers_in_scan(w, x) + loss(w, x)

    half = jmpscale.autocast(fun)
    assert matmul_dtypes(half, W, X) == {(F32,): 1, (F16,): 2}
    assert_close(jax.jit(half, **FAST)(W, X), fun(W, X), rtol=5e-3)


@pytest.mark.parametrize("precision", [None, "default", "high", "DEFAULT", jax.lax.DotAlgorithmPreset.DEFAULT])
def test_autocast_converts_matmuls_of_low_precision(precision):
    assert matmul_dtypes(jmpscale.autocast(with_precision(precision)), X, W) == {(F16,): 1}


def test_autocast_leaves_float64_unchanged(x64):
    for fun in (in_dtype(jnp.float64), lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float64)):
        mixed = jmpscale.autocast(lambda x, w, fun=fun: (x @ w, fun(x, w)))
        out = mixed(X, W)
        assert [y.dtype for y in out] == [F32, np.float64]
        np.testing.assert_array_equal(out[1], fun(X, W))


# --- between matmuls, all operations are as exact as in float32


def integers(*shape, largest=4):
    """Small integers, whose matmuls are exact in float16."""
    return jnp.asarray(RANDOM.integers(-largest, largest + 1, shape), jnp.float32)


A, B = integers(4, N), integers(N, 6)
ONES = jnp.ones((N, N))
EXACT = {
    "mask of -1e9": lambda a, b: jax.nn.softmax(jnp.where(jnp.tri(4, 6, dtype=bool), a @ b, -1e9)),
    "epsilon of 1e-8": lambda a, b: jax.lax.rsqrt(jnp.sum((0 * a @ b) ** 2, 1) + 1e-8),
    "p - 1 near convergence": lambda a, b: (
        jax.nn.softmax(jnp.log1p(jnp.abs(a @ b)) * 8) - jax.nn.one_hot(jnp.zeros(4, int), 6)
    ),
    "inner product above 65504": lambda a, b: jnp.vdot(1000 * a, a) + jnp.sum(a @ b),
    "rotary angles": lambda a, b: (
        jnp.sin(jnp.arange(4, 8196, 2048.0)[:, None] @ jnp.array([[1.0, 1e-4]])) + (a @ b)[:, :2]
    ),
    "weak type": lambda a, b: (a @ jnp.full((N, 2), 2.0), jnp.full((2, N), 2.0) @ jnp.full((N, 2), 1.0)),
}
EXACT_GRADIENTS = {
    "bias": lambda c, b: jnp.sum((A @ b + c[0, 0]) ** 3 * 1e-9),
    "sum of two matmuls": lambda a, b: jnp.sum(a @ (256 * ONES)) + jnp.sum(a @ jnp.eye(N)),  # 2048 + 1
    "repeated rows": lambda a, b: jnp.sum(a[jnp.array([0, 0, 0, 1])] @ jnp.full((N, 2), 341.5)),  # 3 * 683
    "broadcast": lambda a, b: jnp.sum(jnp.broadcast_to(a[:, :1], (4, N)) @ jnp.eye(N).at[1:].set(300.0)),
}


@pytest.mark.parametrize("fun", rows(EXACT, default={"p - 1 near convergence"}))
def test_autocast_is_exact_between_matmuls(fun):
    _assert_equal(jmpscale.autocast(fun)(A, B), _one_by_one(fun, A, B))


@pytest.mark.parametrize("order", ["grad outside", pytest.param("grad inside", marks=pytest.mark.full)])
@pytest.mark.parametrize("fun", rows(EXACT_GRADIENTS, default={"sum of two matmuls"}))
def test_autocast_adds_gradients_exactly(fun, order):
    """Sums of gradients that float16 cannot hold, such as 2048 + 1."""
    grad = jax.grad(jmpscale.autocast(fun)) if order == "grad outside" else jmpscale.autocast(jax.grad(fun))
    _assert_equal(grad(A, B), _one_by_one(jax.grad(fun), A, B))


def _one_by_one(fun, *args):
    """Runs each operation by itself, because XLA may round differently in two programs that it fuses differently."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args))


def _assert_equal(result, expected):
    chex.assert_trees_all_equal(result, expected)
    assert jax.tree.map(jax.typeof, result) == jax.tree.map(jax.typeof, expected)


# --- an overflow is never hidden


LARGE = jnp.full((N, N), 300.0)  # its square has elements of 720,000, which are infinite in float16
HIDDEN = {  # programs that are finite if the result of a matmul is infinite
    "element-wise": lambda a, b: [fun(a @ b) for fun in (jnp.reciprocal, jnp.tanh, lambda y: jnp.minimum(y, 1.0))],
    "element-wise, negative": lambda a, b: [fun(-a @ b) for fun in (jax.nn.relu, jnp.exp)],
    "convolution": lambda a, b: 1 / jax.lax.conv(a[None, None], b[None, None, :3, :3], (1, 1), "SAME"),
    "ragged_dot": lambda a, b: 1 / jax.lax.ragged_dot(a, jnp.stack([b, b]), jnp.array([3, N - 3], jnp.int32)),
    "float16 result": lambda a, b: 1 / jnp.dot(a, b, preferred_element_type="float16"),
    "float16 operand": lambda a, b: 1 / (a.astype(jnp.float16) @ b),
    "scan": lambda a, b: jax.lax.scan(lambda h, _: (1 / (h @ b), None), a, None, length=3)[0],
    "infinite operand": lambda a, b: 1 / (jnp.where(jnp.eye(N, dtype=bool), -jnp.inf, a) @ b),
}


@pytest.mark.parametrize("fun", rows(HIDDEN, default={"element-wise"}))
def test_infinite_result_in_float16_is_nan(fun):
    with jax.numpy_dtype_promotion("standard"):
        for result in jax.tree.leaves(jax.jit(jmpscale.autocast(fun))(LARGE, LARGE)):
            assert jnp.isnan(result).all()
        for result in jax.tree.leaves(jax.jit(fun, **FAST)(LARGE, LARGE)):
            assert jnp.isfinite(result).all()


@pytest.mark.full
def test_infinite_result_in_bfloat16_remains():
    """It is infinite in float32, too, so autocast hides nothing."""
    assert jmpscale.autocast(lambda a, b: 1 / (a @ b), dtype=jnp.bfloat16)(LARGE, 1e37 * LARGE).max() == 0


def test_finite_results_keep_their_sign_and_nan_remains():
    x = jnp.stack([jnp.array([-0.0, 65504.0, -65504.0, 2.0**-24, 1.0]), jnp.full(5, jnp.nan)])
    result = jax.jit(jmpscale.autocast(lambda x: x @ jnp.eye(5)))(x)
    np.testing.assert_array_equal(result[0, 1:], x[0, 1:])
    assert jnp.isnan(result[1]).all()


DERIVATIVES = {
    "gradient": lambda fun: jax.grad(fun, (0, 1)),
    "forward mode": lambda fun: lambda w, x: jax.jvp(fun, (w, x), (x, w)),
    "Hessian-vector product": lambda fun: lambda w, x: jax.jvp(jax.grad(fun, (0, 1)), (w, x), (x, w)),
    "gradient of a gradient": lambda fun: jax.grad(lambda w, x: jnp.sum(jax.grad(fun)(w, x) ** 2), (0, 1)),
    "third derivative": lambda fun: (
        lambda w, x: jax.jvp(lambda w: jax.jvp(jax.grad(fun), (w, x), (x, w))[1], (w,), (x,))
    ),
}


@pytest.mark.parametrize("derivative", rows(DERIVATIVES, default={"gradient", "Hessian-vector product"}))
def test_derivatives_equal_the_derivatives_of_casts_by_hand(derivative):
    """The check for infinity changes no bit of them."""

    def matmul(a, b):
        return jnp.matmul(a.astype(F16), b.astype(F16)).astype(F32)

    def by_hand(w, x):
        return jnp.mean((matmul(jnp.tanh(matmul(x, w)), w.T) - x) ** 2)

    _assert_equal(_one_by_one(derivative(jmpscale.autocast(loss)), W, X), _one_by_one(derivative(by_hand), W, X))


def test_overflow_that_a_division_hides_is_skipped():
    loss_fn, tx = jmpscale.autocast(lambda w, x: jnp.mean(1 / (x @ w))), jmpscale.with_loss_scaling(optax.sgd(0.1))
    state = tx.init(LARGE)
    value, grads = jax.jit(jmpscale.value_and_grad(loss_fn), **FAST)(state, LARGE, LARGE)
    updates, state = tx.update(grads, state, LARGE, value=value)
    assert jnp.isnan(value)
    chex.assert_trees_all_equal(updates, jnp.zeros_like(LARGE))
    scaler = jmpscale.get_scaler(state)
    assert (scaler.last_skip_reason, scaler.loss_scale) == (jmpscale.SkipReason.LOSS, 2.0**16)


# --- arguments and results may be any objects


class NotAPytree:
    weight = W

    def apply(self, x):
        return x @ self.weight


ARGUMENTS = {
    "keyword arguments": lambda wrap: wrap(lambda x, *, w: x @ w)(X, w=W),
    "tree with Python numbers": lambda wrap: wrap(lambda tree, x: x @ tree["w"][0] * tree["n"])({"w": [W], "n": 2}, X),
    "strings and functions": lambda wrap: wrap(lambda w, name, fun: {name: fun(X @ w)})(W, "text", jnp.tanh),
    "object that is not a pytree": lambda wrap: wrap(lambda model, x: x @ model.weight)(NotAPytree(), X),
    "NumPy arrays": lambda wrap: wrap(lambda w, x: jnp.dot(x, w))(np.asarray(W), np.asarray(X)),
    "PRNG key": lambda wrap: wrap(lambda w, key: (X @ w, jax.random.uniform(key), key))(W, jax.random.key(0)),
    "bound method": lambda wrap: wrap(NotAPytree().apply)(X),
    "other results": lambda wrap: wrap(lambda w: (X @ w, None, "text", 3, jnp.tanh, np.float32(2), W, 1.5))(W),
    "constant results": lambda wrap: wrap(lambda w: (X @ w, jnp.float32(3), jnp.zeros(2), jnp.asarray(3.0)))(W),
    "argument as result": lambda wrap: wrap(lambda w: (w, X @ w))(W),
    "no result": lambda wrap: wrap(lambda w: jax.debug.callback(lambda y: None, X @ w))(W),
    "closure": lambda wrap: jax.jit(lambda w: wrap(lambda x: x @ w)(X))(W),
    "closure under vmap": lambda wrap: jax.vmap(lambda w: wrap(lambda: X @ w)())(jnp.stack([W, W])),
    "closure under grad": lambda wrap: jax.grad(lambda w: wrap(lambda x: jnp.sum(x @ w))(X))(W),
}


@pytest.mark.parametrize("call", rows(ARGUMENTS, {"closure under vmap", "bound method", "no result", "PRNG key"}))
def test_autocast_accepts_any_arguments_and_results(call):
    result, expected = call(jmpscale.autocast), call(lambda fun: fun)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        if isinstance(y, jax.Array) and jnp.issubdtype(y.dtype, jnp.floating):
            assert_close(x, y, rtol=2e-3)
        else:
            assert type(x) is type(y)
            assert x == y


@pytest.mark.parametrize("block", ["jit", "remat2", "shard_map"])
def test_autocast_raises_if_jax_has_renamed_a_primitive(block, monkeypatch):
    """Otherwise the matmuls of a block would silently run in float32."""
    module = jmpscale._programs.jaxpr
    monkeypatch.setattr(module, "TRANSPARENT", module.TRANSPARENT - {block})
    jmpscale._programs.rewrite.check_primitives.cache_clear()
    with pytest.raises(ImportError, match="jmpscale does not support JAX"):
        jmpscale.autocast(jnp.dot)(W, W)


def test_first_call_of_autocast_may_be_inside_a_mesh():
    jmpscale._programs.rewrite.check_primitives.cache_clear()
    half, data = jmpscale.autocast(lambda x: x @ W), jax.P("data")
    run = jax.jit(jax.shard_map(half, mesh=meshes.make_mesh(data=2), in_specs=data, out_specs=data))
    assert_close(run(X), X @ W, rtol=5e-3)


PICKLED = {
    "autocast": lambda fun: jmpscale.autocast(fun),
    "bfloat16": lambda fun: jmpscale.autocast(fun, dtype=jnp.bfloat16),
    "scaled_backward": lambda fun: jmpscale.scaled_backward(jmpscale.autocast(fun), 2.0**8),
    "value_and_grad": lambda fun: functools.partial(jmpscale.value_and_grad(jmpscale.autocast(fun)), SCALER),
}


@pytest.mark.parametrize("wrap", rows(PICKLED, default={"autocast"}))
def test_autocast_is_pickled_by_value(wrap):
    """Programs that run functions in other processes, such as Ray and joblib, use cloudpickle."""
    cloudpickle = pytest.importorskip("cloudpickle")
    fun = wrap(lambda w, x: jnp.mean((x @ w) ** 2))
    fun(W, X)
    stored = cloudpickle.loads(cloudpickle.dumps(fun))
    chex.assert_trees_all_equal(stored(W, X), fun(W, X))


# --- the compiled program shows the user's names and lines


def _location(line, text):
    """Returns the location of an operation in a lowered program, with all references resolved."""
    definitions = dict(re.findall(r"^(#loc\d*) = (.*)$", text, flags=re.MULTILINE))
    (location,) = re.findall(r"loc\((#loc\d*)\)$", line)
    while references := re.findall(r"#loc\d+", location):
        location = location.replace(references[0], definitions[references[0]])
    return location


@pytest.mark.full
def test_autocast_keeps_names_and_source_lines():
    def inner(w, x):
        with jax.named_scope("inner_scope"):
            return jnp.tanh(x @ w)

    lines, first = inspect.getsourcelines(inner)
    inner_line = first + next(i for i, line in enumerate(lines) if "x @ w" in line)

    def named_loss(w, x):
        with jax.named_scope("outer_scope"):
            h = jax.jit(inner)(w, x)
        h = jax.lax.scan(lambda h, _: (inner(w, h), None), h, None, length=2)[0]
        return jnp.sum(h)

    lowered = jax.jit(jax.grad(jmpscale.autocast(named_loss))).lower(W, X)
    text = lowered.as_text(debug_info=True)
    found = [_location(line, text) for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(found) == 5  # the input has no gradient
    for location in found:
        assert "inner_scope" in location
        assert re.search(rf'test_autocast\.py":{inner_line}\b', location)
    converted = [_location(line, text) for line in text.splitlines() if re.search(r"stablehlo.convert.*xf16>", line)]
    assert converted
    assert all("inner_scope" in location for location in converted)
    assert re.search(r'op_name="[^"]*outer_scope\)*/jit\(inner\)/[^"]*inner_scope', lowered.compile().as_text())


def test_autocast_shows_the_line_of_the_user_in_errors():
    def fails(w, x):
        return x @ w[:3]  # the line of the error

    with pytest.raises(TypeError) as caught:
        jmpscale.autocast(fails)(W, X)
    assert any(entry.name == "fails" for entry in caught.traceback)


# --- a function is compiled once


def test_autocast_compiles_nothing_in_a_second_eager_call():
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    fun = jmpscale.autocast(lambda w, x: layer(w, layer(w, x)) @ w)
    fun(W, X)
    with count_compilations() as compilations:
        fun(W, X)
    assert not compilations


def test_autocast_rewrites_an_inner_function_once():
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    unused = jax.jit(lambda x: x + 1)

    def fun(w, x):
        for _ in range(4):
            x = unused(layer(w, x))
        return x

    jaxpr, expected = (jax.make_jaxpr(wrap(fun))(W, X) for wrap in (jmpscale.autocast, lambda fun: fun))
    calls = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
    assert len(calls) == 8
    assert len(set(calls)) == 2
    assert calls[1] in [eqn.params["jaxpr"] for eqn in expected.eqns]  # unchanged, and therefore the same object
    assert jax.jit(jmpscale.autocast(fun)).lower(W, X).as_text().count("stablehlo.dot_general") == 1


# --- at the end, because it clears the caches


@pytest.mark.full
def test_autocast_keeps_no_reference_to_its_arguments_or_programs():
    memo = rules._MEMOS[F16, F16]

    def collect_garbage():
        jax.clear_caches()
        gc.collect()

    def arrays_of_a_step():
        w, x = W + 1, X + 1
        closed_over = X + 2
        without_matmul, with_matmul = jax.jit(lambda x: jnp.sin(x)), jax.jit(lambda w, x: x @ w)
        fun = jmpscale.autocast(lambda w: jnp.sum(with_matmul(w, without_matmul(closed_over)) + x))
        jax.grad(fun)(w)
        return [weakref.ref(array) for array in (w, x, closed_over)]

    collect_garbage()
    before = len(memo)
    references = arrays_of_a_step()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    collect_garbage()
    assert len(memo) <= before
