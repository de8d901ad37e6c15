"""Arguments and calls that the tests of messages share, and the test that they call."""

import re
import warnings
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jmpscale

import meshes

STATE = jmpscale.dynamic()
BATCH = jax.tree.map(lambda x: np.stack([x, x]), STATE)
LOSS = jnp.float32(1.0)
TRUE = jnp.array(True)
FLAGS = jnp.array([True, False])
INTS = np.zeros(2, np.int32)
W32, W16, W8 = jnp.ones(2), jnp.ones(2, jnp.float16), jnp.ones(2, jnp.float8_e4m3fn)
GRADS = {"w": jnp.ones(3), "b": jnp.ones(2)}
BIG = {f"layer_{i}": {"kernel": np.full((30, 30), 1 / 3, np.float32), "bias": np.zeros(9)} for i in range(100)}
ADAM, ADAM16, SGD = optax.adam(1e-3), optax.adam(1e-3, mu_dtype=jnp.float16), optax.sgd(1e-3)
TX = jmpscale.with_loss_scaling(ADAM)
OPT_STATE = TX.init(GRADS)
SCALE = jmpscale.with_loss_scaling(optax.scale(1.0))
SCALE_STATE = SCALE.init(GRADS)
NNX, EQUINOX = nnx.Dropout(0.5), eqx.nn.Lambda(jnp.tanh)
SMALLEST, LARGEST, COUNTER = 2.0**-126, 2.0**126, 2**31 - 1
REPORT = jmpscale.GradReport(np.array(True), np.ones(2, np.float32), *[INTS] * 5, paths=("b", "w"), sizes=(2, 3))


def same(*carry):
    return carry[0] if len(carry) == 1 else carry


def loss_of(tree, *_):
    """A loss of any model."""
    return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)))


def traced(fn, *args):
    return jax.eval_shape(fn, *args)


def per_device(fn, *args, check_vma=False):
    """Traces `fn` under `shard_map`, on an argument that differs between the devices, and on others that do not."""
    specs = (P("d"), *[P() for _ in args])
    mesh = meshes.make_mesh(d=8)
    traced(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P("d"), check_vma=check_vma), jnp.ones(8), *args)


def raises(error, words):
    """Expects an error or a warning whose message contains the words; " ... " in them stands for any text."""
    return pytest.raises(error, match=".*".join(map(re.escape, words.split(" ... "))))


def after_gradients(use, state=STATE):
    """Traces `use(state, grads, finite)` after a backward pass with this state."""

    def step(state):
        _, grads = jmpscale.value_and_grad(loss_of)(state, GRADS)
        return use(state, grads, jmpscale.all_finite(grads))

    return lambda: traced(step, state)


def loss_and_aux(aux):
    """Returns a loss and auxiliary data."""
    return jmpscale.value_and_grad(lambda w: (loss_of(w), aux), has_aux=True)(STATE, W32)[0]


def train_step(params, opt_state):
    loss, grads = jmpscale.value_and_grad(loss_of)(opt_state, params)
    updates, opt_state = SCALE.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss


def value_and_grad_of_vector(fun, has_aux):
    """A transformation that differentiates the sum of a vector."""

    def value_and_grad(*args):
        def total(*args):
            value, aux = fun(*args)
            return jnp.sum(value), (value, aux)

        (_, output), grads = jax.value_and_grad(total, has_aux=has_aux)(*args)
        return output, grads

    return value_and_grad


def apply_if_applied(scaler, finite, of_new_scaler):
    applied = scaler.step_applied
    new = jmpscale.update(scaler, finite)
    return jmpscale.apply_if(new.step_applied if of_new_scaler else applied, same, W32)


def gate_variables(copy=lambda state: state):
    state = nnx.State({"w": nnx.Param(W32)})
    jmpscale.apply_if(TRUE, lambda _: state, copy(state))


def float16(size):
    return jax.ShapeDtypeStruct((size,), jnp.float16)


def stuck(limit):
    return lambda state=STATE: jmpscale.RunMonitor(max_consecutive_skips=limit).raise_if_stuck(state)


def warnings_of(call):
    """Returns the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


class Mistake(NamedTuple):
    """A wrong call, and its message.

    Attributes:
      call: makes the call.
      message: words of the message; " ... " in them stands for any text.
      raises: the class of the error or warning.
    """

    call: Callable[[], object]
    message: str
    raises: type[Exception] = TypeError


def check_message(mistake):
    """Requires that a call raises its error, or gives its warning, and that the message is short."""
    with raises(mistake.raises, mistake.message) as caught:
        mistake.call()
    assert len(str(caught.value)) < 1000, "the message must not print the arrays of a model"
