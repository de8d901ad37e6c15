"""`scale` takes floating-point losses, `unscale` gradients that are not unscaled, and `all_finite` a tree of arrays."""

import jax
import jax.numpy as jnp
import pytest

import jmpscale

from calls import GRADS, STATE, W8, W16, W32, Mistake, check_message, loss_of, traced
from messages import HALF_LOSS, UNSCALED_TWICE
from tables import rows

pytestmark = pytest.mark.guards


def _grad(w, fun=loss_of, scale=8.0, **options):
    return lambda: jax.grad(jmpscale.scaled_backward(fun, scale, **options), **options)(w)


WRONG_CALLS = {
    "int loss": Mistake(lambda: jmpscale.scale(STATE, {"n": jnp.int32(3)}), "got int32[] at tree['n']. Pass only"),
    "complex loss": Mistake(lambda: jmpscale.scale(STATE, 1j), "floating-point losses, got 1j at tree. "),
    "function as gradients": Mistake(lambda: jmpscale.all_finite(jnp.sum), "tree must be a pytree ... got sum. Pass"),
    "string loss": Mistake(lambda: jmpscale.scale(STATE, "x"), "got 'x' at tree. "),
    "float16 loss": Mistake(
        lambda: traced(jmpscale.scale, STATE, W16), f"{HALF_LOSS} ... Return it in float32", raises=UserWarning
    ),
    "float8 loss": Mistake(lambda: traced(jmpscale.scale, STATE, W8), "the loss is float8_e4m3fn", raises=UserWarning),
    "unscaled twice": Mistake(
        lambda: traced(lambda grads: jmpscale.unscale(STATE, jmpscale.unscale(STATE, grads)), GRADS),
        f"{UNSCALED_TWICE}: value_and_grad and scaled_backward unscale them. Remove this call.",
        raises=UserWarning,
    ),
    "unscaled after scaled_backward": Mistake(
        lambda: traced(lambda w: jmpscale.unscale(STATE, _grad(w)()), W32),
        UNSCALED_TWICE,
        raises=UserWarning,
    ),
    "unscaled after value_and_grad": Mistake(
        lambda: jmpscale.unscale_and_check(STATE, jmpscale.value_and_grad(loss_of)(STATE, GRADS)[1]),
        UNSCALED_TWICE,
        raises=UserWarning,
    ),
    "unscaled loss": Mistake(
        lambda: jmpscale.unscale(STATE, jmpscale.value_and_grad(loss_of)(STATE, GRADS)[0]),
        UNSCALED_TWICE,
        raises=UserWarning,
    ),
}


@pytest.mark.parametrize("mistake", rows(WRONG_CALLS))
def test_scale_unscale_and_all_finite_require_their_arguments(mistake):
    check_message(mistake)
