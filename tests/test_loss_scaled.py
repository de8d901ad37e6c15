"""loss_scaled: true gradients under every transformation, for every value that the function depends on."""

import functools
import gc
import inspect
import weakref

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmpscale
from jmpscale import testing

SCALE = 2.0**16
W, X = jnp.linspace(-1, 1, 6).reshape(3, 2), jnp.linspace(0, 2, 12).reshape(4, 3)
MESH = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
EXPLICIT = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])


def mean_square(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def underflowing(w, x):
    """A loss in float16 whose gradients are below the smallest float16 number."""
    hidden = jnp.tanh(x.astype(jnp.float16) @ w.astype(jnp.float16))
    return jnp.float32(2.0**-24) * jnp.mean(hidden.astype(jnp.float32) ** 2)


def scaled(fun):
    return jmpscale.loss_scaled(fun, SCALE)


# --- the gradients are true ---

TRANSFORMATIONS = {
    "eager": lambda wrap: jax.value_and_grad(wrap(mean_square))(W, X),
    "grad inside jit": lambda wrap: jax.jit(jax.value_and_grad(wrap(mean_square)))(W, X),
    "grad outside jit": lambda wrap: jax.value_and_grad(jax.jit(wrap(mean_square)))(W, X),
    "all arguments": lambda wrap: jax.grad(wrap(mean_square), (0, 1))(W, X),
    "vjp": lambda wrap: jax.vjp(wrap(mean_square), W, X)[1](jnp.float32(3.0)),
    "several outputs": lambda wrap: jax.jacrev(wrap(lambda w, x: {"a": x @ w, "n": jnp.arange(2)}["a"]))(W, X),
    "checkpoint outside": lambda wrap: jax.jit(jax.grad(jax.checkpoint(wrap(mean_square))))(W, X),
    "checkpoint inside": lambda wrap: jax.jit(jax.grad(wrap(jax.checkpoint(mean_square))))(W, X),
    "vmap of grad": lambda wrap: jax.vmap(jax.grad(wrap(mean_square)), (None, 0))(W, X[:, None]),
    "grad of vmap": lambda wrap: jax.grad(lambda w: jax.vmap(wrap(mean_square), (None, 0))(w, X[:, None]).sum())(W),
    "scan over micro-batches": lambda wrap: jax.jit(jax.grad(functools.partial(_scanned, wrap(mean_square))))(W),
    "grad inside scan": lambda wrap: jax.lax.scan(
        lambda sum, x: (sum + jax.grad(wrap(mean_square))(W, x), None), jnp.zeros_like(W), X[:, None]
    )[0],
    "cond": lambda wrap: jax.jit(
        jax.grad(lambda w: jax.lax.cond(w[0, 0] < 0, wrap(mean_square), lambda w, x: w.sum(), w, X))
    )(W),
    "reverse over reverse": lambda wrap: jax.jacrev(jax.grad(wrap(mean_square)))(W, X),
    "forward over reverse": lambda wrap: jax.hessian(wrap(mean_square))(W, X),
    "gradient penalty": lambda wrap: jax.grad(lambda w: jnp.sum(jax.grad(wrap(mean_square))(w, X) ** 2))(W),
    "nested": lambda wrap: jax.grad(wrap(wrap(mean_square)))(W, X),
    "sum with another loss": lambda wrap: jax.grad(lambda w: wrap(mean_square)(w, X) + jnp.sum(w**2))(W),
    "closure": lambda wrap: jax.grad(lambda w: wrap(lambda x: mean_square(w, x))(X))(W),
    "closure inside jit": lambda wrap: jax.jit(jax.grad(lambda w: wrap(lambda x: mean_square(w, x))(X)))(W),
    "closure outside jit": lambda wrap: jax.grad(jax.jit(lambda w: wrap(lambda x: mean_square(w, x))(X)))(W),
    "closure under vmap": lambda wrap: jax.grad(
        lambda w: jax.vmap(lambda x: wrap(lambda: mean_square(w, x))())(X[:, None]).sum()
    )(W),
    "closure in scan": lambda wrap: jax.grad(lambda w: _scanned(lambda w, x: wrap(lambda x: mean_square(w, x))(x), w))(
        W
    ),
    "shard_map": lambda wrap: _shard_map(wrap(mean_square), check_vma=True),
    "shard_map without types": lambda wrap: _shard_map(wrap(mean_square), check_vma=False),
    "shard_map inside": lambda wrap: jax.jit(jax.grad(wrap(_sharded_loss)))(W, X),
    "pmap": lambda wrap: jax.pmap(jax.grad(wrap(mean_square)), in_axes=(None, 0))(W, X[:, None]),
    "sharded jit": lambda wrap: _sharded_jit(wrap(mean_square), MESH),
    "Explicit axes": lambda wrap: _sharded_jit(wrap(mean_square), EXPLICIT),
}


def _scanned(loss, w):
    return jax.lax.scan(lambda sum, x: (sum + loss(w, x), None), jnp.float32(0), X[:, None])[0]


def _shard_map(loss, check_vma):
    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        grads = grads if check_vma else jax.lax.psum(grads, "data")
        return jax.lax.pmean(value, "data"), grads

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": (jax.P(), jax.P())}
    return jax.jit(jax.shard_map(step, mesh=MESH, check_vma=check_vma, **specs))(W, X)


@functools.partial(jax.shard_map, mesh=MESH, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
def _sharded_loss(w, x):
    return jax.lax.pmean(mean_square(w, x), "data")


def _sharded_jit(loss, mesh):
    with jax.set_mesh(mesh):
        w, x = (
            jax.device_put(W, jax.NamedSharding(mesh, jax.P())),
            jax.device_put(X, jax.NamedSharding(mesh, jax.P("data"))),
        )
        return jax.jit(jax.value_and_grad(loss))(w, x)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_gradients_of_loss_scaled_equal_those_of_the_function(name):
    result, expected = (TRANSFORMATIONS[name](wrap) for wrap in (scaled, lambda fun: fun))
    chex.assert_trees_all_close(result, expected, rtol=2e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)


def test_the_backward_pass_of_loss_scaled_runs_at_the_scale():
    plain = jax.jit(jax.grad(underflowing))(W, X)
    assert not np.any(plain), "float16 alone must underflow"
    loss, grads = jax.jit(jmpscale.value_and_grad(underflowing))(jmpscale.static(SCALE), W, X)
    chex.assert_trees_all_equal(jax.jit(jax.value_and_grad(scaled(underflowing)))(W, X), (loss, grads))
    assert np.all(np.abs(grads) > 0)


def test_loss_scaled_passes_an_overflow_on_to_the_optimizer():
    def loss(w, x):
        return mean_square(testing.inject_backward(w, jnp.inf, path=""), x)

    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.static(1.0))
    updates, state = tx.update(jax.grad(scaled(loss))(W, X), tx.init(W), W)
    assert not np.any(updates)
    assert state.scaler.skipped == 1


def test_second_derivatives_of_loss_scaled_do_not_underflow():
    def penalty(wrap, w):
        return jnp.sum(jax.grad(wrap(underflowing))(w, X) ** 2) * 2.0**48

    assert np.all(np.abs(jax.grad(functools.partial(penalty, scaled))(W)) > 0)


# --- everything that the function depends on is unscaled ---


class Model(nnx.Module):
    def __init__(self):
        self.first, self.norm = nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(1))
        self.dropout, self.last = nnx.Dropout(0.3, rngs=nnx.Rngs(2)), nnx.Linear(8, 2, rngs=nnx.Rngs(3))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        hidden = self.dropout(jnp.tanh(self.norm(self.first(x))))
        self.hidden = nnx.Intermediate(hidden)
        return self.last(hidden)


