"""value_and_grad returns true gradients from a scaled backward pass, with the interface of jax.value_and_grad."""

import functools

import chex
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale._base.compat import as_varying

import loss_programs as programs
import meshes
from messages import HALF_LOSS
from tables import rows

W, X = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.25, 2.0], jnp.float16)
SCALER = jmpscale.static(2.0**8)


def _loss(w, x, *, power=2.0):
    return jnp.mean((w.astype(jnp.float16) * x).astype(jnp.float32) ** power)


# --- gradients are unscaled ---


@pytest.mark.parametrize(("scale", "rtol"), [(2.0**8, 1e-6), (3.0, 1e-3)])  # float16 is exact for powers of two only
def test_value_and_grad_returns_true_gradients(scale, rtol):
    value, grads = jax.jit(jmpscale.value_and_grad(_loss))(jmpscale.static(scale), W, X)
    assert value == jax.jit(_loss)(W, X)
    np.testing.assert_allclose(grads, jax.grad(_loss)(W, X), rtol=rtol)


@pytest.mark.parametrize(
    ("scaler", "expected"),
    [(SCALER, ("float32", "bfloat16", "float32")), (jmpscale.disabled(), ("float16", "bfloat16", "float32"))],
    ids=["static", "disabled"],
)
def test_value_and_grad_returns_float16_gradients_in_float32(scaler, expected):
    args = tuple(W.astype(dtype) for dtype in ("float16", "bfloat16", "float32"))

    def loss(*args):
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in args)

    _, grads = jmpscale.value_and_grad(loss, argnums=(0, 1, 2))(scaler, *args)
    assert tuple(grad.dtype for grad in grads) == expected
    for grad in grads:
        np.testing.assert_array_equal(grad, 2 * W)


def _partial_square(v):
    """Returns the sum of squares of a vector whose shards must still be added up over the devices."""
    return jnp.dot(v, v, out_sharding=P(unreduced={"data"}))


def _whole_square(v):
    return jax.sharding.reshard(_partial_square(v), P())


PARTIAL_SUMS = {  # the loss function, whether it has auxiliary data, how to differentiate it, and the scaler
    "loss": (_partial_square, False, jmpscale.value_and_grad, SCALER),
    "loss, disabled": (_partial_square, False, jmpscale.value_and_grad, jmpscale.disabled()),
    "reduced loss": (_whole_square, False, jmpscale.value_and_grad, SCALER),
    "auxiliary data": (lambda v: (_whole_square(v), _partial_square(v)), True, jmpscale.value_and_grad, SCALER),
    "loss, scaled_backward": (
        _partial_square,
        False,
        lambda fun, has_aux: lambda scaler, v: jax.value_and_grad(jmpscale.scaled_backward(fun, scaler))(v),
        SCALER,
    ),
}


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="this version of JAX has no type for partial sums under jit")
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("row", rows(PARTIAL_SUMS, default={"loss"}))
def test_gradients_of_partial_sums_on_an_explicit_mesh_equal_jax(row, is_compiled):
    fun, has_aux, transform, scaler = row
    ours = functools.partial(transform(fun, has_aux=has_aux), scaler)
    theirs = jax.value_and_grad(fun, has_aux=has_aux)
    with jax.set_mesh(meshes.make_mesh(AxisType.Explicit, data=4, model=2)):
        v = jax.device_put(jnp.arange(8.0), P("data"))
        result, expected = ((jax.jit(f) if is_compiled else f)(v) for f in (ours, theirs))
        assert jax.tree.map(jax.typeof, result) == jax.tree.map(jax.typeof, expected)
        whole = [jax.tree.map(lambda x: jax.sharding.reshard(x, P()), tree) for tree in (result, expected)]
    chex.assert_trees_all_equal(*whole)


def test_value_and_grad_returns_nonfinite_gradients_after_overflow(variant):
    grad = variant(lambda scale: jmpscale.value_and_grad(_loss)(SCALER._replace(loss_scale=scale), W, X)[1])
    assert jmpscale.all_finite(grad(jnp.float32(2.0**8)))
    assert not jmpscale.all_finite(grad(jnp.float32(2.0**20)))


def test_value_and_grad_keeps_weak_types():
    """A gradient of a strong type would change the type of a weakly typed parameter, and compile the step again."""

    @jax.jit
    def step(w):
        return w - 0.1 * jmpscale.value_and_grad(lambda w: w**2)(SCALER, w)[1]

    w = jnp.asarray(3.0)
    for _ in range(3):
        w = step(w)
    assert w.weak_type
    assert step._cache_size() == 1
    np.testing.assert_allclose(w, 3.0 * 0.8**3, rtol=1e-6)


