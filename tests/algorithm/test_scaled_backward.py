"""scaled_backward gives true gradients under every transformation, for every value that the function depends on."""

import functools
import gc
import warnings
import weakref

import chex
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.linen import fp8_ops
from jax.experimental import jet
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale._base import cotangents

import compiling
import loss_programs as programs
from arrays import normal
from messages import HALF_LOSS
from tables import rows

SCALE = 2.0**16
SCALER = jmpscale.static(SCALE)
W, X = jnp.linspace(-1, 1, 6).reshape(3, 2), jnp.linspace(0, 2, 12).reshape(4, 3)
DEVICES = jax.devices()[: 4 if jax.device_count() >= 4 else 1]
MESH = jax.make_mesh((len(DEVICES),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=DEVICES)
EXPLICIT = jax.make_mesh((len(DEVICES),), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=DEVICES)


def mean_square(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def underflowing(w, x):
    """A loss in float16 whose gradients are below the smallest float16 number."""
    hidden = jnp.tanh(x.astype(jnp.float16) @ w.astype(jnp.float16))
    return jnp.float32(2.0**-24) * jnp.mean(hidden.astype(jnp.float32) ** 2)


def net(w, x):
    return jnp.sum(jnp.tanh(x * w[0]) * w[1])


def diverging_aux(w, x):
    """Returns a loss, and the stacked outputs of a scan, which are infinite and not differentiable."""
    loss, logs = jax.lax.scan(lambda loss, row: (loss + jnp.sum(row**2), jnp.log(row * 0)), 0.0, w)
    return loss + mean_square(w, x), logs


def scaled(fun):
    return jmpscale.scaled_backward(fun, SCALE)


# --- the backward pass runs at the scale ---


def test_scaled_backward_keeps_gradients_that_underflow_in_float16():
    assert not np.any(jax.jit(jax.grad(underflowing))(W, X))
    loss, grads = jax.jit(jmpscale.value_and_grad(underflowing))(SCALER, W, X)
    chex.assert_trees_all_equal(jax.jit(jax.value_and_grad(scaled(underflowing)))(W, X), (loss, grads))
    assert np.all(grads != 0)

    def penalty(w):
        return jnp.sum(jax.grad(scaled(underflowing))(w, X) ** 2) * 2.0**48

    assert np.all(jax.jit(jax.grad(penalty))(W) != 0)


def test_scaled_backward_divides_by_any_scale(x64):
    w = jnp.asarray(W, jnp.float64)
    grads = jax.jit(jax.grad(jmpscale.scaled_backward(lambda w: jnp.sum(jnp.sin(w)), 1000)))(w)
    np.testing.assert_allclose(grads, jnp.cos(w), rtol=1e-15)


# --- values and gradients equal jax.value_and_grad ---

DEFAULT_PROGRAMS = {"returns tuple", "keyword arguments", "differentiated argument by keyword", "string argument"}


@pytest.mark.filterwarnings(f"ignore:{HALF_LOSS}:UserWarning")
@pytest.mark.parametrize("program", rows(programs.PROGRAMS, default=DEFAULT_PROGRAMS))
def test_scaled_backward_equals_jax(program):
    programs.assert_like_jax(program, _value_and_grad)


@pytest.mark.full
def test_scaled_backward_equals_jax_on_random_programs():
    programs.assert_like_jax_on_random_programs(_value_and_grad)


def _value_and_grad(fun, argnums=0, has_aux=False):
    return jax.value_and_grad(jmpscale.scaled_backward(fun, 2.0**8, has_aux=has_aux), argnums, has_aux)


def _scanned(loss, w):
    return jax.lax.scan(lambda total, x: (total + loss(w, x), None), jnp.float32(0), X[:, None])[0]


def _shard_map(loss, check_vma):
    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        grads = grads if check_vma else jax.lax.psum(grads, "data")
        return jax.lax.pmean(value, "data"), grads

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": (jax.P(), jax.P())}
    return jax.jit(jax.shard_map(step, mesh=MESH, check_vma=check_vma, **specs))(W, X)


def _penalized(loss):
    return lambda w, x: loss(w, x) + jnp.sum(jax.grad(loss, 1)(w, x) ** 2)


@functools.partial(jax.shard_map, mesh=MESH, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
def _sharded_loss(w, x):
    return jax.lax.pmean(mean_square(w, x), "data")


def _explicit(gradient, spec):
    """Calls a function of parameters with a spec, and of a sharded batch, on Explicit axes."""
    with jax.set_mesh(EXPLICIT):
        w, x = jax.sharding.reshard(W, spec), jax.sharding.reshard(X, jax.P("data"))
        return jax.jit(gradient)(w, x)


def _stacked(w):
    """Returns the loss and the hidden values of each row of X."""
    return jax.lax.map(lambda row: (jnp.sum(jnp.tanh(row @ w) ** 2), jnp.tanh(row @ w)), X)


def _series(fun, x):
    """Returns the value and two derivatives of a function along a curve."""
    return jet.jet(fun, (x,), ((jnp.cos(x), jnp.sin(x)),))


def _residual(w, x):
    """A loss that contains the second derivative of a model, as in a physics-informed network."""
    _, (_, second) = jet.jet(lambda x: jnp.tanh(x @ w), (x,), ((jnp.ones_like(x), jnp.zeros_like(x)),))
    return jnp.mean((second - 1) ** 2)


TRANSFORMATIONS = {
    "grad inside jit": lambda wrap: jax.jit(jax.value_and_grad(wrap(mean_square)))(W, X),
    "disable_jit": lambda wrap: jax.disable_jit()(jax.grad(wrap(jax.jit(jnp.sum))))(W),
    "vjp": lambda wrap: jax.vjp(wrap(mean_square), W, X)[1](jnp.float32(3.0)),
    "several outputs": lambda wrap: jax.jacrev(wrap(lambda w, x: x @ w))(W, X),
    "checkpoint outside": lambda wrap: jax.jit(jax.grad(jax.checkpoint(wrap(mean_square))))(W, X),
    "gradient penalty outside jit": lambda wrap: jax.grad(
        lambda w: jnp.sum(jax.grad(jax.jit(wrap(mean_square)), 1)(w, X) ** 2)
    )(W),
    "hypergradient": lambda wrap: jax.jit(
        jax.grad(lambda x: mean_square(W - 0.1 * jax.grad(wrap(mean_square))(W, x), X))
    )(X + 1),
    "blocks of the Hessian": lambda wrap: jax.jit(jax.jacrev(jax.jacrev(wrap(mean_square), (0, 1)), (0, 1)))(W, X),
    "blocks of the Hessian, forward over reverse": lambda wrap: jax.jit(jax.hessian(wrap(mean_square), (0, 1)))(W, X),
    "third order": lambda wrap: jax.jit(jax.grad(jax.grad(jax.grad(wrap(net), 1), 1), 0))(W[:2], 0.7),
    "output that does not depend on the inner value": lambda wrap: jax.grad(
        lambda w: (
            jax.grad(lambda x: sum(wrap(lambda w, x: (jnp.sum(w**3), jnp.sum(w * x)))(w, x)))(W).sum()
            + wrap(lambda w, x: (jnp.sum(w**3), jnp.sum(w * x)))(w, W)[0]
        )
    )(W),
    "second derivative under vmap": lambda wrap: jax.jit(
        jax.vmap(jax.grad(lambda w, x: jnp.sum(jax.grad(wrap(mean_square), 1)(w, x) ** 2)), (None, 0))
    )(W, X[:, None]),
    "metrics that are infinite": lambda wrap: jax.jit(jax.grad(wrap(diverging_aux), has_aux=True))(W, X)[0],
    "one of several stacked outputs of a scan": lambda wrap: jax.jit(jax.grad(lambda w: wrap(_stacked)(w)[0].mean()))(
        W
    ),
    "all stacked outputs of a scan": lambda wrap: jax.jit(
        jax.jacrev(jax.grad(lambda w: sum(map(jnp.sum, wrap(_stacked)(w)))))
    )(W),
    "nested": lambda wrap: jax.grad(wrap(wrap(mean_square)))(W, X),
    "closure": lambda wrap: jax.grad(lambda w: wrap(lambda x: mean_square(w, x))(X))(W),
    "closure outside jit": lambda wrap: jax.grad(jax.jit(lambda w: wrap(lambda x: mean_square(w, x))(X)))(W),
    "closure under vmap": lambda wrap: jax.jit(
        jax.grad(lambda w: jax.vmap(lambda x: wrap(lambda: mean_square(w, x))())(X[:, None]).sum())
    )(W),
    "closure in scan": lambda wrap: jax.jit(
        jax.grad(lambda w: _scanned(lambda w, x: wrap(lambda x: mean_square(w, x))(x), w))
    )(W),
    "shard_map": lambda wrap: _shard_map(wrap(mean_square), check_vma=True),
    "shard_map without types": lambda wrap: _shard_map(wrap(mean_square), check_vma=False),
    "shard_map inside": lambda wrap: jax.jit(jax.grad(wrap(_sharded_loss)))(W, X),
    "Explicit axes": lambda wrap: _explicit(jax.grad(wrap(mean_square)), jax.P()),
    "Hessian on Explicit axes": lambda wrap: _explicit(jax.jacrev(jax.grad(wrap(mean_square))), jax.P()),
    "Hessian under shard_map": lambda wrap: _shard_map(_penalized(wrap(mean_square)), check_vma=True),
    "Hessian under shard_map without types": lambda wrap: _shard_map(_penalized(wrap(mean_square)), check_vma=False),
    "Hessian in scan": lambda wrap: jax.jit(
        jax.grad(lambda w: _scanned(lambda w, x: jnp.sum(jax.grad(wrap(mean_square))(w, x) ** 2), w))
    )(W),
    "Hessian of a checkpoint": lambda wrap: jax.jit(
        jax.jacrev(jax.grad(jax.checkpoint(wrap(jax.checkpoint(mean_square)))))
    )(W, X),
    "Hessian of several outputs": lambda wrap: jax.jacrev(jax.jacrev(wrap(lambda w: (w**3, jnp.sum(w**2)))))(W),
    "forward over forward over reverse": lambda wrap: jax.jit(jax.jacfwd(jax.jacfwd(jax.grad(wrap(net), 1), 1), 0))(
        W[:2], 0.7
    ),
    "Taylor series": lambda wrap: _series(jax.grad(lambda w: wrap(mean_square)(w, X)), W),
    "Taylor series of a second derivative": lambda wrap: jax.jit(
        lambda w: _series(jax.grad(lambda w: jnp.sum(jax.grad(wrap(mean_square))(w, X) ** 2)), w)
    )(W),
    "derivative of a Taylor series": lambda wrap: jax.grad(
        lambda x: jnp.sum(_series(jax.grad(lambda w: wrap(mean_square)(w, x)), W)[1][1])
    )(X),
    "Taylor series under vmap": lambda wrap: jax.vmap(
        lambda x: _series(jax.grad(lambda w: wrap(mean_square)(w, x)), W)
    )(X[:, None]),
    "Taylor series in the loss": lambda wrap: jax.jit(jax.grad(wrap(_residual)))(W, X),
    "Hessian of complex values": lambda wrap: jax.grad(
        lambda w: jnp.sum(
            jnp.abs(jax.grad(wrap(lambda z: jnp.sum((z * z.conj()).real ** 2)))(jax.lax.complex(w, w))) ** 2
        )
    )(W),
}
ARGUMENTS = {
    "the same array twice": lambda wrap, w: wrap(lambda a, b: jnp.sum(a * b))(w, w),
    "input that is an output": lambda wrap, w: wrap(lambda w: (w, jnp.sum(w**2)))(w)[0].sum(),
    "complex": lambda wrap, w: wrap(lambda z: jnp.sum((z * z.conj()).real))(jax.lax.complex(w, w)),
    "bfloat16": lambda wrap, w: wrap(lambda w: jnp.sum(w.astype(jnp.float32) ** 2))(w.astype(jnp.bfloat16)),
    "auxiliary data": lambda wrap, w: sum(wrap(lambda w: (jnp.sum(w**2), jnp.sum(w**3)))(w)),
}


def _partial_sums(wrap):
    """Returns gradients of reduced parameters, which JAX leaves as partial sums until the user adds them."""

    def gradient(w, x):
        return jax.sharding.reshard(jax.grad(wrap(mean_square))(w, x), jax.P())

    return _explicit(gradient, jax.P(None, None, reduced={"data"}))


if jax.__version_info__ >= (0, 10):  # earlier versions have no types for partial sums
    TRANSFORMATIONS["partial sums"] = _partial_sums
CASES = TRANSFORMATIONS | {
    f"argument: {name}": lambda wrap, call=call: jax.jit(jax.grad(functools.partial(call, wrap)))(W)
    for name, call in ARGUMENTS.items()
}
DEFAULT = [
    "grad inside jit",
    "one of several stacked outputs of a scan",
    "metrics that are infinite",
    "nested",
    "closure",
    "shard_map",
]
DEFAULT += ["argument: input that is an output", "argument: auxiliary data"]
DEFAULT += ["partial sums"] * ("partial sums" in CASES)


@pytest.mark.parametrize("case", rows(CASES, default=DEFAULT))
def test_scaled_backward_returns_true_gradients(case):
    result, expected = case(scaled), case(lambda fun: fun)
    chex.assert_trees_all_close(result, expected, rtol=2e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)


def test_taylor_series_of_a_gradient_that_was_compiled_before_jet_was_imported():
    gradient = jax.jit(jax.grad(scaled(jnp.sum)))
    gradient(W)
    for rule in [x for x in jet.jet_rules if x.name == cotangents.NAME]:
        del jet.jet_rules[rule]
    chex.assert_trees_all_equal(_series(gradient, W), _series(jax.grad(jnp.sum), W))


@pytest.mark.full
@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0)], ids=str)
def test_second_derivatives_have_a_scale_for_each_element_of_a_batch(axes):
    """The scale, the values, or both are batched, in two nested batches."""

    def hessian(scale, w):
        return jax.jacrev(jax.grad(jmpscale.scaled_backward(lambda w: mean_square(w, X), scale)))(w)

    scales, ws = (
        jnp.exp2(jnp.arange(6.0)).reshape(2, 3),
        jnp.stack([jnp.stack([W, 2 * W, 3 * W]), jnp.stack([-W, W, -W])]),
    )
    args = [x if axis == 0 else x[0, 0] for x, axis in zip((scales, ws), axes, strict=True)]
    expected = jax.vmap(jax.vmap(jax.hessian(lambda w: mean_square(w, X))))(ws)
    result = jax.vmap(jax.vmap(hessian, axes), axes)(*args)
    of_each = expected if axes[1] == 0 else jnp.broadcast_to(expected[0, 0], result.shape)
    chex.assert_trees_all_close(result, of_each, rtol=1e-5)
    if axes == (0, 0):  # the last axis of the values is an outer or an inner batch
        outer = jax.vmap(jax.vmap(hessian), (None, 3))(scales[0], jnp.moveaxis(ws, 0, 3))
        inner = jax.vmap(jax.vmap(hessian, (None, 2)), (0, 0))(scales[:, 0], jnp.moveaxis(ws, 1, 3))
        chex.assert_trees_all_close((outer, inner), (expected, expected), rtol=1e-5)