def nnx_loss(model, x, factor=1.0):
    return factor * jnp.mean(model(x) ** 2)


def nnx_loss_and_aux(model, x):
    return nnx_loss(model, x), {"mean": model.norm.mean[...], "none": None}


def nnx_loss_and_penalty(wrap, model, x):
    """Uses the model, whose state the loss has changed, once more."""
    return wrap(nnx_loss)(model, x) + jnp.sum(model.last.kernel[...] ** 2) + jnp.sum(model.norm.mean[...] ** 2)


NNX_CALLS = {
    "positional": lambda wrap, model: nnx.value_and_grad(wrap(nnx_loss))(model, X),
    "keyword": lambda wrap, model: nnx.value_and_grad(wrap(nnx_loss))(model, x=X, factor=2.0),
    "has_aux": lambda wrap, model: nnx.value_and_grad(wrap(nnx_loss_and_aux), has_aux=True)(model, X),
    "some variables": lambda wrap, model: nnx.grad(
        wrap(nnx_loss), argnums=nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("first")))
    )(model, X),
    "used again": lambda wrap, model: nnx.value_and_grad(functools.partial(nnx_loss_and_penalty, wrap))(model, X),
    "a closure over another model": lambda wrap, model: nnx.value_and_grad(
        lambda other: wrap(lambda x: jnp.mean((other(x) - 1) ** 2))(X)
    )(nnx.Linear(3, 2, rngs=nnx.Rngs(0))),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", NNX_CALLS)
