"""Right training programs of many kinds run without a warning: each warning is an error.

The programs train for a few steps. What they compute is tested elsewhere.
"""

import pickle

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmpscale

import meshes
from tables import rows

pytestmark = pytest.mark.usefixtures("standard_promotion_and_ranks")

RANDOM = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RANDOM.normal(size=(16, 16)), jnp.float32), "b": jnp.zeros(16)}
X, Y = (jnp.asarray(RANDOM.normal(size=(8, 16)), jnp.float32) for _ in "xy")
ADAM = optax.adam(1e-3)
TX = jmpscale.with_loss_scaling(ADAM)

PROGRAMS = {}
DEFAULT = {
    "three_checks_of_one_state",
    "wrapper",
    "functional_api",
    "scale_and_unscale",
}


def program(fn):
    """Adds a program to the table."""
    PROGRAMS[fn.__name__] = fn
    return fn


def squared_error(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


loss_fn = jmpscale.autocast(squared_error)


def make_step(tx, loss_fn=loss_fn):
    """Returns a training step of the optax wrapper."""

    def step(params, opt_state, x=X, y=Y):
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return step


def repeat(step, *state, steps=3):
    for _ in range(steps):
        state = step(*state)
    return state


def train(tx, params=PARAMS, loss_fn=loss_fn, compile_step=jax.jit, steps=3):
    return repeat(compile_step(make_step(tx, loss_fn)), params, tx.init(params), steps=steps)


def wrap(inner=ADAM, *args, **options):
    return jmpscale.with_loss_scaling(inner, *args, **options)


# --- the two APIs, and loops that take a loss function ---


@program
def wrapper():
    train(TX)


@program
def wrapper_without_jit():
    train(TX, compile_step=lambda step: step)


@program
def functional_api():
    @jax.jit
    def step(scaler, params, opt_state):
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, X, Y)
        finite = jmpscale.all_finite((loss, grads))
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, grads), params, opt_state)
        return jmpscale.update(scaler, finite, loss=loss), params, opt_state

    repeat(step, jmpscale.dynamic(), PARAMS, ADAM.init(PARAMS))


@program
def scale_and_unscale():
    @jax.jit
    def step(scaler, params, opt_state):
        def scaled_loss_fn(params):
            loss = loss_fn(params, X, Y)
            return jmpscale.scale(scaler, loss), loss

        (_, loss), grads = jax.value_and_grad(scaled_loss_fn, has_aux=True)(params)
        grads, finite = jmpscale.unscale_and_check(scaler, grads)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, grads), params, opt_state)
        return jmpscale.update(scaler, finite, loss=loss), params, opt_state

    repeat(step, jmpscale.dynamic(), PARAMS, ADAM.init(PARAMS))


@program
def clip_by_hand():
    @jax.jit
    def step(scaler, params, opt_state):
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, X, Y)
        finite = jmpscale.all_finite(grads)
        grads = optax.tree.scale(1 / jnp.maximum(1, optax.tree.norm(grads)), grads)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, grads), params, opt_state)
        return jmpscale.update(scaler, finite, loss=loss), params, opt_state

    repeat(step, jmpscale.dynamic(), PARAMS, ADAM.init(PARAMS))


def train_in_a_loop(tx, scaled_loss_fn, **extra_args):
    """Trains as a framework does that takes a loss function."""

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(scaled_loss_fn)(params, X, Y)
        updates, opt_state = tx.update(grads, opt_state, params, **({"value": loss} if extra_args else {}))
        return optax.apply_updates(params, updates), opt_state

    repeat(step, PARAMS, tx.init(PARAMS))


@program
def scaled_backward_by_a_number():
    train_in_a_loop(wrap(ADAM, jmpscale.static(1.0)), jmpscale.scaled_backward(loss_fn, 2.0**12))


@program
def scaled_backward_that_warns_about_overflows():
    tx = wrap(ADAM, jmpscale.static(1.0))
    train_in_a_loop(tx, jmpscale.scaled_backward(loss_fn, 2.0**12, warn_if_not_finite=True))