@pytest.mark.full
def test_second_derivatives_are_exact_for_any_scale(x64):
    w = jnp.asarray(W, jnp.float64)
    hessian = jax.jacrev(jax.grad(jmpscale.scaled_backward(lambda w: jnp.sum(jnp.sin(w)), 1000)))(w)
    np.testing.assert_allclose(hessian, jax.hessian(lambda w: jnp.sum(jnp.sin(w)))(w), rtol=1e-15)


# --- the backward pass of a derivative runs at the scale, too ---

LAYERS = {"a": normal(36, 2, 64), "b": normal(37, 64, 64, scale=1 / 8), "c": normal(38, 64, 1, scale=1 / 8)}
DIRECTION = {name: normal(39, *w.shape, scale=1 / 100) for name, w in LAYERS.items()}
TIMES = jnp.linspace(0, 1, 64)


def predict(layers, points):
    return jnp.tanh(jnp.tanh(points @ layers["a"]) @ layers["b"]) @ layers["c"]


def field(layers, t):
    return predict(layers, jnp.stack([t, 1.0 + 0 * t])[None])[0, 0]


def fit(layers):
    points = jnp.stack([TIMES, jnp.ones(64)], axis=1)
    return jnp.mean((predict(layers, points) - jnp.exp(-3 * TIMES)[:, None]) ** 2)