def test_loss_scaled_differentiates_nnx_models_and_keeps_their_state_up_to_date(name):
    def step(wrap):
        model = Model()
        call = nnx.jit(functools.partial(NNX_CALLS[name], wrap))
        with jax.numpy_rank_promotion("allow"):
            result = call(model)
        return result, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))

    result, expected = step(functools.partial(jmpscale.loss_scaled, scale=SCALE)), step(lambda fun: fun)
    chex.assert_trees_all_close(result, expected, rtol=1e-5, atol=1e-7)
    assert name == "a closure over another model" or result[1]["calls"] == 1


def test_loss_scaled_differentiates_equinox_models():
    model = eqx.nn.MLP(3, 1, 8, 2, key=jax.random.key(0))

    def loss(model, *, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    step = eqx.filter_jit(lambda wrap: eqx.filter_value_and_grad(wrap(loss))(model, x=X))
    chex.assert_trees_all_close(step(scaled), step(lambda fun: fun), rtol=2e-6)


ARGUMENTS = {
    "a keyword argument": lambda wrap, w: wrap(lambda x, *, w: mean_square(w, x))(X, w=w),
    "a dict in a list": lambda wrap, w: wrap(lambda tree, x: mean_square(tree[1]["w"], x))(
        [3, {"w": w, "on": True}], X
    ),
    "beside objects": lambda wrap, w: wrap(lambda w, act, name, n: jnp.sum(act(w)) * n)(w, jnp.tanh, "text", 2),
    "the same array twice": lambda wrap, w: wrap(lambda a, b: jnp.sum(a * b))(w, w),
    "an output that is an input": lambda wrap, w: wrap(lambda w: (w, jnp.sum(w**2)))(w)[0].sum(),
    "complex": lambda wrap, w: wrap(lambda z: jnp.sum(jnp.abs(z**2)))(jax.lax.complex(w, w)),
    "bfloat16": lambda wrap, w: wrap(lambda w: jnp.sum(w.astype(jnp.float32) ** 2))(w.astype(jnp.bfloat16)),
    "its auxiliary data": lambda wrap, w: sum(wrap(lambda w: (jnp.sum(w**2), jnp.sum(w**3)))(w)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_loss_scaled_unscales_the_gradients_of_every_argument(name):
    result, expected = (jax.grad(functools.partial(ARGUMENTS[name], wrap))(W) for wrap in (scaled, lambda fun: fun))
    chex.assert_trees_all_close(result, expected, rtol=2e-6)


def test_loss_scaled_returns_the_new_values_of_fp8_statistics_as_they_are():
    @jax.custom_vjp
    def with_statistics(w, statistics):
        return w

    with_statistics.defvjp(lambda w, _: (w, None), lambda _, cotangent: (cotangent, jnp.float32(5.0)))
    variables = {"params": W, "_overwrite_with_gradient": {"kernel_scale": jnp.float32(1.0)}}

    def loss(variables):
        return jnp.sum(with_statistics(variables["params"], variables["_overwrite_with_gradient"]["kernel_scale"]))

    grads = jax.grad(scaled(loss))(variables)
    assert grads["_overwrite_with_gradient"]["kernel_scale"] == 5
    np.testing.assert_array_equal(grads["params"], np.ones_like(W))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda h: scaled(lambda tree: tree["h"].astype(jnp.float32).sum())({"h": h}), r"args\[0\]\['h'\]"),
        (lambda h: scaled(lambda *, h: h.astype(jnp.float32).sum())(h=h), r"kwargs\['h'\]"),
        (lambda h: scaled(lambda: h.astype(jnp.float32).sum())(), "a value that fun closes over"),
    ],
    ids=["positional", "keyword", "closure"],
)
def test_loss_scaled_refuses_to_differentiate_narrow_leaves_and_names_them(call, name, dtype):
    with pytest.raises(TypeError, match=rf"must be float32, bfloat16 or wider, got {name} of {jnp.dtype(dtype)}\[3\]"):
        jax.grad(call)(jnp.ones(3, dtype))


