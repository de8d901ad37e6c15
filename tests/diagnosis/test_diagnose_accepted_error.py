"""diagnose and diagnose_step take how large an error the user accepts, in place of the limits of a diagnosis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_diagnose_rounding import NETWORK, TIMES, near_minimum, regression, time_steps

import jmpscale

from diagnosis_programs import fault_line

pytestmark = pytest.mark.full

B = jnp.bfloat16


def line_of(fun, module=__name__):
    return f"{module}.py:{fault_line(fun)} ({fun.__name__})"


def offset(w):
    """Returns a loss that bfloat16 rounds to a multiple of 1/8; its gradient is right."""
    return (jnp.mean(w) + 16).astype(B).astype(jnp.float32) - 16  # fault


LOSSES = {  # the loss in float32, which is 1 in bfloat16; the largest error that is accepted; whether it is wrong
    "2% by default": (1.02, None, False),
    "2% refused": (1.02, 0.01, True),
    "2% accepted": (1.02, 0.03, False),
    "4% by default": (1.04, None, True),
    "4% accepted": (1.04, 0.05, False),
    "4% refused": (1.04, 0.03, True),
}


@pytest.mark.parametrize("name", LOSSES)
def test_error_of_the_loss_is_wrong_above_the_accepted_one(name):
    loss, accepted_error, is_wrong = LOSSES[name]
    diagnosis = jmpscale.diagnose(offset, accepted_error=accepted_error)(jnp.full(8, loss, jnp.float32))
    assert (diagnosis.loss, diagnosis.gradient_error) == (1.0, 0.0)
    assert diagnosis.lines == ((line_of(offset),) if is_wrong else ())
    assert diagnosis.summary.startswith("The loss differs from float32 by " if is_wrong else "The gradients differ ")


# The error of the gradients is 19%: between small and wrong by default.


def test_accepted_error_of_gradients_is_one_sentence():
    diagnosis = jmpscale.diagnose(time_steps, accepted_error=0.3)(NETWORK, TIMES)
    assert 0.1 < diagnosis.gradient_error < 0.3
    assert diagnosis.lines == ()
    assert (
        diagnosis.summary == f"The gradients differ from float32 by {diagnosis.gradient_error:.1%}, in params['first']."
    )


def test_refused_error_of_gradients_names_the_smallest_set_of_lines():
    diagnosis = jmpscale.diagnose(time_steps, accepted_error=0.1)(NETWORK, TIMES)
    line = line_of(time_steps, "test_diagnose_rounding")
    assert diagnosis.lines == (line,)
    assert " in params['first'], which has " in diagnosis.summary
    assert f"rounding, not range. The error begins at {line}. Compute {line} in float32: then " in diagnosis.summary


def test_error_near_a_minimum_of_the_loss_is_refused():
    """By default, no line is named there, because the error need not matter."""
    found = [jmpscale.diagnose(regression, accepted_error=x)(*near_minimum(0.002)) for x in (None, 0.05)]
    assert [x.kind for x in found[1].findings] == [jmpscale.FindingKind.ROUNDING]
    assert [bool(x.lines) for x in found] == [False, True]
    assert ["near a minimum of the loss" in x.summary for x in found] == [True, False]


def test_no_scale_fits_if_the_error_at_all_scales_is_refused():
    accepted, refused = (
        jmpscale.diagnose(time_steps, accepted_error=x)(jmpscale.static(1.0), NETWORK, TIMES) for x in (0.3, 0.1)
    )
    assert accepted.fitting_scales is not None
    assert refused.fitting_scales is None
    assert "and loss scales from " in refused.summary, "scales that fit after the edit"


@jax.jit
def train_half(w):
    """The change of 0.0055 is 0.0039 in bfloat16, whose numbers below 1 have this distance."""
    loss, grad = jax.value_and_grad(lambda w: jnp.sum(w.astype(jnp.float32)))(w)
    return w - B(0.0055) * grad, loss  # fault


@jax.jit
def train_float32(w):
    """The change of 0.4 is 0.5, because bfloat16 rounds to multiples of 1/4 above 32."""
    loss, grad = jax.value_and_grad(jnp.sum)(w)
    return w - ((32 + 0.4 * grad).astype(B).astype(jnp.float32) - 32), loss  # fault


STEPS = {  # the step, the dtype of its parameters, the largest error that is accepted, whether the change is wrong
    "half precision by default": (train_half, B, None, False),
    "half precision refused": (train_half, B, 0.2, True),
    "half precision accepted": (train_half, B, 0.4, False),
    "float32 by default": (train_float32, jnp.float32, None, True),
    "float32 refused": (train_float32, jnp.float32, 0.2, True),
    "float32 accepted": (train_float32, jnp.float32, 0.4, False),
}


@pytest.mark.parametrize("name", STEPS)
def test_error_of_a_change_is_wrong_above_the_accepted_one(name):
    step, dtype, accepted_error, is_wrong = STEPS[name]
    diagnosis = jmpscale.diagnose_step(step, accepted_error=accepted_error)(jnp.ones(8, dtype))
    [change] = diagnosis.changes
    assert 0.2 < change.error < 0.4
    assert diagnosis.lines == ((line_of(step),) if is_wrong else ())
    words = "Even with the right gradients, the change of w differs from float32 by "
    assert diagnosis.summary.startswith(words) == is_wrong


INVALID = {
    "zero": (0.0, ValueError, "accepted_error must be between 1e-06 and 0.99, got 0"),
    "all": (1.0, ValueError, "accepted_error must be between 1e-06 and 0.99, got 1"),
    "not a number": (np.nan, ValueError, "accepted_error must be between 1e-06 and 0.99, got nan"),
    "a text": ("5%", TypeError, "accepted_error must be a Python float, got '5%' of type str"),
    "an array": (jnp.ones(()), TypeError, r"accepted_error must be a Python float, got float32\[\]"),
}


@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("function", [jmpscale.diagnose, jmpscale.diagnose_step])
def test_invalid_accepted_error_raises_before_the_call(function, name):
    value, error, message = INVALID[name]
    with pytest.raises(error, match=message):
        function(offset, accepted_error=value)