@pytest.mark.full
def test_value_and_grad_under_jvp_gives_hessian_vector_products():
    scaled = functools.partial(jmpscale.value_and_grad(lambda w: jnp.sum(jnp.sin(w) * w)), SCALER)
    product = jax.jvp(scaled, (W,), (jnp.ones_like(W),))[1][1]
    np.testing.assert_allclose(product, 2 * np.cos(W) - W * np.sin(W), rtol=1e-5)


# --- the interface equals jax.value_and_grad ---


def _at_scale(fun, **options):
    """Like `jax.value_and_grad`, with a constant scale."""
    return functools.partial(jmpscale.value_and_grad(fun, **options), SCALER)


@pytest.mark.filterwarnings(f"ignore:{HALF_LOSS}:UserWarning")
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=name, marks=[pytest.mark.guards] * (name in programs.WRONG))
        for name, program in programs.PROGRAMS.items()
    ],
)
def test_value_and_grad_equals_jax(program):
    programs.assert_like_jax(program, _at_scale)


ARGNUMS = [1, -1, -2, (0, 1), (1, 0), [0, 1], (0, -1), (0, 0), (0,), (), np.int64(1), np.arange(2)]
INVALID_ARGNUMS = [2, -3, (0, 5), 1.0, "x", (0.0, 1)]


@pytest.mark.parametrize("argnums", [*ARGNUMS, *INVALID_ARGNUMS], ids=repr)
def test_value_and_grad_accepts_argnums_like_jax(argnums):
    args = programs.W, programs.X
    programs.assert_like_jax(programs.Program(programs.product, args, options={"argnums": argnums}), _at_scale)


@pytest.mark.full
@pytest.mark.guards
def test_value_and_grad_equals_jax_on_random_programs():
    programs.assert_like_jax_on_random_programs(_at_scale)


def _tenfold(fun, **options):
    grad = jax.value_and_grad(fun, **options)
    return lambda *args: jax.tree.map(lambda x: 10 * x, grad(*args))


def test_value_and_grad_is_a_decorator_with_options():
    def loss(w, x):
        return w * x**2, {"w": w}

    for value_and_grad in (
        jmpscale.value_and_grad(argnums=1, has_aux=True, transform=_tenfold)(loss),
        jmpscale.value_and_grad(loss, 1, True, transform=_tenfold),
    ):
        (value, aux), grad = value_and_grad(SCALER, 2.0, 3.0)
        assert (value, aux["w"], grad) == (180.0, 20.0, 120.0)
    assert jmpscale.value_and_grad()(lambda w: w**2)(SCALER, 3.0)[1] == 6.0


def test_value_and_grad_names_the_new_function():
    assert jmpscale.value_and_grad(_loss).__name__ == "value_and_grad_of__loss"
    assert jmpscale.value_and_grad(functools.partial(_loss, power=3.0)).__name__ == "value_and_grad_of_fun"


@pytest.mark.full
def test_value_and_grad_under_jit_accepts_static_arguments():
    def loss(w, x, train):
        return _loss(w, x) * (2.0 if train else 1.0), {"half": x, "key": jax.random.key(0)}

    step = jax.jit(jmpscale.value_and_grad(loss, has_aux=True), static_argnames="train")
    (doubled, aux), grads = step(SCALER, W, X, train=True)
    (value, _), _ = step(SCALER, W, X, train=False)
    assert doubled == 2 * value
    chex.assert_trees_all_equal(aux["half"], X)
    np.testing.assert_allclose(grads, 2 * jax.grad(_loss)(W, X), rtol=1e-6)


# --- models of frameworks are differentiated ---


class NNXModel(nnx.Module):
    def __init__(self):
        self.w, self.bias = nnx.Param(W), nnx.Param(jnp.float32(1.0))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.sum(self.w[...] * x) + self.bias[...]


@pytest.mark.parametrize("options", [{}, {"argnums": nnx.DiffState(0, nnx.PathContains("w"))}], ids=["all", "some"])
def test_value_and_grad_with_nnx_transform_updates_the_model(options):
    def loss(model, x, target):
        prediction = model(x)
        return (prediction - target) ** 2, prediction

    def run(value_and_grad, *holder):
        model = NNXModel()
        out = value_and_grad(loss, has_aux=True, **options)(*holder, model, x=W, target=jnp.float32(2.0))
        assert model.calls[...] == 1
        return out

    ours = run(functools.partial(jmpscale.value_and_grad, transform=nnx.value_and_grad), SCALER)
    chex.assert_trees_all_equal(ours, run(nnx.value_and_grad))


@pytest.mark.guards
@pytest.mark.parametrize("transform", [jax.value_and_grad, equinox.filter_value_and_grad])
def test_value_and_grad_raises_if_the_transform_loses_the_state_of_an_nnx_model(transform):
    grad = jmpscale.value_and_grad(lambda model, x: jnp.sum(model(x)), transform=transform)
    with pytest.raises(TypeError, match="got a Flax NNX NNXModel, which is changed in place"):
        grad(SCALER, NNXModel(), W)