def derivative_of_field(wrap):
    """The gradient of a loss that differentiates the model, as of an equation of physics."""
    slope = jax.vmap(jax.grad(wrap(field), 1), (None, 0))
    return jax.grad(lambda layers: jnp.float32(2.0**-12) * jnp.mean(slope(layers, TIMES) ** 2))


def product_with_hessian(wrap):
    def directional(layers):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(wrap(fit))(layers), DIRECTION)))

    return jax.grad(directional)


def after_one_step(wrap):
    """The gradient of a loss after a step of gradient descent, as in meta-learning."""

    def outer(layers):
        return fit(jax.tree.map(lambda w, grad: w - jnp.float32(0.1) * grad, layers, jax.grad(wrap(fit))(layers)))

    return jax.grad(outer)


SECOND = {  # the gradient, and the exponents of scales
    "model that its loss differentiates": (derivative_of_field, (4, 8, 12)),
    "product with the Hessian": (product_with_hessian, (4, 10, 16)),
    "meta-learning": (after_one_step, (4, 8, 10)),  # from 2^12 on, its own gradients overflow
}


@pytest.mark.full
@pytest.mark.parametrize("row", rows(SECOND, default={"product with the Hessian"}))
def test_backward_pass_of_a_derivative_is_as_accurate_at_every_scale(row):
    gradient, exponents = row
    expected = jax.jit(gradient(lambda fun: fun))(LAYERS)

    def errors(wrap):
        result = jax.jit(gradient(wrap))(LAYERS)
        return [float(jnp.linalg.norm(result[k] - x) / jnp.linalg.norm(x)) for k, x in expected.items()]

    unscaled = errors(jmpscale.autocast)
    for exponent in exponents:
        at_scale = errors(lambda fun, scale=2.0**exponent: jmpscale.scaled_backward(jmpscale.autocast(fun), scale))
        assert max(at_scale) < 0.005
        assert all(x <= 1.1 * y for x, y in zip(at_scale, unscaled, strict=True))
    if gradient is derivative_of_field:
        assert max(unscaled) > 0.03