@program
def scaled_backward_by_the_state():
    scaled = jmpscale.scaled_backward(lambda params, state: loss_fn(params, X, Y), lambda params, state: state)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(scaled)(params, opt_state)
        updates, opt_state = TX.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    repeat(step, PARAMS, TX.init(PARAMS))


@program
def scaled_backward_with_half_auxiliary_data():
    def loss_and_features(params, x):
        features = x @ params["w"]
        return jnp.mean(features**2), features.astype(jnp.float16)

    scaled = jmpscale.scaled_backward(jmpscale.autocast(loss_and_features), 2.0**10, has_aux=True)
    jax.jit(jax.value_and_grad(scaled, has_aux=True))(PARAMS, X)


@program
def scaled_backward_of_each_example():
    scaled = jmpscale.scaled_backward(loss_fn, 2.0**10)
    jax.jit(jax.grad(lambda params: jnp.mean(jax.vmap(scaled, (None, 0, 0))(params, X[:, None], Y[:, None]))))(PARAMS)


@program
def scaled_backward_model():
    scaled = jmpscale.scaled_backward(
        lambda params, x: (x.astype("f2") @ params["w"].astype("f2")).astype("f4"), 2.0**10
    )
    jax.jit(jax.grad(lambda params: jnp.mean(scaled(params, X) ** 2)))(PARAMS)


@program
def no_scaling_in_bfloat16():
    train(wrap(ADAM, jmpscale.static(1.0)), loss_fn=jmpscale.autocast(squared_error, dtype=jnp.bfloat16))


@program
def no_scaling_with_gradients_of_jax():
    train_in_a_loop(wrap(ADAM, jmpscale.static(1.0)), squared_error, value=True)


# --- optimizers ---


@program
def many_inner_optimizers():
    labels, mask = {"w": "a", "b": "b"}, {"w": True, "b": False}
    for inner in (
        optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(1e-4), optax.scale_by_adam()),
        optax.MultiSteps(ADAM, 2),
        optax.partition({"a": optax.sgd(1e-2), "b": ADAM}, labels),
        optax.masked(ADAM, mask),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        optax.chain(ADAM, optax.contrib.reduce_on_plateau(patience=2)),
        optax.contrib.schedule_free_adamw(1e-3),
        optax.contrib.muon(1e-3),
    ):
        train(wrap(inner), steps=2)


@program
def transformations_outside_of_the_wrapper():
    constant_factors = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.full_like(x, 0.5), params),
        lambda updates, state, params=None: (jax.tree.map(jnp.multiply, updates, state), state),
    )
    for tx in (
        optax.chain(TX, optax.scale(0.5)),
        optax.chain(optax.scale(2.0), TX),
        optax.chain(constant_factors, TX),
        optax.chain(TX, constant_factors),
        optax.inject_hyperparams(lambda learning_rate: wrap(optax.adam(learning_rate)))(learning_rate=1e-3),
    ):
        train(tx, steps=2)


@program
def line_search():
    tx = wrap(optax.lbfgs(), jmpscale.static(2.0**8))

    def value_fn(params):
        return loss_fn(params, X, Y)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jmpscale.value_and_grad(value_fn)(opt_state, params)
        extra = {"value": loss, "grad": grads, "value_fn": value_fn}
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    repeat(step, PARAMS, tx.init(PARAMS), steps=2)


@program
def gated_average_of_parameters():
    average = optax.ema(0.9)

    @jax.jit
    def step(params, opt_state, averages):
        params, opt_state = make_step(TX)(params, opt_state)
        new = average.update(params, averages)[1]
        return params, opt_state, jmpscale.select_tree(opt_state.scaler.step_applied, new, averages)

    repeat(step, PARAMS, TX.init(PARAMS), average.init(PARAMS))


