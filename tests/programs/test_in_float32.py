"""in_float32 is the inverse of autocast and of casts, under every transformation, and keeps derivative rules."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmpscale

import meshes
from arrays import normal
from compiling import FAST
from layers import LAYERS
from precision import F32, assert_close, assert_norms_close, equations, matmul_dtypes
from tables import rows
from transformations import TRANSFORMATIONS, W, X

B, H = jnp.bfloat16, jnp.float16
F8 = jnp.float8_e4m3fn


def after_autocast(fun):
    return jmpscale.in_float32(jmpscale.autocast(fun))


def after_autocast_with_float32_results(fun):
    return jmpscale.in_float32(jmpscale.autocast(fun, result_dtype=jnp.float32))


@pytest.mark.filterwarnings("ignore:The function .* includes a pmap")  # of JAX 0.7, about its speed
@pytest.mark.parametrize(
    "wrap",
    [after_autocast, pytest.param(after_autocast_with_float32_results, marks=pytest.mark.full)],
    ids=["half results", "float32 results"],
)
@pytest.mark.parametrize("transform", rows(TRANSFORMATIONS, default={"scan over layers", "while"}))
def test_in_float32_is_the_inverse_of_autocast(transform, wrap):
    found, expected = transform(wrap), transform(lambda fun: fun)
    assert set(matmul_dtypes(found, W, X)) == {(F32,)}
    assert_close(jax.jit(found, **FAST)(W, X), jax.jit(expected, **FAST)(W, X), rtol=1e-5)


@pytest.mark.usefixtures("standard_promotion_and_ranks")
@pytest.mark.parametrize("case", rows(LAYERS, default={"NNX: LoRA"}))
def test_in_float32_is_the_inverse_of_autocast_in_layers(case):
    (step, *args), (expected, *_) = case(after_autocast), case(jmpscale.in_float32)
    (value, grads, *state), (expected_value, expected_grads, *expected_state) = (
        jax.jit(fn, **FAST)(*args) for fn in (step, expected)
    )
    assert_norms_close(grads, expected_grads, rtol=1e-5)
    assert_close((value, state), (expected_value, expected_state), rtol=1e-5)


# --- casts by hand: each row is a function of a dtype, which returns a function of w and x


def casts(dtype):
    return lambda w, x: jnp.mean(jnp.tanh(x.astype(dtype) @ w.astype(dtype)).astype(F32) ** 2)


def clipping(dtype):
    """A derivative rule that is not the derivative, and computes in a dtype."""

    @jax.custom_vjp
    def clipped(x, count):
        return x * 2

    def backward(saved, g):
        x, count = saved
        return (jnp.clip(g, -0.1, 0.1).astype(dtype) * x.astype(dtype) * count[0].astype(dtype)).astype(g.dtype), None

    clipped.defvjp(lambda x, count: (x * 2, (x, count)), backward)
    return lambda w, x: jnp.sum(clipped(x @ w, jnp.array([3])) ** 2)


def straight_through(dtype):
    @jax.custom_jvp
    def rounded(x, count):
        return jnp.round(x), count

    @rounded.defjvp
    def _(primals, tangents):
        x, count = primals
        change = (tangents[0].astype(dtype) * x.astype(dtype)).astype(F32)
        return rounded(x, count), (change, np.zeros(count.shape, jax.dtypes.float0))

    return lambda w, x: jnp.sum(rounded(x @ w, jnp.array([3]))[0] * x)


def in_a_scan(dtype):
    def fun(w, x):
        total, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w.astype(dtype)), None), x.astype(dtype), length=3)
        return jnp.mean(total.astype(F32))

    return fun


def recomputed(dtype):
    layer = jax.checkpoint(lambda w, x: jax.nn.relu(x @ w.astype(dtype)), policy=jax.checkpoint_policies.dots_saveable)
    return lambda w, x: jnp.mean(layer(w, layer(w, x.astype(dtype))).astype(F32) ** 2)


def counted(dtype):
    """A sum that half precision cannot hold, in a loop whose condition reads it."""

    def fun(w, x):
        count = jax.lax.while_loop(lambda n: n < 300, lambda n: n + dtype(1), dtype(0))
        return jnp.mean(x @ w) * jax.lax.stop_gradient(count).astype(F32)

    return fun


CASTS = {
    "casts, bfloat16": (casts, B),
    "casts, float16": (casts, H),
    "casts, float8": (casts, F8),
    "custom_vjp": (clipping, B),
    "custom_jvp": (straight_through, B),
    "scan": (in_a_scan, H),
    "checkpoint": (recomputed, B),
}
ORDERS = {
    "grad outside": lambda fun: jax.value_and_grad(jmpscale.in_float32(fun), (0, 1)),
    "grad inside": lambda fun: jmpscale.in_float32(jax.value_and_grad(fun, (0, 1))),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("row", rows(CASTS, default={"custom_vjp", "custom_jvp", "checkpoint"}))
def test_in_float32_computes_what_the_program_without_casts_computes(row, order):
    make, dtype = row
    found = jax.jit(ORDERS[order](make(dtype)), **FAST)(W, X)
    expected = jax.jit(jax.value_and_grad(make(jnp.float32), (0, 1)), **FAST)(W, X)
    assert_close(found, expected, rtol=1e-5)
    half = jax.jit(jax.value_and_grad(make(dtype), (0, 1)), **FAST)(W, X)
    assert not np.allclose(half[1][0], expected[1][0], rtol=1e-4, atol=0), "the row tests something"


@pytest.mark.usefixtures("standard_promotion")
def test_in_float32_counts_to_the_end_of_a_loop():
    assert jax.jit(jmpscale.in_float32(counted(B)), **FAST)(W, X) == jax.jit(counted(jnp.float32), **FAST)(W, X)


@pytest.mark.parametrize(
    "transform",
    rows(
        {
            "vmap": lambda fun: lambda w, x: jax.vmap(jax.grad(fun), (None, 0))(w, x[:, None]),
            "forward mode": lambda fun: lambda w, x: jax.jvp(lambda w: fun(w, x), (w,), (w,)),
            "second derivative": lambda fun: lambda w, x: jax.grad(lambda w: jnp.sum(jax.grad(fun)(w, x) ** 2))(w),
        },
        only_full={"second derivative"},
    ),
)
def test_in_float32_can_be_transformed(transform):
    def make(dtype):
        return lambda w, x: jnp.mean(jax.nn.silu(x.astype(dtype) @ w.astype(dtype)).astype(F32) ** 2)

    found, expected = transform(jmpscale.in_float32(make(B))), transform(make(jnp.float32))
    assert_close(jax.jit(found, **FAST)(W, X), jax.jit(expected, **FAST)(W, X), rtol=1e-5)


def test_in_float32_keeps_derivative_rules_in_shard_map():
    mesh = meshes.make_mesh(d=2)

    def make(dtype):
        def shard_loss(w, x):
            return jax.lax.pmean(jax.nn.silu(x.astype(dtype) @ w.astype(dtype)).sum().astype(F32), "d")

        return jax.shard_map(shard_loss, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P())

    found, expected = (jax.jit(jax.grad(f), **FAST)(W, X) for f in (jmpscale.in_float32(make(B)), make(jnp.float32)))
    assert_close(found, expected, rtol=1e-5)


def test_in_float32_recomputes_what_checkpoint_recomputes():
    fun = jmpscale.in_float32(recomputed(B))
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(jax.grad(fun))(W, X))]
    assert "remat2" in names or "checkpoint" in names
    inside = jmpscale.in_float32(jax.grad(recomputed(B)))
    assert "optimization_barrier" in [eqn.primitive.name for eqn in equations(jax.make_jaxpr(inside)(W, X))]


def test_in_float32_rounds_nothing_by_reduce_precision():
    x = jnp.float32(1.001)
    assert jmpscale.in_float32(lambda x: jax.lax.reduce_precision(x, 8, 7))(x) == x


def test_in_float32_widens_results_and_keeps_all_other_leaves():
    def fun(x, n, name):
        return {"half": x, "sum": x + 1, "count": n + 1, "wide": x.astype(F32), "name": name, "none": None}

    x, n = jnp.ones(3, B), jnp.int32(3)
    expected = {"half": jnp.ones(3), "sum": jnp.full(3, 2.0), "count": jnp.int32(4), "wide": jnp.ones(3)}
    expected |= {"name": None, "none": None}
    for transform in (lambda fun: fun, lambda fun: jax.jit(fun, static_argnums=2)):
        found = transform(jmpscale.in_float32(lambda *args: fun(*args) | {"name": None}))(x, n, "layer")
        chex.assert_trees_all_equal(found, expected)
        chex.assert_trees_all_equal_dtypes(found, expected)
    assert jmpscale.in_float32(fun)(x, n, "layer")["name"] == "layer"


def test_in_float32_keeps_the_signature_and_gradients_have_the_dtype_of_their_argument():
    @jmpscale.in_float32
    def mean(w):
        """Returns a mean."""
        return jnp.mean(w * w)

    assert (mean.__name__, mean.__doc__) == ("mean", "Returns a mean.")
    assert mean(jnp.ones(3, B)).dtype == F32
    assert jax.grad(mean)(jnp.ones(3, B)).dtype == B


class Counter(nnx.Module):
    def __init__(self):
        self.w, self.n = nnx.Param(jnp.ones((8, 8), B)), nnx.Variable(jnp.zeros((), B))

    def __call__(self, x):
        self.n[...] = self.n[...] + B(1)
        return jnp.mean((x.astype(B) @ self.w[...]).astype(F32) ** 2)


def test_in_float32_changes_variables_of_nnx_in_place():
    model, x = Counter(), normal(0, 4, 8)
    model.n[...] = B(256)
    loss = jmpscale.in_float32(lambda model, x: model(x))(model, x)
    assert loss == pytest.approx(float(jnp.mean(jnp.sum(x, 1) ** 2)), rel=1e-5)
    assert (model.n[...], model.n[...].dtype) == (257, F32)
    assert model.w[...].dtype == B, "the function does not change it"


def test_in_float32_differentiates_models_of_nnx():
    loss, grads = nnx.value_and_grad(jmpscale.in_float32(lambda model, x: model(x)))(Counter(), normal(0, 4, 8))
    assert jnp.isfinite(loss)
    assert grads["w"][...].dtype == B


@pytest.mark.full
def test_in_float32_accepts_filter_jit_of_equinox(standard_promotion):
    layer = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    x = normal(0, 3, 8)

    def loss(model, x):
        half = jax.tree.map(lambda leaf: leaf.astype(B) if eqx.is_inexact_array(leaf) else leaf, model)
        return jnp.mean(jax.vmap(half)(x.astype(B)).astype(F32) ** 2)

    expected = jnp.mean(jax.vmap(layer)(x) ** 2)
    for fun in (jmpscale.in_float32(eqx.filter_jit(loss)), eqx.filter_jit(jmpscale.in_float32(loss))):
        assert fun(layer, x) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.full
def test_in_float32_runs_a_training_step_that_is_fed_back(standard_promotion):
    tx = optax.adam(1e-4)

    def make(dtype):
        def step(params, opt_state, x):
            loss, grads = jax.value_and_grad(lambda w: jnp.mean((x.astype(dtype) @ w) ** 2).astype(F32))(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        return step

    params = normal(1, 8, 4).astype(B)
    state, expected = (params, tx.init(params)), (params.astype(F32), tx.init(params.astype(F32)))
    steps = jax.jit(jmpscale.in_float32(make(B)), **FAST), jax.jit(make(jnp.float32), **FAST)
    for _ in range(3):
        *state, loss = steps[0](*state, normal(0, 4, 8))
        *expected, expected_loss = steps[1](*expected, normal(0, 4, 8))
        assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    # optax has computed the constants of Adam in bfloat16, once.
    chex.assert_trees_all_close(state[0], expected[0], rtol=1e-4)


def bits(x):
    return jax.lax.bitcast_convert_type(x.astype(B), jnp.uint16)


def on_the_host(x):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, B), x.astype(B))


AS_WRITTEN = {
    "bits": (bits, r"bitcast_convert_type at test_in_float32.py:\d+ \(bits\)"),
    "callback": (on_the_host, r"pure_callback at test_in_float32.py:\d+ \(on_the_host\)"),
}


@pytest.mark.parametrize("row", rows(AS_WRITTEN))
def test_in_float32_warns_once_of_operations_that_run_as_written(row):
    fun, message = row
    wide = jmpscale.in_float32(fun)
    with pytest.warns(UserWarning, match=message):
        wide(X)
    chex.assert_trees_all_equal(wide(X), fun(X).astype(wide(X).dtype))


def test_in_float32_is_silent_about_what_has_no_result(capfd):
    def fun(x):
        jax.debug.print("{}", x.astype(B)[0, 0])
        return x.astype(B)

    chex.assert_trees_all_equal(jmpscale.in_float32(fun)(X), X)


@pytest.mark.parametrize("fun", [3.0, B(1), None], ids=str)
def test_in_float32_requires_a_function(fun):
    with pytest.raises(TypeError, match=r"fun must be a function, got .*\. Call in_float32\(fun\)\(\*args\)\."):
        jmpscale.in_float32(fun)
