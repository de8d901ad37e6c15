"""Annotated programs that type checkers must accept in strict mode. Nothing runs this file."""

# JAX and Flax annotate only parts of their functions, and optax has no stubs.
# pyright: strict, reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false

from typing import NamedTuple

import equinox
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jmpscale

Params = dict[str, jax.Array]
Batch = tuple[jax.Array, jax.Array]


class TrainState(NamedTuple):
    params: optax.Params
    opt_state: jmpscale.WithLossScalingState


@jmpscale.autocast
def loss_fn(params: Params, batch: Batch) -> jax.Array:
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2)


tx = jmpscale.with_loss_scaling(optax.adam(1e-3))
first_scale = float(tx.init({"w": jnp.ones(3)}).scaler.loss_scale)
chained: optax.GradientTransformation = optax.chain(tx, optax.ema(0.9))


@jax.jit
def wrapper_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
    loss, grads = jmpscale.value_and_grad(loss_fn)(state.opt_state, state.params, batch)
    updates, opt_state = tx.update(grads, state.opt_state, state.params, value=loss)
    return TrainState(optax.apply_updates(state.params, updates), opt_state), loss


@jax.jit
def functional_step(
    params: Params, opt_state: optax.OptState, scaler: jmpscale.ScalerState, batch: Batch
) -> tuple[Params, optax.OptState, jmpscale.ScalerState, jax.Array]:
    loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, batch)
    finite = jmpscale.all_finite(grads, scaler=scaler)
    step = jmpscale.optax_step(optax.adam(1e-3), grads)
    params, opt_state = jmpscale.apply_if(finite, step, params, opt_state)
    return params, opt_state, jmpscale.update(scaler, finite, loss=loss), loss


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def nnx_loss(model: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


@nnx.jit
def nnx_step(model: Net, optimizer: nnx.Optimizer[Net], x: jax.Array) -> jax.Array:
    value_and_grad = jmpscale.value_and_grad(nnx_loss, transform=nnx.value_and_grad)
    loss, grads = value_and_grad(optimizer.opt_state, model, x)
    optimizer.update(model, grads, value=loss)
    return loss


class Linear(equinox.Module):
    w: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w


def equinox_loss(model: Linear, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss = jnp.mean(model(x) ** 2)
    return loss, {"loss": loss}


@equinox.filter_jit
def equinox_step(
    model: Linear, opt_state: jmpscale.WithLossScalingState, x: jax.Array
) -> tuple[Linear, jmpscale.WithLossScalingState, dict[str, jax.Array]]:
    value_and_grad = jmpscale.value_and_grad(equinox_loss, has_aux=True, transform=equinox.filter_value_and_grad)
    (loss, logged), grads = value_and_grad(opt_state, model, x)
    updates, opt_state = tx.update(grads, opt_state, equinox.filter(model, equinox.is_array), value=loss)
    return equinox.apply_updates(model, updates), opt_state, logged | jmpscale.metrics(opt_state)