@program
def average_of_parameters():
    @jax.jit
    def step(params, opt_state, averages):
        params, opt_state = make_step(TX)(params, opt_state)
        return params, opt_state, optax.incremental_update(params, averages, 0.01)

    repeat(step, PARAMS, TX.init(PARAMS), PARAMS)


@program
def frozen_float16_parameters():
    params = {"w": PARAMS["w"], "frozen": PARAMS["w"].astype(jnp.float16)}
    tx = wrap(optax.partition({"train": ADAM, "freeze": optax.set_to_zero()}, {"w": "train", "frozen": "freeze"}))

    def loss_fn(params, x, y):
        features = x.astype(jnp.float16) @ params["frozen"]
        return jnp.mean(((features @ params["w"].astype(jnp.float16)).astype(jnp.float32) - y) ** 2)

    train(tx, params, loss_fn)


@program
def many_extra_arguments():
    @jax.jit
    def step(params, opt_state):
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, X, Y)
        return TX.update(grads, opt_state, params, value=loss, epoch=3, losses=loss)

    step(PARAMS, TX.init(PARAMS))


# --- losses ---


@program
def auxiliary_data():
    def loss_and_metrics(params, x, y):
        return squared_error(params, x, y), {"largest": jnp.max(x @ params["w"])}

    @jax.jit
    def step(params, opt_state):
        grad_fn = jmpscale.value_and_grad(jmpscale.autocast(loss_and_metrics), has_aux=True)
        (loss, _), grads = grad_fn(opt_state, params, X, Y)
        updates, opt_state = TX.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    repeat(step, PARAMS, TX.init(PARAMS))


@program
def gradients_of_two_arguments():
    product = jmpscale.autocast(lambda a, b: jnp.mean((X @ a @ b) ** 2))

    @jax.jit
    def step(pair, opt_state):
        loss, grads = jmpscale.value_and_grad(product, argnums=(0, 1))(opt_state, *pair)
        updates, opt_state = TX.update(grads, opt_state, pair, value=loss)
        return optax.apply_updates(pair, updates), opt_state

    pair = PARAMS["w"], PARAMS["w"]
    repeat(step, pair, TX.init(pair))


@program
def inner_gradient_step():
    def meta_loss(params, x, y):
        return loss_fn(optax.apply_updates(params, optax.tree.scale(-0.1, jax.grad(loss_fn)(params, x, y))), x, y)

    train(TX, loss_fn=meta_loss)


@program
def gradient_penalty():
    def penalized(params, x, y):
        slopes = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ params["w"])))(x)
        return squared_error(params, x, y) + jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2)

    train(TX, loss_fn=jmpscale.autocast(penalized))


@program
def policy_and_value_loss():
    def actor_critic(params, x, y):
        hidden = jnp.tanh(x @ params["w"])
        log_probability = jax.nn.log_softmax(hidden)
        ratio = jnp.exp(log_probability - lax.stop_gradient(log_probability))
        policy = jnp.minimum(ratio * y, jnp.clip(ratio, 0.8, 1.2) * y)
        return 0.5 * jnp.mean((hidden @ params["w"]) ** 2) - jnp.mean(policy)

    train(wrap(max_norm=0.5), loss_fn=jmpscale.autocast(actor_critic))


@program
def bfloat16_loss():
    train(TX, loss_fn=lambda params, x, y: loss_fn(params, x, y).astype(jnp.bfloat16))


@program
def blocks_in_half_precision():
    block = jmpscale.autocast(lambda x, w: jnp.tanh(x @ w))

    def deep(params, x, y):
        return jnp.mean((lax.scan(lambda h, _: (block(h, params["w"]), None), x, None, length=3)[0] - y) ** 2)

    train(TX, loss_fn=deep)


@program
def initial_backoff():
    train(wrap(ADAM, jmpscale.dynamic(2.0**30)), loss_fn=lambda *args: 1e4 * loss_fn(*args), steps=20)


