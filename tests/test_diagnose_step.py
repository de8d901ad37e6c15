"""diagnose_step diagnoses a training step as it is, and says what to do with a step that it cannot run."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jmpscale

import meshes
from diagnosis_programs import H, normal
from tables import names

W, X, Y = normal(0, 16, 4), normal(1, 32, 16), normal(2, 32, 4)
TX = jmpscale.with_loss_scaling(optax.adam(1e-3))
SHARDED_TX = jmpscale.with_loss_scaling(optax.adam(1e-3), axis_name="data")


def mean_square(w, x, y):
    return 1e-9 * jnp.mean((jnp.tanh(x.astype(H) @ w.astype(H)).astype(jnp.float32) - y) ** 2)


def train_step(w, opt_state, batch):
    x, y = jax.tree.map(lambda x: x * 1.0, batch)

    def loss_fn(w):
        return mean_square(w, x, y)

    loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, w)
    updates, opt_state = TX.update(grads, opt_state, w, value=loss)
    return optax.apply_updates(w, updates), opt_state


def accumulated(w, opt_state, batch):
    def add(total, part):
        _, grads = jmpscale.value_and_grad(mean_square)(opt_state, w, *part)
        return total + grads, None

    parts = jax.tree.map(lambda x: x.reshape(1, *x.shape), batch)
    grads, _ = jax.lax.scan(add, jnp.zeros_like(w), parts)
    return TX.update(grads, opt_state, w)


def whole_run(w, opt_state, batch):
    return jax.lax.scan(lambda carry, _: (train_step(*carry, batch), None), (w, opt_state), None, length=100)


STEPS = {
    "plain": train_step,
    "compiled": jax.jit(train_step),
    "donated": jax.jit(train_step, donate_argnums=(0, 1)),
    "nested": jax.jit(lambda *args: jax.jit(train_step)(*args)),
    "accumulated": jax.jit(accumulated),
    "whole run": jax.jit(whole_run),
}


@pytest.mark.parametrize("name", names(STEPS, default={"donated"}))
def test_diagnose_step_returns_the_diagnosis_of_its_gradient(name):
    expected = jmpscale.diagnose(lambda w: mean_square(w, X, Y))(TX.init(W), W)
    w, opt_state = jnp.array(W), TX.init(W)
    found = jmpscale.diagnose_step(STEPS[name])(w, opt_state, (X, Y))
    assert found.fitting_scales == expected.fitting_scales
    assert found.summary == expected.summary
    assert found.loss == expected.loss
    assert not w.is_deleted()


def scaled_loss(scale, has_aux=False):
    def loss_fn(params, batch):
        loss = mean_square(params["w"], *batch) + 1e-12 * params["b"]
        return (loss, batch) if has_aux else loss

    return jmpscale.scaled_backward(loss_fn, scale, has_aux=has_aux)


PARAMS = {"b": jnp.float32(1.0), "w": W}
SCALED = {  # steps that differentiate a function of scaled_backward, and the arguments that they differentiate
    "scaler": lambda scaler: jax.grad(scaled_loss(scaler))(PARAMS, (X, Y)),
    "function": lambda scaler: jax.grad(scaled_loss(lambda *args: scaler))(PARAMS, (X, Y)),
    "keywords": lambda scaler: jax.grad(lambda p: scaled_loss(scaler)(params=p, batch=(X, Y)))(PARAMS),
    "auxiliary data": lambda scaler: jax.grad(scaled_loss(scaler, has_aux=True), has_aux=True)(PARAMS, (X, Y)),
    "after the loss": lambda scaler: (
        scaled_loss(scaler)(PARAMS, (X, Y)) + jax.grad(scaled_loss(scaler))(PARAMS, (X, Y))["b"]
    ),
}


@pytest.mark.parametrize("name", names(SCALED, default={"function"}))
def test_diagnose_step_diagnoses_the_gradient_of_scaled_backward(name):
    scaler = jmpscale.dynamic()
    expected = jmpscale.diagnose(lambda p: mean_square(p["w"], X, Y) + 1e-12 * p["b"])(scaler, PARAMS)
    found = jmpscale.diagnose_step(jax.jit(SCALED[name]))(scaler)
    assert found.fitting_scales == expected.fitting_scales
    assert found.summary == expected.summary


@pytest.mark.full
def test_diagnose_step_diagnoses_scaled_backward_on_one_device():
    def device_step(scaler):
        x = X + jax.lax.axis_index("data").astype(jnp.float32)

        def loss_fn(w):
            return jax.lax.pmean(mean_square(w, x, Y), "data")

        return jax.lax.pmean(jax.grad(jmpscale.scaled_backward(loss_fn, scaler))(W), "data")

    scaler = jmpscale.dynamic()
    on_one = jax.vmap(device_step, in_axes=None, out_axes=None, axis_name="data", axis_size=1)
    expected = jmpscale.diagnose(mean_square)(scaler, W, X, Y)
    assert jmpscale.diagnose_step(on_one)(scaler).summary == expected.summary


@pytest.mark.full
def test_diagnose_step_differentiates_only_what_the_step_differentiates():
    def step(scaler):
        return jax.grad(lambda w: scaled_loss(scaler)({"w": w, "b": PARAMS["b"]}, (X, Y)))(W)

    expected = jmpscale.diagnose(lambda w: mean_square(w, X, Y) + 1e-12 * PARAMS["b"])(jmpscale.static(4.0), W)
    for scale in (4.0, jnp.float32(4.0), jmpscale.static(4.0)):
        assert jmpscale.diagnose_step(step)(scale).summary == expected.summary


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(16, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dropout(self.linear(x)))


@nnx.jit
def nnx_step(model, optimizer, batch):
    loss_fn = jmpscale.autocast(lambda model: 1e-9 * jnp.mean((model(batch[0]) - batch[1]) ** 2))
    loss, grads = jmpscale.value_and_grad(loss_fn, transform=nnx.value_and_grad)(optimizer.opt_state, model)
    optimizer.update(model, grads, value=loss)


@pytest.mark.usefixtures("standard_promotion")
def test_diagnose_step_runs_a_step_of_nnx_and_leaves_its_objects_unchanged():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    diagnosis = jmpscale.diagnose_step(nnx_step)(model, optimizer, (X, Y))
    assert any("test_diagnose_step.py" in row.line for row in diagnosis.rows)
    assert diagnosis.fitting_scales is not None
    after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


def device_step(w, opt_state, batch):
    def loss_fn(w):
        return jax.lax.pmean(mean_square(w, *batch), "data")

    loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, w)
    updates, opt_state = SHARDED_TX.update(jax.lax.pmean(grads, "data"), opt_state, w, value=loss)
    return optax.apply_updates(w, updates), opt_state


def in_shard_map(w, opt_state, batch):
    specs = {"in_specs": (jax.P(), jax.P(), jax.P("data")), "out_specs": jax.P(), "check_vma": False}
    return jax.shard_map(device_step, mesh=meshes.make_mesh(data=4), **specs)(w, opt_state, batch)


@pytest.mark.parametrize("name", ["shard_map", pytest.param("vmap", marks=pytest.mark.full)])
def test_diagnose_step_of_a_mapped_step_has_a_remedy(name):
    batches = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), (X, Y))
    mapped = jax.vmap(device_step, in_axes=(None, None, 0), axis_name="data")
    step, batch = (in_shard_map, (X, Y)) if name == "shard_map" else (mapped, batches)
    with pytest.raises(TypeError, match=r"diagnose_step\(jax\.vmap\(device_step, in_axes=None, out_axes=None, axis_na"):
        jmpscale.diagnose_step(step)(W, SHARDED_TX.init(W), batch)


def _step_with_a_key_of_the_device(w, opt_state, batch, is_argument):
    key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data"))

    def loss_fn(w, key):
        return jax.lax.pmean(mean_square(w, batch[0] + jax.random.normal(key, batch[0].shape), batch[1]), "data")

    return jmpscale.value_and_grad(loss_fn if is_argument else lambda w: loss_fn(w, key))(
        opt_state, w, *([key] if is_argument else [])
    )


@pytest.mark.parametrize("is_argument", [False, pytest.param(True, marks=pytest.mark.full)])
def test_diagnose_step_of_one_device_uses_values_that_depend_on_the_device(is_argument):
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), 0), X.shape)
    expected = jmpscale.diagnose(mean_square)(TX.init(W), W, X + noise, Y)
    step = partial(_step_with_a_key_of_the_device, is_argument=is_argument)
    on_one = jax.vmap(step, in_axes=None, out_axes=None, axis_name="data", axis_size=1)
    found = jmpscale.diagnose_step(on_one)(W, TX.init(W), (np.asarray(X), np.asarray(Y)))
    assert found.fitting_scales == expected.fitting_scales
    assert found.loss == expected.loss


@pytest.mark.full
def test_diagnose_step_of_a_step_that_runs_only_compiled_has_a_remedy():
    mesh = jax.make_mesh((4,), ("data",))  # with explicit axes from JAX 0.9 on, whose specs differ outside of jax.jit
    specs = {"in_specs": (jax.P(), jax.P(), jax.P("data")), "out_specs": jax.P()}
    step = jax.jit(jax.shard_map(device_step, mesh=mesh, **specs))
    with pytest.raises(TypeError, match=r"Diagnose the mapped function itself, on the arguments of one device"):
        jmpscale.diagnose_step(step)(W, SHARDED_TX.init(W), (X, Y))


@pytest.mark.full
def test_diagnose_step_runs_a_mapped_step_on_one_device():
    expected = jmpscale.diagnose(mean_square)(TX.init(W), W, X[:8], Y[:8])
    on_one = jax.vmap(device_step, in_axes=None, out_axes=None, axis_name="data", axis_size=1)
    found = jmpscale.diagnose_step(on_one)(W, SHARDED_TX.init(W), (X[:8], Y[:8]))
    assert found.fitting_scales == expected.fitting_scales
    assert found.summary == expected.summary


class Network(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(8, (3, 3), dtype=H)(x)
        x = linen.BatchNorm(use_running_average=False, axis_name="data")(x)
        return linen.Dense(10, dtype=H)(linen.relu(x).mean((1, 2))).astype(jnp.float32)


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
def test_diagnose_step_ignores_the_bias_before_batch_normalization_whose_gradient_is_noise():
    images, labels = jax.random.normal(jax.random.fold_in(jax.random.key(0), 1), (4, 4, 8, 8, 3))[0], jnp.arange(4)
    on_one = {"in_axes": None, "out_axes": None, "axis_name": "data", "axis_size": 1}
    variables = jax.vmap(Network().init, **on_one)(jax.random.key(0), images)

    def device_step(params, scaler):
        def loss_fn(params):
            logits, _ = Network().apply(variables | {"params": params}, images, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params)
        return jax.lax.pmean((loss, grads), "data")

    diagnosis = jmpscale.diagnose_step(jax.vmap(device_step, **on_one))(variables["params"], jmpscale.dynamic(2.0**8))
    assert diagnosis.fitting_scales is not None
    assert diagnosis.gradient_error < 0.01


def test_diagnose_of_a_loss_with_collectives_has_a_remedy():
    def loss_fn(w, x, y):
        return jax.lax.pmean(mean_square(w, x, y), "data")

    with pytest.raises(NameError) as caught:
        jmpscale.diagnose(loss_fn)(TX.init(W), W, X, Y)
    (note,) = (note for note in caught.value.__notes__ if "jax.vmap(loss_fn, " in note)
    mapped = jax.vmap(loss_fn, in_axes=None, out_axes=None, axis_name="data", axis_size=1)
    assert 'jax.vmap(loss_fn, in_axes=None, out_axes=None, axis_name="data", axis_size=1)' in note
    expected = jmpscale.diagnose(mean_square)(TX.init(W), W, X, Y)
    assert jmpscale.diagnose(mapped)(TX.init(W), W, X, Y).summary == expected.summary


WRONG = {
    "not callable": (3.0, "step must be the training step, got 3.0. Call diagnose_step(step)(*args)."),
    "no gradient": (
        lambda w: jmpscale.scaled_backward(jnp.sum, 1.0)(w),
        "step must call jmpscale.value_and_grad, or differentiate a function of scaled_backward, which <lambda> does n",
    ),
    "compiled ahead of time": (
        lambda w: jax.jit(lambda w: 2 * w).lower(w).compile()(w),
        "unless it is a program that has been compiled already. Pass the function itself",
    ),
    "scaled_backward of a closure": (
        jax.grad(lambda w: jmpscale.scaled_backward(lambda x: jnp.sum(w * x), 1.0)(1.0)),
        "<lambda> in jmpscale.scaled_backward, but the function closes over values that are differentiated. Pass",
    ),
    "scaled_backward of NNX": (
        lambda w: nnx.grad(jmpscale.scaled_backward(lambda m: m(w.T).sum(), 1.0))(nnx.Linear(16, 4, rngs=nnx.Rngs(0))),
        "which do not show what is differentiated. Call diagnose(loss_fn, transform=nnx.value_and_grad)(scaler, model",
    ),
}


@pytest.mark.parametrize(("step", "message"), WRONG.values(), ids=WRONG)
def test_diagnose_step_of_a_wrong_step_raises(step, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        jmpscale.diagnose_step(step)(W)