class Line(equinox.Module):
    slope: jax.Array
    start: jax.Array

    def __call__(self, x):
        return self.slope * x + self.start


def test_value_and_grad_accepts_equinox_models_of_floats():
    value, grads = jmpscale.value_and_grad(Line.__call__)(SCALER, Line(jnp.float32(2.0), jnp.float32(1.0)), 3.0)
    assert (value, grads.slope, grads.start) == (7.0, 3.0, 1.0)


def test_value_and_grad_with_equinox_transform_accepts_any_model():
    model, transform = Line(jnp.float32(2.0), jnp.int32(1)), equinox.filter_value_and_grad
    _, grads = jmpscale.value_and_grad(lambda m, x: m.slope * x, transform=transform)(SCALER, model, 3.0)
    assert (grads.slope, grads.start) == (3.0, None)


# --- new values in place of gradients ---


@jax.custom_vjp
def _track(x, amax):
    """Returns x; in the backward pass, the "gradient" of `amax` is the largest magnitude in x."""
    return x


_track.defvjp(lambda x, amax: (x, jnp.max(jnp.abs(x))), lambda largest, g: (g, largest))


def _tracked_loss(w, amax, x):
    return jnp.sum(_track(w * x, amax) ** 2)


def _of_dict(params, x):
    return _tracked_loss(params["w"], params["stats"]["amax"], x)


def _of_nnx(model, x):
    return _tracked_loss(model.line.slope[...], model.line.amax[...], x)


class Tracked(equinox.Module):
    slope: jax.Array
    amax: jax.Array


class TrackedNNX(nnx.Module):
    def __init__(self):
        self.line = nnx.Module()
        self.line.slope, self.line.amax = nnx.Param(W), nnx.Param(jnp.float32(1.0))


AMAX = jnp.float32(1.0)
DICT = {"w": W, "stats": {"amax": AMAX}}
OVERWRITTEN = {  # the loss, the arguments before x, the options, and the value and the gradient in the result
    "leaf": (_of_dict, (DICT,), {}, "['stats']['amax']", lambda g: (g["stats"]["amax"], g["w"])),
    "node": (_of_dict, (DICT,), {}, ["['stats']"], lambda g: (g["stats"]["amax"], g["w"])),
    "argument": (_tracked_loss, (W, AMAX), {"argnums": (0, 1)}, ("[1]",), lambda g: (g[1], g[0])),
    "argument in another order": (_tracked_loss, (W, AMAX), {"argnums": (1, 0)}, "[0]", lambda g: g),
    "leaf of an argument": (
        lambda w, stats, x: _tracked_loss(w, stats["amax"], x),
        (W, DICT["stats"]),
        {"argnums": (0, 1)},
        "[1]['amax']",
        lambda g: (g[1]["amax"], g[0]),
    ),
    "NNX": (
        _of_nnx,
        (TrackedNNX(),),
        {"transform": nnx.value_and_grad},
        "['line']['amax']",
        lambda g: (g["line"]["amax"][...], g["line"]["slope"][...]),
    ),
    "Equinox": (
        lambda model, x: _tracked_loss(model.slope, model.amax, x),
        (Tracked(W, AMAX),),
        {"transform": equinox.filter_value_and_grad},
        ".amax",
        lambda g: (g.amax, g.slope),
    ),
}


@pytest.mark.parametrize("row", rows(OVERWRITTEN, default={"leaf", "leaf of an argument", "NNX", "Equinox"}))
def test_value_and_grad_returns_new_values_unchanged(row):
    fun, args, options, paths, split = row
    grad_fn = jmpscale.value_and_grad(fun, overwrite_with_gradient=paths, **options)
    for scaler in (jmpscale.static(2.0**8), jmpscale.disabled()):
        value, gradient = split(grad_fn(scaler, *args, W)[1])
        assert value == 9.0
        np.testing.assert_allclose(gradient, 2 * W**3, rtol=1e-6)


def test_value_and_grad_returns_new_values_if_the_loss_is_not_finite():
    def loss_fn(params):
        return jnp.maximum(_of_dict(params, W), jnp.float32(jnp.nan))

    _, grads = jmpscale.value_and_grad(loss_fn, overwrite_with_gradient="['stats']")(SCALER, DICT)
    assert grads["stats"]["amax"] == 9.0
    assert jnp.isnan(grads["w"]).all()


@pytest.mark.full
def test_value_and_grad_returns_new_values_on_each_device():
    mesh = meshes.make_mesh(data=4)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P("data"))
    def amax_of_device(scaler, amax, x):
        amax = as_varying(amax, ("data",))
        _, grads = jmpscale.value_and_grad(_tracked_loss, (0, 1), overwrite_with_gradient="[1]")(scaler, x, amax, x)
        return grads[1][None]

    np.testing.assert_array_equal(jax.jit(amax_of_device)(SCALER, AMAX, jnp.arange(4.0)), jnp.arange(4.0) ** 2)