def test_loss_scaled_accepts_narrow_leaves_that_are_not_differentiated():
    grads = jax.grad(scaled(lambda w, x: jnp.sum(w * x.astype(jnp.float32))))(jnp.ones(3), jnp.full(3, 2, jnp.float16))
    np.testing.assert_array_equal(grads, 2)


def test_loss_scaled_warns_about_a_float16_loss_but_not_about_auxiliary_data():
    def loss(w):
        return jnp.sum(w), w.astype(jnp.float16)

    jax.grad(jmpscale.loss_scaled(loss, SCALE, has_aux=True), has_aux=True)(W)
    with pytest.warns(UserWarning, match="the loss is float16"):
        jax.grad(scaled(lambda w: jnp.sum(w.astype(jnp.float16))))(W)


# --- the scale ---

HOLDER = {"params": W, "scaler": jmpscale.static(SCALE)}
SCALES = {
    "a Python number": 65536,
    "an array": jnp.float32(SCALE),
    "a NumPy scalar": np.float32(SCALE),
    "a scaler": jmpscale.static(SCALE),
    "a tree that contains a scaler": HOLDER,
    "a function that returns a number": lambda w, x: 65536.0,
    "a function that returns an array": lambda w, x: jnp.float32(SCALE) + 0 * x[0, 0],
    "a function that returns a tree": lambda w, x: HOLDER,
    "a variable of NNX": nnx.Variable(jnp.float32(SCALE)),
}


@pytest.mark.parametrize("name", SCALES)
def test_loss_scaled_takes_the_scale_in_every_form(name):
    expected = jax.jit(jax.grad(scaled(underflowing)))(W, X)
    result = jax.jit(jax.grad(jmpscale.loss_scaled(underflowing, SCALES[name])))(W, X)
    chex.assert_trees_all_equal(result, expected)


def test_scales_other_than_powers_of_two_divide_out():
    result = jax.grad(jmpscale.loss_scaled(mean_square, 1000))(W, X)
    chex.assert_trees_all_close(result, jax.grad(mean_square)(W, X), rtol=1e-6)


def test_float64_gradients_keep_their_precision(x64):
    w = jnp.asarray(W, jnp.float64)
    result = jax.grad(jmpscale.loss_scaled(lambda w: jnp.sum(jnp.sin(w)), 1000))(w)
    np.testing.assert_allclose(result, jnp.cos(w), rtol=1e-15)


