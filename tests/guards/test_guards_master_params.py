"""`with_master_params` takes an optimizer, and then its gradients, state, and the parameters as `tx.init` saw them."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmpscale

from calls import ADAM, GRADS, SGD, Mistake, check_message, loss_of, traced, warnings_of
from tables import rows

pytestmark = [pytest.mark.guards, pytest.mark.usefixtures("standard_promotion")]

TX = jmpscale.with_master_params(SGD)
HALF = jmpscale.cast(GRADS, jnp.float16)
STATE, HALF_STATE = TX.init(GRADS), TX.init(HALF)
SCALED = jmpscale.with_master_params(jmpscale.with_loss_scaling(SGD))


def _init(inner):
    return lambda: jmpscale.with_loss_scaling(inner).init(HALF)


def _gradients_as_params():
    _, grads = jmpscale.value_and_grad(loss_of)(jmpscale.dynamic(), GRADS)
    TX.update(grads, STATE, grads)


WRONG_CALLS = {
    "no optimizer": Mistake(
        lambda: jmpscale.with_master_params(1e-3), "inner must be an optax.GradientTransformation, got float. Pass an"
    ),
    "state of inner": Mistake(
        lambda: TX.update(GRADS, SGD.init(GRADS), GRADS), "state must be from the init of with_master_params, got tuple"
    ),
    "state of another wrapper": Mistake(
        lambda: TX.update(GRADS, jmpscale.with_loss_scaling(TX).init(GRADS), GRADS), "got WithLossScalingState. The arg"
    ),
    "no parameters": Mistake(
        lambda: TX.update(GRADS, STATE), "params must be the parameters, got None. Call tx.update"
    ),
    "gradients": Mistake(_gradients_as_params, "params must be the parameters, got gradients."),
    "parameters that are not arrays": Mistake(
        lambda: jmpscale.with_master_params(optax.adam(1e-3)).init([HALF["w"], jax.nn.relu]),
        "params must contain only arrays, got relu as params[1]. Omit other leaves, as eqx.filter(model, eqx.is_inexac",
    ),
    "converted after init": Mistake(
        lambda: TX.update(HALF, STATE, HALF),
        "params['b'] must have the dtype that it had in tx.init, where it got no float32 copy, got float16[2]. Call "
        "tx.init with the parameters in the dtypes in which they train.",
    ),
    "converted after init, traced": Mistake(
        lambda: traced(TX.update, HALF, STATE, HALF), "params['b'] must have the dtype that it had in tx.init"
    ),
    "float32 after init": Mistake(
        lambda: TX.update(HALF, HALF_STATE, GRADS),
        "params['b'] must be bfloat16 or float16, as it was in tx.init, got float32[2]. Apply updates by "
        "optax.apply_updates, which keeps the dtypes of parameters; if the parameters are float32 now, call tx.init.",
    ),
    "float16 state beside the copies": Mistake(
        _init(optax.chain(optax.trace(0.9), TX)),
        "inner has float16[2] in its state[0].trace['b'], beside the copies of with_master_params, but its gradients "
        "are float32. Place with_master_params outside: with_master_params(with_loss_scaling(inner)).",
    ),
    "float16 gradients of a scaled loss": Mistake(
        lambda: SCALED.update(HALF, SCALED.init(HALF), HALF),
        "the gradients must be float32, got float16[2] at updates['b']",
        UserWarning,
    ),
}


@pytest.mark.parametrize("mistake", rows(WRONG_CALLS))
def test_with_master_params_explains(mistake):
    check_message(mistake)


def _step(tx, params):
    def step(params, opt_state):
        loss, grads = jmpscale.value_and_grad(loss_of)(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return lambda: jax.jit(step)(params, tx.init(params))


def _without_scaler(params):
    return lambda: TX.update(params, TX.init(params), params)


BFLOAT16 = jmpscale.cast(GRADS, jnp.bfloat16)
RIGHT_CALLS = {
    "bfloat16": _without_scaler(BFLOAT16),
    "float16": _without_scaler(HALF),
    "float32": _without_scaler(GRADS),
    "outside of a dynamic scaler": _step(SCALED, BFLOAT16),
    "outside of a dynamic scaler, float16": _step(SCALED, HALF),
    "outside of a static scaler": _step(
        jmpscale.with_master_params(jmpscale.with_loss_scaling(SGD, jmpscale.static(1.0))), BFLOAT16
    ),
    "outside of a disabled scaler": _step(
        jmpscale.with_master_params(jmpscale.with_loss_scaling(SGD, jmpscale.disabled())), HALF
    ),
    "inside": _step(jmpscale.with_loss_scaling(jmpscale.with_master_params(ADAM)), HALF),
    "inside, bfloat16": _step(jmpscale.with_loss_scaling(jmpscale.with_master_params(ADAM)), BFLOAT16),
    "inside, disabled": _step(jmpscale.with_loss_scaling(jmpscale.with_master_params(ADAM), jmpscale.disabled()), HALF),
}


@pytest.mark.parametrize("call", rows(RIGHT_CALLS))
def test_with_master_params_gives_no_warning(call):
    assert not warnings_of(call)