# --- models of Flax NNX and Equinox are differentiated ---


class Model(nnx.Module):
    def __init__(self):
        self.w, self.bias = nnx.Param(W), nnx.Param(jnp.ones((1, 2)))
        self.mean, self.calls = nnx.BatchStat(jnp.zeros(2)), nnx.Variable(jnp.array(0))
        self.rngs = nnx.Rngs(0)

    def __call__(self, x):
        self.calls[...] += 1
        hidden = jnp.tanh(x @ self.w[...] + self.bias[...]) * jax.random.uniform(self.rngs(), (4, 2))
        self.mean[...] = hidden.mean(0)
        self.hidden = nnx.Intermediate(hidden)
        return hidden


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


def nnx_loss_and_aux(model, x, factor=2.0):
    return factor * nnx_loss(model, x), {"mean": model.mean[...], "none": None}


def nnx_loss_and_penalty(wrap, model, x):
    """Uses the model again, after the loss has changed its state."""
    return wrap(nnx_loss)(model, x) + jnp.sum(model.w[...] ** 2) + jnp.sum(model.mean[...] ** 2)


NNX_CALLS = {
    "keyword arguments": lambda wrap, model: nnx.value_and_grad(wrap(nnx_loss_and_aux), has_aux=True)(model, x=X),
    "model used again": lambda wrap, model: nnx.value_and_grad(functools.partial(nnx_loss_and_penalty, wrap))(model, X),
}