def test_the_scale_follows_the_optimizer_state_that_fun_receives_without_retracing():
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(SCALE, growth_interval=1))
    train_state = {"params": W, "opt_state": tx.init(W)}
    scales = []

    def loss(params, opt_state, x):
        jax.debug.callback(lambda scale: scales.append(float(scale)), jmpscale.get_scaler(opt_state).loss_scale)
        return underflowing(params, x)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state):
        loss_fn = jmpscale.loss_scaled(loss, lambda params, opt_state, x: opt_state)
        grads = jax.grad(loss_fn)(state["params"], state["opt_state"], X)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    for _ in range(3):
        train_state = step(train_state)
    jax.effects_barrier()
    assert scales == [SCALE, 2 * SCALE, 4 * SCALE]


def test_a_scaler_among_the_differentiated_arguments_gets_no_gradient():
    def loss(state, x):
        return mean_square(state["w"], x.astype(jnp.float32))

    loss_fn = jmpscale.loss_scaled(loss, lambda state, x: state["scale"])
    # Nor does it make the batch, which could not be float16 then, a differentiated value.
    grads = jax.jit(jax.grad(loss_fn))({"w": W, "scale": jnp.float32(SCALE)}, X.astype(jnp.float16))
    assert grads["scale"] == 0
    assert np.all(grads["w"] != 0)


ARRAY, DYNAMIC = jnp.float32(SCALE), jmpscale.dynamic(SCALE)


@pytest.mark.parametrize("scale", [DYNAMIC, lambda w, x: DYNAMIC, lambda w, x: ARRAY, lambda w, x: nnx.Variable(ARRAY)])
def test_loss_scaled_warns_if_a_dynamic_scale_is_a_constant_of_a_compiled_program(scale):
    grad = jax.grad(jmpscale.loss_scaled(mean_square, scale))
    grad(W, X)  # outside jit the scale is read in each call
    with pytest.warns(UserWarning, match="constant of the compiled program, so it will not adapt"):
        jax.jit(grad)(W, X)


def test_an_nnx_model_may_hold_an_alias_of_the_scale_in_its_optimizer():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.dynamic(SCALE, growth_interval=1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model.loss_scale = optimizer.opt_state.scaler.loss_scale
    loss_fn = jmpscale.loss_scaled(lambda model, x: jnp.mean(model(x) ** 2), lambda model, x: model.loss_scale)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss_fn)(model, x))

    with jax.numpy_rank_promotion("allow"):
        step(model, optimizer, X)
    assert model.loss_scale[...] == 2 * SCALE


def test_vmapped_scales_apply_to_their_own_models():
    def grad(scale, w):
        return jax.grad(jmpscale.loss_scaled(underflowing, scale))(w, X)

    result = jax.vmap(grad)(jnp.array([1.0, SCALE]), jnp.stack([W, W]))
    assert not np.any(result[0])
    chex.assert_trees_all_equal(result[1], jax.grad(scaled(underflowing))(W, X))


def test_loss_scaled_with_a_disabled_scaler_calls_fun():
    loss_fn = jmpscale.loss_scaled(mean_square, jmpscale.disabled())
    assert str(jax.make_jaxpr(jax.grad(loss_fn))(W, X)) == str(jax.make_jaxpr(jax.grad(mean_square))(W, X))


# --- how it is called ---


def test_loss_scaled_calls_fun_once_per_trace():
    calls = []

    def loss(w, x):
        calls.append(w)
        return mean_square(w, x)

    step = jax.jit(jax.value_and_grad(scaled(loss)))
    step(W, X)
    step(W + 1, X)
    assert len(calls) == 1


def test_loss_scaled_keeps_no_reference_to_its_arguments():
    def arrays_alive_after_a_step():
        w, x = W + 1, X + 1
        jax.grad(scaled(lambda w: mean_square(w, x)))(w)
        return weakref.ref(w), weakref.ref(x)

    references = arrays_alive_after_a_step()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_loss_scaled_has_the_signature_and_the_name_of_fun():
    def loss(w, x, *, training=True):
        """Returns the loss."""

    loss_fn = scaled(loss)
    assert (loss_fn.__name__, loss_fn.__doc__) == ("loss", "Returns the loss.")
    assert inspect.signature(loss_fn) == inspect.signature(loss)


