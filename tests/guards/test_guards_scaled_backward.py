"""`scaled_backward` takes a loss function and a scale, and supports reverse mode."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.jet import jet

import jmpscale

from calls import GRADS, LOSS, STATE, TX, W8, W16, W32, Mistake, check_message, loss_of, per_device, traced
from messages import HALF_LOSS, ONE_SCALER, SCALE_RANGE
from tables import rows

pytestmark = pytest.mark.guards


def _half_sum(w):
    return jnp.sum(w.astype(jnp.float16))


def _scaled_backward(scale, fun=loss_of, **options):
    return lambda: jmpscale.scaled_backward(fun, scale, **options)(GRADS)


def _grad(w, fun=loss_of, scale=8.0, **options):
    return lambda: jax.grad(jmpscale.scaled_backward(fun, scale, **options), **options)(w)


MULTI_STEPS = optax.MultiSteps(TX, 2)
WRONG_CALLS = {
    "loss": Mistake(
        lambda: jmpscale.scaled_backward(3.0, 8.0), "fun must ... got 3.0. Call scaled_backward(fun, scale)."
    ),
    "vector": Mistake(_scaled_backward(jnp.ones(3)), "scale must be a floating-point scalar, got float32[3]. Pass"),
    "int": Mistake(_scaled_backward(jnp.int32(3)), "scale must be a floating-point scalar, got int32[]"),
    "no pair": Mistake(
        _scaled_backward(8.0, has_aux=True), "a pair (loss, aux) because has_aux is true, got float32[]."
    ),
    "float16": Mistake(
        _grad({"h": W16}), "got args[0]['h'] of float16[2]: ... autocast ... framework ... value_and_grad"
    ),
    "float8": Mistake(
        lambda: jax.grad(lambda w: jmpscale.scaled_backward(loss_of, 8.0)(tree=w))(W8),
        "got kwargs['tree'] of float8_e4m3fn[2]",
    ),
    "closure": Mistake(
        lambda: jax.grad(lambda w: jmpscale.scaled_backward(lambda: loss_of(w), 8.0)())(W16),
        "got a value that fun closes over of float16[2]",
    ),
    "number": Mistake(_scaled_backward(-1), f"{SCALE_RANGE} -1.", raises=ValueError),
    "zero": Mistake(_scaled_backward(jnp.float32(0)), f"{SCALE_RANGE} 0", raises=ValueError),
    "nan": Mistake(_scaled_backward(np.float32("nan")), f"{SCALE_RANGE} nan.", raises=ValueError),
    "function": Mistake(_scaled_backward(lambda _: 0), f"{SCALE_RANGE} 0.", raises=ValueError),
    "string": Mistake(_scaled_backward("x"), f"{ONE_SCALER} 0 in a str", raises=ValueError),
    "varying": Mistake(
        lambda: per_device(lambda x, w: _grad(w, scale=x[0])(), W32, check_vma=True),
        "scale must be equal on all devices that share args[0] ... ['d']. ... jax.shard_map with in_specs=jax.P().",
        raises=ValueError,
    ),
    "float16 loss": Mistake(_grad(W32, _half_sum), HALF_LOSS, raises=UserWarning),
    "float16 output": Mistake(
        lambda: jax.grad(lambda w: loss_of(jmpscale.scaled_backward(lambda w: w.astype("f2"), 8.0)(w)))(W32),
        f"{HALF_LOSS}, so the backward pass starts from the loss scale in float16",
        raises=UserWarning,
    ),
    "wrapper in MultiSteps": Mistake(
        lambda: traced(jmpscale.scaled_backward(loss_of, MULTI_STEPS.init(W32)), W32),
        "with_loss_scaling is inside optax.MultiSteps",
        raises=UserWarning,
    ),
    "constant": Mistake(
        lambda: traced(_grad(W32, scale=STATE)),
        (
            "constant of the compiled program, so it does not adapt, unless each call compiles the program again, "
            "which takes long. Pass a function that reads it from the arguments of fun, such as `lambda model, *args, "
            "**kwargs: model.loss_scale`, or pass a number."
        ),
        raises=UserWarning,
    ),
    "function of a constant": Mistake(
        lambda: traced(_grad(W32, scale=lambda _: LOSS)), "constant of the compiled program", raises=UserWarning
    ),
}


@pytest.mark.parametrize("mistake", rows(WRONG_CALLS))
def test_scaled_backward_requires_a_loss_function_and_a_scale(mistake):
    check_message(mistake)


@pytest.mark.parametrize(
    "differentiate",
    [lambda f: jax.jvp(f, (W32,), (W32,)), lambda f: jet(f, (W32,), ((W32, W32),))],
    ids=["jvp", "jet"],
)
def test_scaled_backward_explains_its_error_in_forward_mode(differentiate):
    with pytest.raises((TypeError, AttributeError)) as caught:  # in JAX 0.12, jet raises an AttributeError
        differentiate(jmpscale.scaled_backward(loss_of, 8.0))
    assert "as in jax.jvp or jax.experimental.jet, differentiate fun itself." in "".join(caught.value.__notes__)
