"""Keras 3 on JAX trains in float16: `fit` with Keras's own loss scaling, a loop of one's own with jmpscale's.

Run: python -m pytest --confcutdir=tests/frameworks -W default tests/frameworks/test_keras.py
"""

import functools
import os
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale.testing import assert_step_is_noop, inject_backward

assert keras.backend.backend() == "jax", "another module has imported Keras before: run this file by itself"

VOCABULARY, LENGTH, BATCH, STEPS = 32, 12, 16, 60
WEIGHT = 2.0**-16  # of the loss: without loss scaling most gradients are below the smallest float16
EPSILON = 1e-8 * WEIGHT  # with the usual one Adam would train nothing in float32 either
OVERFLOW = 12  # the step, counted from 0, that overflows where a test asks for it


def token_batches():
    """Returns batches in which each token is the one before it plus 3: i32[STEPS, BATCH, LENGTH]."""
    starts = np.random.default_rng(0).integers(VOCABULARY, size=(STEPS, BATCH, 1))
    return np.int32((starts + 3 * np.arange(LENGTH)) % VOCABULARY)


def language_model(policy):
    """Returns a model that predicts each token from the one before it."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    tokens = keras.Input((LENGTH - 1,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 32)(tokens)
    x = keras.layers.add([x, keras.layers.Dense(32)(keras.layers.Dense(128, activation="gelu")(x))])
    logits = keras.layers.Activation("linear", dtype="float32")(keras.layers.Dense(VOCABULARY)(x))
    model = keras.Model(tokens, logits)
    keras.config.set_dtype_policy("float32")
    return model


def next_token_loss(labels, logits):
    return WEIGHT * jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


class Recorder(keras.callbacks.Callback):
    """Keeps the losses of the single steps; `fit` logs their running mean."""

    def __init__(self):
        super().__init__()
        self.sums = [0.0]

    def on_train_batch_end(self, batch, logs):
        self.sums.append(logs["loss"] * (batch + 1))

    def losses(self):
        return np.diff(self.sums) / WEIGHT


@functools.cache
def fit(policy, auto_scale_loss):
    """Returns the losses of `fit`."""
    model, recorder = language_model(policy), Recorder()
    model.compile(
        keras.optimizers.Adam(3e-3, epsilon=EPSILON),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        loss_weights=WEIGHT,
        auto_scale_loss=auto_scale_loss,
    )
    tokens = token_batches().reshape(-1, LENGTH)
    model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=BATCH, shuffle=False, callbacks=[recorder], verbose=0)
    return recorder.losses()


def test_fit_in_float16_needs_nothing_but_the_loss_scaling_of_keras():
    float32, float16 = fit("float32", False), fit("mixed_float16", False)
    keras_scaled = fit("mixed_float16", True)
    assert float16[-1] > float32[-1] + 2
    assert abs(keras_scaled[-1] - float32[-1]) < 1e-3


class State(NamedTuple):
    """What a loop of one's own carries; `scaler` is empty where the optimizer state contains it."""

    trainable: list[jax.Array]
    opt_state: Any
    scaler: Any


def optax_loop(model, loss_fn, scaler):
    """Returns the initial state and the step of a loop with an optax optimizer."""
    tx = jmpscale.with_loss_scaling(optax.adam(3e-3, eps=EPSILON), scaler)

    def step(state, *batch):
        loss, grads = jmpscale.value_and_grad(loss_fn)(state.opt_state, state.trainable, *batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.trainable, value=loss)
        return State(optax.apply_updates(state.trainable, updates), opt_state, ()), loss

    trainable = [variable.value for variable in model.trainable_variables]
    return State(trainable, tx.init(trainable), ()), step


def keras_loop(model, loss_fn, scaler):
    """Returns the initial state and the step of a loop with a Keras optimizer."""
    optimizer = keras.optimizers.Adam(3e-3, epsilon=EPSILON)
    optimizer.build(model.trainable_variables)

    def step(state, *batch):
        loss, grads = jmpscale.value_and_grad(loss_fn)(state.scaler, state.trainable, *batch)
        finite = jmpscale.all_finite(grads)
        trainable, opt_state = jmpscale.apply_if(
            finite,
            lambda trainable, opt_state: optimizer.stateless_apply(opt_state, grads, trainable),
            state.trainable,
            state.opt_state,
        )
        return State(trainable, opt_state, jmpscale.update(state.scaler, finite, loss=loss)), loss

    trainable = [variable.value for variable in model.trainable_variables]
    return State(trainable, [variable.value for variable in optimizer.variables], scaler), step


LOOPS = {"optax": optax_loop, "keras": keras_loop}


@functools.cache
def train(loop, policy, loss_scaling, *, steps=STEPS, overflows=False):
    """Returns the final state and the losses of a loop of one's own."""
    model = language_model(policy)
    non_trainable = [variable.value for variable in model.non_trainable_variables]

    def loss_fn(trainable, tokens, overflow):
        logits, _ = model.stateless_call(trainable, non_trainable, tokens[:, :-1], training=True)
        return next_token_loss(tokens[:, 1:], inject_backward(logits, jnp.inf, path="", when=overflow))

    scaler = jmpscale.dynamic(2.0**24, growth_interval=8) if loss_scaling else jmpscale.disabled()
    state, step = LOOPS[loop](model, loss_fn, scaler)
    step, losses = jax.jit(step), []
    for i, tokens in enumerate(token_batches()[:steps]):
        state, loss = step(state, tokens, jnp.array(overflows and i == OVERFLOW))
        losses.append(float(loss) / WEIGHT)
    return state, np.array(losses)


@pytest.mark.parametrize("loop", LOOPS)
def test_own_loop_in_float16_trains_like_float32(loop):
    _, float32 = train(loop, "float32", False)
    _, float16 = train(loop, "mixed_float16", False)
    state, scaled = train(loop, "mixed_float16", True)
    assert float16[-1] > float32[-1] + 2
    assert abs(scaled[-1] - float32[-1]) < 1e-3
    assert jmpscale.get_scaler(state).loss_scale == 2.0 ** (24 + STEPS // 8)


@pytest.mark.parametrize("loop", LOOPS)
def test_overflow_in_own_loop_leaves_parameters_and_optimizer_state_unchanged(loop):
    before, _ = train(loop, "mixed_float16", True, steps=OVERFLOW, overflows=True)
    after, _ = train(loop, "mixed_float16", True, steps=OVERFLOW + 1, overflows=True)
    old, new = jmpscale.get_scaler(before), jmpscale.get_scaler(after)
    assert (new.skipped, new.loss_scale) == (1, old.loss_scale / 2)
    assert_step_is_noop(before, jmpscale.replace_scaler(after, old))