@program
def reports():
    scaler = jmpscale.dynamic()
    jmpscale.diagnose(loss_fn)(scaler, PARAMS, X, Y)
    jmpscale.grad_report(jmpscale.value_and_grad(loss_fn)(scaler, PARAMS, X, Y)[1])
    train(wrap(warn_after_skips=5))


@program
def three_checks_of_one_state():
    """As after a step, after an evaluation and before saving; or in a cell of a notebook that runs again."""
    _, opt_state = train(TX)
    monitor = jmpscale.RunMonitor(max_consecutive_skips=20)
    for _ in range(3):
        jmpscale.metrics(opt_state)
        monitor.raise_if_stuck(opt_state)


@program
def short_runs_one_after_another():
    """As for learning rates that are compared, or in a population whose runs restart; some steps are skipped."""
    for _ in range(6):
        _, opt_state = train(wrap(ADAM, jmpscale.dynamic(2.0**30)), loss_fn=lambda *args: 1e4 * loss_fn(*args), steps=2)
        jmpscale.RunMonitor(max_consecutive_skips=20).raise_if_stuck(opt_state)


# --- several gradients or optimizers in a step ---


@program
def sharpness_aware_step():
    @jax.jit
    def step(params, opt_state):
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, X, Y)
        perturbed = optax.apply_updates(params, optax.tree.scale(0.05 / optax.tree.norm(grads), grads))
        grads = jmpscale.value_and_grad(loss_fn)(opt_state, perturbed, X, Y)[1]
        updates, opt_state = TX.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    repeat(step, PARAMS, TX.init(PARAMS), steps=2)