def test_static_arguments_of_loss_scaled_can_be_named_under_jit():
    def loss(w, activation):
        return jnp.sum(activation(w))

    step = jax.jit(jax.grad(scaled(loss)), static_argnames="activation")
    chex.assert_trees_all_close(step(W, activation=jnp.sin), jnp.cos(W))


def test_side_effects_of_fun_happen_once():
    seen, ref = [], jax.new_ref(jnp.float32(0)) if hasattr(jax, "new_ref") else None

    def loss(w):
        jax.debug.callback(lambda total: seen.append(float(total)), jnp.sum(w))
        if ref is not None:
            ref[...] = ref[...] + 1
        return jnp.sum(w**2)

    np.testing.assert_array_equal(jax.jit(jax.grad(scaled(loss)))(W), 2 * W)
    jax.effects_barrier()
    assert len(seen) == 1
    assert ref is None or ref[...] == 1


def test_loss_scaled_under_disable_jit():
    with jax.disable_jit():
        chex.assert_trees_all_close(jax.grad(scaled(mean_square))(W, X), jax.grad(mean_square)(W, X), rtol=2e-6)


def test_loss_scaled_leaks_no_tracers():
    loss_fn = jmpscale.loss_scaled(lambda w: (mean_square(w, X), {"kept": w, "text": "kept"}), SCALE, has_aux=True)
    with jax.checking_leaks():
        jax.jit(lambda w: jax.value_and_grad(lambda w: loss_fn(w)[0])(w))(W)


def test_forward_mode_names_the_remedy():
    with pytest.raises(TypeError, match="forward-mode") as raised:
        jax.jvp(scaled(mean_square), (W, X), (W, X))
    assert "In forward mode nothing underflows: differentiate fun." in "".join(raised.value.__notes__)


def test_loss_scaled_refuses_a_scale_that_differs_between_devices_that_share_a_parameter():
    def step(w, x):
        scale = 2.0 ** jax.lax.axis_index("data").astype(jnp.float32)
        return jax.grad(jmpscale.loss_scaled(mean_square, scale))(w, x)

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    with pytest.raises(ValueError, match=r"scale must be equal on all devices that share args\[0\].*\['data'\]"):
        jax.jit(jax.shard_map(step, mesh=MESH, **specs))(W, X)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: jmpscale.loss_scaled(3.0, SCALE), TypeError, "fun must be the loss function, got 3.0"),
        (lambda: jmpscale.loss_scaled(mean_square, -1), ValueError, "scale must be between"),
        (lambda: jmpscale.loss_scaled(mean_square, True), TypeError, "scale must be a"),
        (lambda: jmpscale.loss_scaled(mean_square, "x")(W, X), ValueError, "exactly one ScalerState, found 0"),
        (lambda: jmpscale.loss_scaled(mean_square, [*HOLDER.values()] * 2)(W, X), ValueError, "found 2"),
        (lambda: jmpscale.loss_scaled(mean_square, jnp.ones(3))(W, X), TypeError, r"scalar, got float32\[3\]"),
        (lambda: jmpscale.loss_scaled(mean_square, jnp.array(3))(W, X), TypeError, "floating-point scalar, got int32"),
        (lambda: jmpscale.loss_scaled(mean_square, lambda w, x: 0.0)(W, X), ValueError, "scale must be between"),
        (lambda: jmpscale.loss_scaled(mean_square, SCALE, has_aux=True)(W, X), TypeError, "a pair"),
    ],
)
def test_loss_scaled_refuses_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this version of JAX has no public references")
def test_loss_scaled_refuses_references_as_arguments():
    with pytest.raises(TypeError, match=r"got a jax.Ref at args\[1\]"):
        scaled(lambda w, ref: jnp.sum(w * ref[...]))(W, jax.new_ref(W))