@pytest.mark.full
@pytest.mark.parametrize("call", rows(NNX_CALLS, {"keyword arguments"}))
def test_scaled_backward_differentiates_nnx_models(call):
    def run(wrap):
        model = Model()
        result = nnx.jit(functools.partial(call, wrap))(model)
        return result, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))

    (result, state), expected = run(scaled), run(lambda fun: fun)
    chex.assert_trees_all_close((result, state), expected, rtol=2e-6)
    assert state["calls"] == 1


class Line(equinox.Module):
    slope: jax.Array
    n: int = 3
    scaler: jmpscale.ScalerState | None = None

    def __call__(self, x):
        return jnp.sum(self.slope * x) * self.n


def test_scaled_backward_differentiates_equinox_models():
    step = equinox.filter_jit(lambda wrap: equinox.filter_value_and_grad(wrap(Line.__call__))(Line(W), x=2.0))
    chex.assert_trees_all_equal(step(scaled), step(lambda fun: fun))


def test_scaled_backward_returns_new_fp8_statistics_unchanged_and_does_not_watch_them():
    @jax.custom_vjp
    def with_statistics(w, statistics):
        return w

    new = jnp.array([5.0, jnp.inf])
    with_statistics.defvjp(lambda w, _: (w, None), lambda _, cotangent: (cotangent, new))
    variables = {"params": W, "_overwrite_with_gradient": {"kernel_scale": jnp.ones(2)}}

    def loss(variables):
        return jnp.sum(with_statistics(variables["params"], variables["_overwrite_with_gradient"]["kernel_scale"]))

    grads, messages = warnings_of(jax.grad(watched(loss)), variables)
    assert messages == []
    np.testing.assert_array_equal(grads["_overwrite_with_gradient"]["kernel_scale"], new)
    np.testing.assert_array_equal(grads["params"], np.ones_like(W))


