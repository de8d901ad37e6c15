"""`update` takes the scaler of the step, whether all gradients are finite, and the loss, once for each step."""

import jax.numpy as jnp
import pytest

import jmpscale

from calls import (
    FLAGS,
    GRADS,
    OPT_STATE,
    SCALE,
    SCALE_STATE,
    STATE,
    TRUE,
    W32,
    Mistake,
    after_gradients,
    check_message,
    loss_and_aux,
    loss_of,
    traced,
    warnings_of,
)
from messages import CONSTANT, NO_FLAG, UPDATED_TWICE
from tables import rows

pytestmark = pytest.mark.guards


WRONG_CALLS = {
    "number as flag": Mistake(lambda: jmpscale.update(STATE, 1), f"{NO_FLAG} 1. Pass the result"),
    "opposite order": Mistake(
        lambda: jmpscale.update(TRUE, STATE),
        "the arguments are update(scaler, finite), got them in the opposite order.",
    ),
    "state of the wrapper": Mistake(
        lambda: jmpscale.update(OPT_STATE, TRUE),
        "got the state of with_loss_scaling, whose scaler tx.update adjusts. Remove this call.",
    ),
    "int32 as flag": Mistake(lambda: jmpscale.update(STATE, jnp.int32(1)), f"{NO_FLAG} int32"),
    "flags": Mistake(
        lambda: jmpscale.update(STATE, FLAGS),
        "finite must be a scalar, got shape (2,). Combine with",
        raises=ValueError,
    ),
    "constant": Mistake(
        lambda: traced(lambda x: jmpscale.update(STATE, x), TRUE),
        "the scaler is a constant ... pass it to the compiled function as an argument, and return the new one.",
        raises=UserWarning,
    ),
    "created": Mistake(
        lambda: traced(lambda x: jmpscale.update(jmpscale.dynamic(), x), TRUE),
        f"the scaler {CONSTANT} ... the compiled function creates the scaler",
        raises=UserWarning,
    ),
    "update inside apply_if": Mistake(
        lambda: jmpscale.apply_if(True, lambda scaler: jmpscale.update(scaler, TRUE), STATE),
        "jmpscale.update is inside jmpscale.apply_if: ... every later step would be skipped. Call update after",
        raises=UserWarning,
    ),
    "flag of the loss": Mistake(
        lambda: jmpscale.update(STATE, jmpscale.all_finite(jmpscale.value_and_grad(loss_of)(STATE, GRADS)[0])),
        "finite must be about the gradients, got all_finite(loss). Pass all_finite(grads).",
        raises=UserWarning,
    ),
    "loss and array": Mistake(
        after_gradients(lambda state, _, finite: jmpscale.update(state, finite, loss=loss_and_aux(W32))),
        "got a pair",
        raises=UserWarning,
    ),
    "updated twice": Mistake(
        after_gradients(lambda state, _, finite: jmpscale.update(jmpscale.update(state, finite), finite)),
        f"{UPDATED_TWICE} in a step. Remove this call: with_loss_scaling updates its own scaler.",
        raises=UserWarning,
    ),
    "updated by the wrapper": Mistake(
        after_gradients(
            lambda state, grads, finite: jmpscale.update(
                SCALE.update(grads, state)[1].scaler, jmpscale.all_finite(grads)
            ),
            SCALE_STATE,
        ),
        UPDATED_TWICE,
        raises=UserWarning,
    ),
}


@pytest.mark.parametrize("mistake", rows(WRONG_CALLS))
def test_update_is_called_once_with_the_flag_of_the_gradients(mistake):
    check_message(mistake)


def test_update_does_not_repeat_the_warning_of_value_and_grad_about_a_constant():
    def step(params):
        loss, grads = jmpscale.value_and_grad(loss_of)(STATE, params)
        return jmpscale.update(STATE, jmpscale.all_finite((loss, grads)))

    (warning,) = warnings_of(lambda: traced(step, GRADS))
    assert f"the scaler {CONSTANT}" in str(warning.message)
