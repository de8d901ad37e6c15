"""Keras 3 on JAX trains in float16: `fit` with Keras's loss scaling, and a hand-written loop with jmpscale.

Run: python -m pytest --confcutdir=tests/frameworks -W default tests/frameworks/test_keras.py
"""

import functools
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import optax
import pytest

import jmpscale

from bits import assert_equal_bits
from common import BATCH, EPSILON, LENGTH, OVERFLOW, VOCABULARY, WEIGHT, adamw, next_token_losses, token_batches
from faults import overflow_backward

assert keras.backend.backend() == "jax", "another module has imported Keras before: run this file by itself"

STEPS = 60


def language_model(policy, layers_only=False):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32" if layers_only else policy)
    tokens = keras.Input((LENGTH - 1,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 32, dtype=policy)(tokens)
    hidden = keras.layers.Dense(128, activation="gelu", dtype=policy)(x)
    x = keras.layers.add([x, keras.layers.Dense(32, dtype=policy)(hidden)], dtype=policy)
    logits = keras.layers.Dense(VOCABULARY, dtype=policy)(x)
    model = keras.Model(tokens, keras.layers.Activation("linear", dtype="float32")(logits))
    keras.config.set_dtype_policy("float32")
    return model


def fit(policy, auto_scale_loss, layers_only=False, wrap=lambda optimizer: optimizer):
    """Returns the mean loss of the steps of `fit`."""
    model = language_model(policy, layers_only)
    model.compile(
        wrap(keras.optimizers.Adam(3e-3, epsilon=EPSILON)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        loss_weights=WEIGHT,
        auto_scale_loss=auto_scale_loss,
    )
    tokens = token_batches(STEPS).reshape(-1, LENGTH)
    history = model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=BATCH, shuffle=False, verbose=0)
    return history.history["loss"][-1] / WEIGHT


def test_fit_in_float16_needs_only_the_loss_scaling_of_keras():
    float32, float16, scaled = fit("float32", False), fit("mixed_float16", False), fit("mixed_float16", True)
    assert float16 > float32 + 0.5
    assert abs(scaled - float32) < 1e-3


def test_policy_on_layers_only_needs_a_loss_scale_optimizer():
    """`compile` scales the loss only if the policy of the model is "mixed_float16"."""
    unscaled = fit("mixed_float16", True, layers_only=True)
    scaled = fit("mixed_float16", True, layers_only=True, wrap=keras.optimizers.LossScaleOptimizer)
    assert unscaled > scaled + 0.5


# A hand-written loop. Each function returns the initial state and the step. The state contains the scaler.


def optax_loop(model, loss_fn, scaler):
    tx = jmpscale.with_loss_scaling(adamw(), scaler)

    def step(state, *batch):
        loss, grads = jmpscale.value_and_grad(loss_fn)(state, state[0], *batch)
        updates, opt_state = tx.update(grads, state[1], state[0], value=loss)
        return (optax.apply_updates(state[0], updates), opt_state), loss

    trainable = [variable.value for variable in model.trainable_variables]
    return (trainable, tx.init(trainable)), step


def keras_loop(model, loss_fn, scaler):
    optimizer = keras.optimizers.Adam(3e-3, epsilon=EPSILON)
    optimizer.build(model.trainable_variables)

    def step(state, *batch):
        loss, grads = jmpscale.value_and_grad(loss_fn)(state, state[0], *batch)
        finite = jmpscale.all_finite(grads)

        def apply(trainable, variables):
            return optimizer.stateless_apply(variables, grads, trainable)

        return (*jmpscale.apply_if(finite, apply, *state[:2]), jmpscale.update(state[2], finite, loss=loss)), loss

    trainable = [variable.value for variable in model.trainable_variables]
    return (trainable, [variable.value for variable in optimizer.variables], scaler), step


LOOPS = {"optax": optax_loop, "keras": keras_loop}


@functools.cache
def train(loop, policy, loss_scaling, *, steps=STEPS, overflows=False, wrap=lambda loss_fn: loss_fn):
    model = language_model(policy)
    non_trainable = [variable.value for variable in model.non_trainable_variables]

    def loss_fn(trainable, tokens, overflow):
        logits, _ = model.stateless_call(trainable, non_trainable, tokens[:, :-1], training=True)
        return WEIGHT * jnp.mean(next_token_losses(overflow_backward(logits, overflow), tokens))

    scaler = jmpscale.dynamic(2.0**24, growth_interval=8) if loss_scaling else jmpscale.disabled()
    state, step = LOOPS[loop](model, wrap(loss_fn), scaler)
    step = jax.jit(step)
    for i, tokens in enumerate(token_batches(STEPS)[:steps]):
        state, loss = step(state, tokens, jnp.array(overflows and i == OVERFLOW))
    return state, float(loss) / WEIGHT


@pytest.mark.parametrize("loop", LOOPS)
def test_hand_written_loop_in_float16_trains_like_float32(loop):
    _, float32 = train(loop, "float32", False)
    _, float16 = train(loop, "mixed_float16", False)
    state, scaled = train(loop, "mixed_float16", True)
    assert float16 > float32 + 2
    assert abs(scaled - float32) < 1e-3
    assert jmpscale.get_scaler(state).loss_scale == 2.0 ** (24 + STEPS // 8)


def test_autocast_trains_a_float32_model_like_float32():
    """Keras's policy stays float32, and the matmuls run in float16."""
    (_, float32), (_, float16), (_, scaled) = (
        train("optax", "float32", scaling, wrap=wrap)
        for scaling, wrap in ((False, lambda fun: fun), (False, jmpscale.autocast), (True, jmpscale.autocast))
    )
    assert float16 > float32 + 0.5
    assert abs(scaled - float32) < 1e-3


@pytest.mark.parametrize("loop", LOOPS)
def test_overflow_in_hand_written_loop_changes_only_the_scaler(loop):
    before, _ = train(loop, "mixed_float16", True, steps=OVERFLOW, overflows=True)
    after, _ = train(loop, "mixed_float16", True, steps=OVERFLOW + 1, overflows=True)
    old, new = jmpscale.get_scaler(before), jmpscale.get_scaler(after)
    assert (new.total_skips, new.loss_scale) == (1, old.loss_scale / 2)
    assert_equal_bits(before, jmpscale.replace_scaler(after, old))


@pytest.mark.parametrize(("policy", "is_right"), [("mixed_bfloat16", True), ("bfloat16", False)])
def test_diagnose_step_of_the_train_step_names_parameters_that_adam_does_not_change_in_bfloat16(policy, is_right):
    """In bfloat16 0.999 is 1, so the bias correction of Adam is 0."""
    model = language_model(policy)
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = token_batches(1)[0]
    model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=BATCH, verbose=0)
    kinds = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    state = model._get_jax_state(**dict.fromkeys(kinds, True))
    diagnosis = jmpscale.diagnose_step(model.train_step)(state, (tokens[:, :-1], tokens[:, 1:]))
    assert diagnosis.state == ("state",)
    assert (diagnosis.lines == ()) == is_right
    assert diagnosis.summary.startswith("The gradients differ" if is_right else "state[0][")
    assert ("do not change, in float32 either, because a constant at keras/" in diagnosis.summary) != is_right