@program
def sum_of_micro_batches():
    @jax.jit
    def step(params, opt_state):
        def add(total, batch):
            return jax.tree.map(jnp.add, total, jmpscale.value_and_grad(loss_fn)(opt_state, params, *batch)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = lax.scan(add, zeros, (X.reshape(2, 4, 16), Y.reshape(2, 4, 16)))
        updates, opt_state = TX.update(optax.tree.scale(0.5, grads), opt_state, params, value=loss / 2)
        return optax.apply_updates(params, updates), opt_state

    repeat(step, PARAMS, TX.init(PARAMS))


@program
def mean_of_the_gradients_of_examples():
    tx = wrap(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state):
        of_examples = jax.vmap(jmpscale.value_and_grad(loss_fn), (None, None, 0, 0))
        _, grads = of_examples(opt_state, params, X[:, None], Y[:, None])
        updates, opt_state = tx.update(jax.tree.map(lambda x: x.mean(0), grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    repeat(step, PARAMS, tx.init(PARAMS))


@program
def two_optimizers_with_their_own_scalers():
    generator = jmpscale.autocast(lambda g, d: -jnp.mean(jnp.tanh(X @ g["w"]) @ d["w"]))
    critic = jmpscale.autocast(lambda d, g: jnp.mean(jnp.tanh(X @ g["w"]) @ d["w"]) - jnp.mean(Y @ d["w"]))

    @jax.jit
    def step(g, g_state, d, d_state):
        loss, grads = jmpscale.value_and_grad(critic)(d_state, d, g)
        updates, d_state = TX.update(grads, d_state, d, value=loss)
        d = optax.apply_updates(d, updates)
        loss, grads = jmpscale.value_and_grad(generator)(g_state, g, d)
        updates, g_state = TX.update(grads, g_state, g, value=loss)
        return optax.apply_updates(g, updates), g_state, d, d_state

    repeat(step, PARAMS, TX.init(PARAMS), PARAMS, TX.init(PARAMS))


def two_models_with_one_scaler(has_one_flag):
    @jax.jit
    def step(scaler, a, a_state, b, b_state):
        a_loss, a_grads = jmpscale.value_and_grad(loss_fn)(scaler, a, X, Y)
        b_loss, b_grads = jmpscale.value_and_grad(loss_fn)(scaler, b, X, Y)
        flags = jmpscale.all_finite(a_grads), jmpscale.all_finite(b_grads)
        flags = (jmpscale.all_finite((a_grads, b_grads)),) * 2 if has_one_flag else flags
        a, a_state = jmpscale.apply_if(flags[0], jmpscale.optax_step(ADAM, a_grads), a, a_state)
        b, b_state = jmpscale.apply_if(flags[1], jmpscale.optax_step(ADAM, b_grads), b, b_state)
        scaler = jmpscale.update(scaler, flags[0] & flags[1], loss=(a_loss, b_loss))
        return scaler, a, a_state, b, b_state

    repeat(step, jmpscale.dynamic(), PARAMS, ADAM.init(PARAMS), PARAMS, ADAM.init(PARAMS))


@program
def two_models_with_one_flag():
    two_models_with_one_scaler(has_one_flag=True)


@program
def two_models_with_two_flags():
    two_models_with_one_scaler(has_one_flag=False)


@program
def two_steps_in_a_compiled_function():
    step = make_step(TX)
    repeat(jax.jit(lambda *state: step(*step(*state, X[:4], Y[:4]), X[4:], Y[4:])), PARAMS, TX.init(PARAMS))


# --- compiled loops, and states that a compiled function creates ---


@program
def scan_of_steps():
    jax.jit(lambda *state: lax.scan(lambda c, _: (make_step(TX)(*c), None), state, None, 4))(PARAMS, TX.init(PARAMS))


@program
def whole_run_in_scan():
    jax.jit(lambda params: lax.scan(lambda c, _: (make_step(TX)(*c), None), (params, TX.init(params)), None, 4))(PARAMS)


@program
def whole_run_in_fori_loop():
    jax.jit(lambda params: lax.fori_loop(0, 3, lambda _, c: make_step(TX)(*c), (params, TX.init(params))))(PARAMS)


@program
def whole_run_in_while_loop():
    def body(carry):
        return carry[0] + 1, *make_step(TX)(*carry[1:])

    jax.jit(lambda params: lax.while_loop(lambda c: c[0] < 3, body, (0, params, TX.init(params))))(PARAMS)


@program
def init_in_the_compiled_step():
    @jax.jit
    def first_step(key):
        params = {"w": jax.random.normal(key, (16, 16)), "b": jnp.zeros(16)}
        return make_step(TX)(params, TX.init(params))

    repeat(jax.jit(make_step(TX)), *first_step(jax.random.key(0)))


@program
def compiled_init():
    jax.jit(lambda key: TX.init({"w": jax.random.normal(key, (16, 16))}))(jax.random.key(0))
    jax.eval_shape(TX.init, PARAMS)


@program
def compiled_ahead_of_time():
    state = PARAMS, TX.init(PARAMS)
    jax.jit(make_step(TX)).lower(*state).compile()(*state)


@program
def donated_state():
    step = jax.jit(make_step(TX), donate_argnums=(0, 1))
    repeat(step, jax.tree.map(jnp.copy, PARAMS), TX.init(PARAMS))


@program
def restored_state():
    params, opt_state = train(TX)
    repeat(jax.jit(make_step(TX)), params, pickle.loads(pickle.dumps(jax.device_get(opt_state))))


@program
def ensemble():
    params = jax.tree.map(lambda x: jnp.stack([x] * 3), PARAMS)
    repeat(jax.jit(jax.vmap(make_step(TX))), params, jax.vmap(TX.init)(params))


# --- several devices ---


def step_of_device(tx, loss_fn, reduce):
    def step(params, opt_state, x, y):
        loss, grads = reduce(jmpscale.value_and_grad(loss_fn)(opt_state, params, x, y))
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return step


def mean(tree):
    return lax.pmean(tree, "d")


def train_on_devices(step, state, specs, **options):
    mapped = jax.shard_map(
        step, mesh=meshes.make_mesh(d=8), in_specs=(*specs, P("d"), P("d")), out_specs=specs, **options
    )
    repeat(lambda *state: jax.jit(mapped)(*state, X, Y), *state, steps=2)


@program
def shard_map():
    tx = wrap(max_norm=1.0)
    step = step_of_device(tx, lambda *args: mean(loss_fn(*args)), lambda tree: tree)
    train_on_devices(step, (PARAMS, tx.init(PARAMS)), (P(), P()))


@program
def shard_map_without_types():
    tx = wrap(max_norm=1.0, axis_name=())
    train_on_devices(step_of_device(tx, loss_fn, mean), (PARAMS, tx.init(PARAMS)), (P(), P()), check_vma=False)


@program
def shard_map_of_sharded_parameters():
    tx = wrap(max_norm=1.0)

    def gathered_loss_fn(w, x, y):
        return mean(loss_fn({"w": lax.all_gather(w, "d", axis=0, tiled=True), "b": PARAMS["b"]}, x, y))

    opt_state = tx.init(PARAMS["w"])
    specs = jax.tree.map(lambda x: P("d") if x.ndim else P(), opt_state)
    step = step_of_device(tx, gathered_loss_fn, lambda tree: tree)
    train_on_devices(step, (PARAMS["w"], opt_state), (P("d"), specs))


@program
def pmap():
    meshes.require_devices(8)
    tx = wrap(axis_name="d")
    step = step_of_device(tx, loss_fn, mean)
    mapped = jax.pmap(step, axis_name="d", in_axes=(None, None, 0, 0), out_axes=None)
    repeat(lambda *state: mapped(*state, X[:, None], Y[:, None]), PARAMS, tx.init(PARAMS), steps=2)


@program
def sharded_batch():
    mesh, tx = meshes.make_mesh(d=8), wrap(max_norm=1.0)
    batch = jax.device_put((X, Y), NamedSharding(mesh, P("d")))
    state = jax.device_put((PARAMS, tx.init(PARAMS)), NamedSharding(mesh, P()))
    repeat(lambda *state: jax.jit(make_step(tx))(*state, *batch), *state)
    jax.jit(tx.init, out_shardings=NamedSharding(mesh, P()))(PARAMS)


# --- frameworks ---


@program
def flax_linen():
    model = nn.Dense(16)
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), X), tx=TX)

    @jax.jit
    def step(state):
        loss_fn = jmpscale.autocast(lambda params: jnp.mean((state.apply_fn(params, X) - Y) ** 2))
        grads = jmpscale.value_and_grad(loss_fn)(state.opt_state, state.params)[1]
        return (state.apply_gradients(grads=grads),)

    repeat(step, state)