class Fp8Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(16, use_bias=False, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x)


FP8_MODEL, FP8_INPUT = Fp8Model(), 3 * jnp.ones((16, 16))
FP8 = "_overwrite_with_gradient"


def fp8_loss(params, statistics):
    return jnp.mean(FP8_MODEL.apply({"params": params, FP8: statistics}, FP8_INPUT).astype(jnp.float32) ** 2)


@pytest.mark.full
def test_scaled_backward_follows_the_scale_in_an_nnx_optimizer():
    """The model holds an alias of the scale."""
    model = Model()
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(SCALE, growth_interval=1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model.loss_scale = optimizer.opt_state.scaler.loss_scale
    loss_fn = jmpscale.scaled_backward(nnx_loss, lambda model, x: model.loss_scale)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss_fn)(model, x))

    step(model, optimizer, X)
    assert model.loss_scale[...] == 2 * SCALE
    replaced = jmpscale.replace_scaler(optimizer.opt_state, jmpscale.dynamic(8.0, growth_interval=1))
    nnx.update(optimizer.opt_state, nnx.state(replaced))  # an assignment would leave the old alias to the model
    assert model.loss_scale[...] == 8.0
    step(model, optimizer, X)
    assert model.loss_scale[...] == 16.0


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
def test_fp8_statistics_may_be_an_argument_of_their_own():
    @jax.jit
    def gradients(params, statistics):
        plain = jax.grad(fp8_loss, (0, 1))(params, statistics)
        ours = jax.grad(scaled(fp8_loss), (0, 1))(params, statistics)
        return plain, ours, jmpscale.value_and_grad(fp8_loss, (0, 1))(SCALER, params, statistics)[1]

    variables = FP8_MODEL.init(jax.random.key(0), FP8_INPUT)
    (_, expected), *ours = gradients(variables["params"], variables[FP8])
    for params, statistics in ours:
        for side in ("input", "kernel"):  # the backward pass of the history of the output's gradients is scaled
            for name in (f"{side}_scale", f"{side}_amax_history"):
                chex.assert_trees_all_equal(_leaf(statistics, name), _leaf(expected, name))
        assert np.all(params["Dense_0"]["kernel"] != 0)


def _leaf(tree, name):
    (leaf,) = [x for path, x in jax.tree_util.tree_leaves_with_path(tree) if path[-1].key == name]
    return leaf


# --- the scale is read in every form ---


@jax.custom_vjp
def reveal_scale(w):
    """Returns w. Its gradient is the square of the cotangent, so that after unscaling it is the loss scale."""
    return w


reveal_scale.defvjp(lambda w: (w, None), lambda _, cotangent: (cotangent**2,))

HOLDER = {"params": W, "scaler": SCALER}
SCALES = {
    "Python number": 65536,
    "array": jnp.float32(SCALE),
    "NumPy scalar": np.float32(SCALE),
    "bfloat16 array": jnp.bfloat16(SCALE),
    "scaler": SCALER,
    "tree that contains a scaler": HOLDER,
    "callable model that contains a scaler": Line(W, scaler=SCALER),
    "NNX variable": nnx.Variable(jnp.float32(SCALE)),
    "function that returns a number": lambda w: 65536.0,
    "function that returns an array": lambda w: SCALE * w,
    "function that returns a tree": lambda w: HOLDER,
}


@pytest.mark.parametrize("scale", rows(SCALES))
def test_scaled_backward_accepts_the_scale_in_every_form(scale):
    assert jax.jit(jax.grad(jmpscale.scaled_backward(reveal_scale, scale)))(1.0) == SCALE


def test_scaled_backward_reads_the_scale_of_each_step():
    tx = jmpscale.with_loss_scaling(optax.set_to_zero(), jmpscale.dynamic(SCALE, growth_interval=1))
    loss_fn = jmpscale.scaled_backward(lambda w, opt_state: reveal_scale(w), lambda w, opt_state: opt_state)

    @jax.jit
    @chex.assert_max_traces(1)
    def step(opt_state):
        grad = jax.grad(loss_fn)(1.0, opt_state)
        return grad, tx.update(grad, opt_state)[1]

    opt_state = tx.init(1.0)
    for expected in (SCALE, 2 * SCALE, 4 * SCALE):
        scale, opt_state = step(opt_state)
        assert scale == expected


def test_scaled_backward_under_vmap_uses_the_scale_of_each_model():
    grad = jax.vmap(lambda scale, w: jax.grad(jmpscale.scaled_backward(reveal_scale, scale))(w))
    np.testing.assert_array_equal(jax.jit(grad)(jnp.array([1.0, SCALE]), jnp.ones(2)), [1.0, SCALE])


SHARED = {  # losses of one shared value, with one scale for each element of a batch
    "no mapped input": lambda wrap, w, scales: jax.vmap(wrap(lambda w, scale: jnp.sin(w)), (None, 0))(w, scales),
    "closure": lambda wrap, w, scales: jax.vmap(lambda x, s: wrap(lambda scale: (w * x) ** 2)(s))(XS, scales),
    "map": lambda wrap, w, scales: jax.lax.map(lambda s: wrap(lambda w, scale: w**3)(w, s), scales, batch_size=2),
    "jit inside": lambda wrap, w, scales: jax.vmap(jax.jit(wrap(lambda w, x, scale: w * x)), (None, 0, 0))(
        w, XS, scales
    ),
}
XS, BATCH_OF_SCALES = jnp.arange(1.0, 5.0), jnp.array([2.0, 8.0, SCALE, 1.0])


@pytest.mark.parametrize("losses", rows(SHARED, default={"map"}))
def test_gradient_of_a_value_that_losses_with_different_scales_share(losses):
    def gradient(wrap):
        return jax.jit(jax.grad(lambda w: losses(wrap, w, BATCH_OF_SCALES).mean()))(1.5)

    ours = gradient(lambda fun: jmpscale.scaled_backward(fun, lambda *args: args[-1]))
    np.testing.assert_allclose(ours, gradient(lambda fun: fun), rtol=1e-6)


def test_scaled_backward_does_not_differentiate_the_scale():
    def loss(state, x):
        return mean_square(state["w"], x.astype(jnp.float32))

    loss_fn = jmpscale.scaled_backward(loss, lambda state, x: state["scale"])
    # The scale does not make the batch a differentiated value either: a differentiated float16 value would raise.
    grads = jax.jit(jax.grad(loss_fn))({"w": W, "scale": jnp.float32(SCALE)}, X.astype(jnp.float16))
    assert grads["scale"] == 0
    assert np.all(grads["w"] != 0)


def test_scaled_backward_with_a_disabled_scaler_calls_fun():
    loss_fn = jmpscale.scaled_backward(mean_square, jmpscale.disabled())
    assert str(jax.make_jaxpr(jax.grad(loss_fn))(W, X)) == str(jax.make_jaxpr(jax.grad(mean_square))(W, X))


# --- only losses are warned about ---


def test_scaled_backward_does_not_mistake_other_outputs_for_a_float16_loss():
    def fun(w):
        half = w.astype(jnp.float16)
        return {"loss": jnp.sum(w), "metric": jnp.sum(half), "logits": half}

    assert warnings_of(lambda: jax.vjp(scaled(fun), W)[0])[1] == []


# --- non-finite gradients are reported before a training loop changes them ---


def watched(fun):
    return jmpscale.scaled_backward(fun, SCALE, warn_if_not_finite=True)


def on_each_device(grad_fn, check_vma):
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    return jax.jit(jax.shard_map(grad_fn, mesh=MESH, **specs))


def cleaned(grad_fn):
    """Replaces infinity and NaN in the gradients of each example, as jax-privacy does."""
    per_example = jax.vmap(lambda w, x: jnp.nan_to_num(grad_fn(w, x[None])), in_axes=(None, 0))
    return jax.jit(lambda w, x: per_example(w, x).mean(0))