class NormalizedLinear(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


@program
def flax_nnx():
    model = NormalizedLinear(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    loss_fn = jmpscale.autocast(lambda model: jnp.mean((model(X) - Y) ** 2))

    @nnx.jit
    def step(model, optimizer):
        old = nnx.clone(nnx.state(model, nnx.BatchStat))
        loss, grads = jmpscale.value_and_grad(loss_fn, transform=nnx.value_and_grad)(optimizer.opt_state, model)
        optimizer.update(model, grads, value=loss)
        applied = jmpscale.get_scaler(optimizer.opt_state).step_applied
        nnx.update(model, jmpscale.apply_if(applied, lambda _: nnx.state(model, nnx.BatchStat), old))

    for _ in range(3):
        step(model, optimizer)


@program
def equinox():
    model = eqx.nn.MLP(16, 16, 16, 2, key=jax.random.key(0))
    loss_fn = jmpscale.autocast(lambda model: jnp.mean((jax.vmap(model)(X) - Y) ** 2))

    @eqx.filter_jit
    def step(model, opt_state):
        grad_fn = jmpscale.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)
        loss, grads = grad_fn(opt_state, model)
        updates, opt_state = TX.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array), value=loss)
        return eqx.apply_updates(model, updates), opt_state

    repeat(step, model, TX.init(eqx.filter(model, eqx.is_inexact_array)))


@pytest.mark.parametrize("run", rows(PROGRAMS, default=DEFAULT))
def test_right_program_gives_no_warning(run):
    run()