def penalized(grad_fn):
    return jax.jit(jax.grad(lambda w, x: jnp.sum(grad_fn(w, x) ** 2)))


def in_scan(grad_fn):
    return jax.jit(lambda w, x: jax.lax.scan(lambda w, x: (w - grad_fn(w, x[None]), None), w, x)[0])


TRANSFORMED = {
    "eager": lambda grad_fn: grad_fn,
    "jit": jax.jit,
    "per example": cleaned,
    "scan": in_scan,
    "second derivative": penalized,
    "shard_map": functools.partial(on_each_device, check_vma=True),
    "shard_map without types": functools.partial(on_each_device, check_vma=False),
}


def overflowing(w, x):
    """A loss whose gradient of w is infinite if an x is infinite, and whose gradient of x is infinite if an x is 0."""
    return mean_square(w, x) + jnp.sum(jnp.where(jnp.isinf(x), x, 0.0)) * jnp.sum(w) + 0.0 * jnp.sum(jnp.sqrt(x))


def warnings_of(fn, *args):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = jax.block_until_ready(fn(*args))
    return result, [str(warning.message) for warning in found]


@pytest.mark.parametrize("transform", rows(TRANSFORMED, default=["scan", "shard_map"]))
def test_scaled_backward_warns_of_gradients_that_are_not_finite(transform):
    grad_fn = transform(jax.grad(watched(overflowing)))
    infinite = X.at[2, 0].set(jnp.inf)
    found, messages = warnings_of(grad_fn, W, infinite)
    np.testing.assert_array_equal(found, transform(jax.grad(scaled(overflowing)))(W, infinite))
    words = "the gradients of overflowing in jmpscale.scaled_backward are not finite. If the training loop replaces"
    assert messages
    assert all(message.startswith(words) for message in messages)
    for x in (X, X.at[0, 0].set(0.0)):  # finite gradients, and an infinite gradient that is not computed
        result, messages = warnings_of(grad_fn, W, x)
        assert messages == []
        np.testing.assert_array_equal(result, transform(jax.grad(scaled(overflowing)))(W, x))


@pytest.mark.full
def test_scaled_backward_watches_sharded_and_replicated_gradients():
    def loss(params, x):
        return jax.lax.psum(mean_square(params["w"], x) * params["scale"], "data")

    def grads(wrap, params, x):
        def grad_fn(params, x):
            return jax.grad(lambda p: wrap(loss)(p | {"w": p["w"][..., 0]}, x))(params)

        specs = {"scale": P(), "w": P(None, None, "data")}
        return jax.jit(jax.shard_map(grad_fn, mesh=MESH, in_specs=(specs, P()), out_specs=specs))(params, x)

    params = {"scale": jnp.float32(1.0), "w": jnp.stack([W] * len(DEVICES), axis=2)}
    found, messages = warnings_of(grads, watched, params, X)
    assert messages == []
    chex.assert_trees_all_equal(found, grads(scaled, params, X))
    assert warnings_of(grads, watched, params, X * jnp.inf)[1]


# --- nothing is computed in addition, and nothing is kept ---


def test_scaled_backward_costs_nothing_where_nothing_is_differentiated():
    programs = [compiling.compiled(jax.jit(wrap(mean_square)), W, X) for wrap in (scaled, lambda fun: fun)]
    assert compiling.instructions(programs[0]) == compiling.instructions(programs[1])


def test_scaled_backward_does_not_compute_gradients_of_values_that_are_not_differentiated():
    def matmuls(wrap):
        program = compiling.compiled(lambda w, x: jax.grad(wrap(mean_square))(w, x), W, X)
        return sum(line.startswith(("dot", "custom-call")) for line in compiling.instructions(program))

    assert matmuls(scaled) == matmuls(lambda fun: fun) > 0
    assert matmuls(watched) == matmuls(scaled) + 1  # the callback is a custom call


def test_scaled_backward_keeps_no_reference_to_its_arguments():
    def arrays_alive_after_a_step():
        w, x = W + 1, X + 1
        jax.grad(scaled(lambda w: mean_square(w, x)))(w)
        return weakref.ref(w), weakref.ref(x)

    references = arrays_alive_after_a_step()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
