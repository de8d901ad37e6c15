"""`value_and_grad` takes a loss function; the new function takes the scaler first, and differentiates a real scalar."""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmpscale

from calls import (
    ADAM,
    BIG,
    EQUINOX,
    GRADS,
    INTS,
    LOSS,
    NNX,
    SCALE_STATE,
    STATE,
    W32,
    Mistake,
    check_message,
    loss_of,
    traced,
    train_step,
    value_and_grad_of_vector,
    warnings_of,
)
from messages import NO_FUNCTION, SCALED_TWICE
from tables import rows

pytestmark = pytest.mark.guards


def _value_and_grad(*args, fun=loss_of, **options):
    return lambda: jmpscale.value_and_grad(fun, **options)(STATE, *args)


class _Model:
    @jmpscale.value_and_grad
    def loss(self, batch):
        return jnp.sum(batch)

    def method(self, w):
        return jnp.sum(w)


def _value_and_grad_at_constant(params):
    return jmpscale.value_and_grad(loss_of)(STATE, params)


_holomorphic = functools.partial(jax.value_and_grad, holomorphic=True)


WRONG_CALLS = {
    "scaler": Mistake(
        lambda: jmpscale.value_and_grad(STATE),
        (
            f"{NO_FUNCTION} ScalerState. The scaler is the first positional argument of the "
            "new function: value_and_grad(loss_fn)(scaler, params, batch)."
        ),
    ),
    "scaler second": Mistake(
        lambda: jmpscale.value_and_grad(loss_of, STATE), "but not its arguments. The scaler is the first"
    ),
    "no pair": Mistake(
        _value_and_grad(GRADS, has_aux=True), "pair (loss, aux) because has_aux is true, got float32[]."
    ),
    "triple": Mistake(
        _value_and_grad(LOSS, fun=lambda w: (w, w, w), has_aux=True),
        "a pair (loss, aux) ... got tuple of 3. Return both, or omit has_aux; collect several auxiliary values in",
    ),
    "jax.grad": Mistake(_value_and_grad(GRADS, transform=jax.grad), "must return ((value, aux), grads) ... flax.nnx"),
    "jax.grad of a pair": Mistake(_value_and_grad((W32, W32), transform=jax.grad), "transform must return ((value,"),
    "name of a library": Mistake(
        _value_and_grad(GRADS, transform="equinox"), "transform must be a function, got 'equinox'. Pass jax.value_and_"
    ),
    "number as a path": Mistake(
        _value_and_grad(GRADS, overwrite_with_gradient=[1]),
        "overwrite_with_gradient must be a path in the gradients, or several, got list of 1. Pass strings, such as",
    ),
    "path without leaves": Mistake(
        _value_and_grad(BIG, overwrite_with_gradient="['layer']"),
        "must name leaves of the gradients, got \"['layer']\". The paths are \"['layer_0']['bias']\", ... 193 others.",
        raises=ValueError,
    ),
    "path of a single leaf": Mistake(
        _value_and_grad(W32, overwrite_with_gradient="[1]"), "got '[1]'. The paths are ''.", raises=ValueError
    ),
    "holomorphic": Mistake(
        _value_and_grad(jnp.complex64(1), fun=lambda z: z**2, transform=_holomorphic),
        "fun must return a real ... got complex64[]. Reduce it with .sum() or .mean(), or use scale, jax.vjp and",
    ),
    "vector": Mistake(
        _value_and_grad(W32, fun=lambda w: w[:1], transform=value_and_grad_of_vector),
        "fun must return a real floating-point scalar as the loss, got float32[1]",
    ),
    "vector if disabled": Mistake(
        lambda: jmpscale.value_and_grad(jnp.tanh)(jmpscale.disabled(), W32), "as the loss, got float32[2]. Reduce it"
    ),
    "vector and aux": Mistake(_value_and_grad(W32, fun=lambda w: (w, 1), has_aux=True), "as the loss, got float32[2]."),
    "pair": Mistake(_value_and_grad(W32, fun=lambda w: (jnp.sum(w), w)), "of 2. Return the loss. ... has_aux=True."),
    "none": Mistake(_value_and_grad(W32, fun=lambda w: None), "as the loss, got None. Return the loss."),
    "value_and_grad": Mistake(
        lambda: jmpscale.value_and_grad(jmpscale.value_and_grad(loss_of)),
        f"{NO_FUNCTION} a result of value_and_grad. Pass the loss function itself",
    ),
    "jitted value_and_grad": Mistake(
        lambda: jmpscale.value_and_grad(jax.jit(jmpscale.value_and_grad(loss_of))),
        f"{NO_FUNCTION} a result of value_and_grad.",
    ),
    "equinox with nnx": Mistake(
        _value_and_grad(EQUINOX, transform=nnx.value_and_grad), "an Equinox Lambda ... equinox."
    ),
    "step": Mistake(
        lambda: traced(jmpscale.value_and_grad(train_step), STATE, GRADS, SCALE_STATE),
        "as the loss, got tuple of 3. Return the loss. Pass the loss function itself, not a training step",
    ),
    "nnx": Mistake(_value_and_grad(NNX), "arguments must ... a Flax NNX Dropout ... transform=flax.nnx.value_and_grad"),
    "nnx first": Mistake(_value_and_grad(NNX, LOSS, argnums=-2), "got a Flax NNX Dropout"),
    "equinox": Mistake(_value_and_grad(1.0, EQUINOX, argnums=(0, 1)), "argument 1 must ... tanh at .fn. Pass"),
    "absent argument": Mistake(
        _value_and_grad(GRADS, argnums=1), "without the scaler, got 1 in a call with 1 positional"
    ),
    "integers": Mistake(
        _value_and_grad(GRADS, {"n": INTS}, argnums=1), "argument 1 must ... got int32[2] at ['n']. argnums"
    ),
    "no scaler": Mistake(
        lambda: jmpscale.value_and_grad(loss_of)(GRADS, W32),
        "found 0 in a dict. The scaler is the first",
        raises=ValueError,
    ),
    "loss first": Mistake(
        lambda: jmpscale.value_and_grad(loss_of)(LOSS, STATE), "found 0 in an Array. The scaler is", raises=ValueError
    ),
    "keyword": Mistake(
        lambda: jmpscale.value_and_grad(loss_of)(scaler=STATE, tree=GRADS),
        "found 0 in a NoneType. The scaler",
        raises=ValueError,
    ),
    "method": Mistake(
        lambda: _Model().loss(STATE, W32), "found 0 in a _Model. ... Call value_and_grad(self.loss)(", raises=ValueError
    ),
    "constant": Mistake(
        lambda: traced(_value_and_grad_at_constant, GRADS),
        "the scaler is a constant of the compiled",
        raises=UserWarning,
    ),
    "scaled loss in autocast": Mistake(
        _value_and_grad(
            W32,
            fun=jmpscale.autocast(
                lambda w: jmpscale.scale(STATE, (w.sum() * jnp.ones((8, 8)) @ jnp.ones((8, 8))).sum())
            ),
        ),
        SCALED_TWICE,
        raises=UserWarning,
    ),
    "scaled loss": Mistake(
        lambda: traced(_value_and_grad(GRADS, fun=lambda tree: jmpscale.scale(STATE, loss_of(tree)))),
        f"{SCALED_TWICE}, because value_and_grad scales it. Remove scale from the loss.",
        raises=UserWarning,
    ),
    "scaled backward pass": Mistake(
        _value_and_grad(W32, fun=jmpscale.scaled_backward(loss_of, 8.0)),
        "twice ... Remove scaled_backward",
        raises=UserWarning,
    ),
}


@pytest.mark.parametrize("mistake", rows(WRONG_CALLS))
def test_value_and_grad_requires_a_loss_function_and_a_scaler(mistake):
    check_message(mistake)


# --- the state of an optimizer shows where the wrapper is ---

WRAPPED = jmpscale.with_loss_scaling(optax.adam(1e-3))
LABELS = {"w": "a", "b": "b"}
MASK = {"w": True, "b": False}
FROZEN = optax.masked(optax.set_to_zero(), {"w": False, "b": True})


def _take_gradients(tx):
    state = tx.init(GRADS)
    return lambda: traced(jmpscale.value_and_grad(loss_of), state, GRADS)


INSIDE = {
    "MultiSteps": Mistake(
        _take_gradients(optax.MultiSteps(WRAPPED, 2)),
        "inside optax.MultiSteps: ... MultiSteps(tx, k)",
        raises=UserWarning,
    ),
    "in a chain": Mistake(
        _take_gradients(optax.chain(optax.MultiSteps(WRAPPED, 2), optax.scale(1.0))),
        "inside optax.MultiSteps: ... turn its gradient accumulation off.",
        raises=UserWarning,
    ),
    "masked": Mistake(
        _take_gradients(optax.masked(WRAPPED, MASK)),
        "optax.masked or optax.partition: ... masked(tx, mask",
        raises=UserWarning,
    ),
    "partition": Mistake(
        _take_gradients(optax.partition({"a": WRAPPED, "b": optax.adam(1e-3)}, LABELS)),
        "neither checks nor skips the updates of the other parameters.",
        raises=UserWarning,
    ),
    "apply_if_finite": Mistake(
        _take_gradients(optax.apply_if_finite(WRAPPED, 5)),
        "inside optax.apply_if_finite, whose skips do not adjust the scale. Remove apply_if_finite",
        raises=UserWarning,
    ),
}
IDENTITY = jmpscale.with_loss_scaling(optax.identity())
BESIDE = {
    "Adam": optax.chain(IDENTITY, optax.adam(1e-3)),
    "Adam before it": optax.chain(optax.adam(1e-3), IDENTITY),
    "momentum": optax.chain(optax.clip_by_global_norm(1.0), IDENTITY, optax.sgd(1e-3, momentum=0.9)),
    "squares": optax.chain(IDENTITY, optax.rmsprop(1e-3)),
    "clip inside": optax.chain(jmpscale.with_loss_scaling(optax.clip(1.0)), optax.lion(1e-3)),
    "named chain": optax.named_chain(("scaling", IDENTITY), ("adam", optax.adam(1e-3))),
    "hyperparameters": optax.chain(IDENTITY, optax.inject_hyperparams(optax.adam)(1e-3)),
    "MultiSteps inside": optax.chain(jmpscale.with_loss_scaling(optax.scale(1.0)), optax.MultiSteps(ADAM, 2)),
}
OUTSIDE = {
    "MultiSteps and masked": jmpscale.with_loss_scaling(optax.MultiSteps(optax.masked(optax.adam(1e-3), MASK), 2)),
    "apply_if_finite": jmpscale.with_loss_scaling(optax.apply_if_finite(optax.adam(1e-3), 5)),
    "partition": jmpscale.with_loss_scaling(optax.partition({"a": optax.sgd(1e-3), "b": optax.adam(1e-3)}, LABELS)),
    "partition with frozen parameters": optax.partition({"a": WRAPPED, "b": optax.set_to_zero()}, LABELS),
    "masked with frozen parameters": optax.chain(optax.masked(WRAPPED, MASK), FROZEN),
    "masked beside it": optax.chain(WRAPPED, optax.masked(optax.scale(0.5), MASK)),
    "identity": IDENTITY,
    "chain inside": jmpscale.with_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))),
    "clip by norm before it": optax.chain(optax.clip_by_global_norm(1.0), WRAPPED),
    "negation after it": optax.chain(jmpscale.with_loss_scaling(optax.scale_by_adam()), optax.scale(-1e-3)),
    "schedule after it": optax.chain(
        jmpscale.with_loss_scaling(optax.scale_by_adam()), optax.scale_by_schedule(lambda count: -1e-3)
    ),
    "learning rate after it": optax.chain(
        jmpscale.with_loss_scaling(optax.scale_by_adam()), optax.scale_by_learning_rate(1e-3)
    ),
    "disabled": optax.chain(jmpscale.with_loss_scaling(optax.identity(), jmpscale.disabled()), optax.adam(1e-3)),
}


def _state_of_two_optimizers(wrapped, other, params):
    return wrapped.init(GRADS), other.init(params)


TWO_OPTIMIZERS = {  # states of a wrapped optimizer and of another one for other parameters, which look like a chain
    "two networks": _state_of_two_optimizers(IDENTITY, optax.adam(1e-3), {"w": jnp.ones((3, 2))}),
    "two equal networks": _state_of_two_optimizers(WRAPPED, optax.adam(1e-3), GRADS),
    "average of the parameters": _state_of_two_optimizers(IDENTITY, optax.ema(0.9), GRADS),
    "parameters": (GRADS, IDENTITY.init(GRADS)),
    "train state": {"params": GRADS, "opt_state": IDENTITY.init(GRADS), "step": 0},
}


@pytest.mark.parametrize("mistake", rows(INSIDE))
def test_value_and_grad_warns_if_the_wrapper_is_inside_another_transformation(mistake):
    check_message(mistake)


@pytest.mark.parametrize("tx", rows(BESIDE))
def test_value_and_grad_warns_if_an_optimizer_is_beside_the_wrapper(tx):
    mistake = Mistake(
        _take_gradients(tx),
        "an optimizer is beside with_loss_scaling in optax.chain, ... Place it inside: with_loss_scaling(optax.chain(",
        raises=UserWarning,
    )
    check_message(mistake)


@pytest.mark.parametrize("state", rows(TWO_OPTIMIZERS))
def test_value_and_grad_does_not_take_other_states_for_a_chain(state):
    assert warnings_of(lambda: traced(jmpscale.value_and_grad(loss_of), state, GRADS)) == []


@pytest.mark.parametrize("name", OUTSIDE)
def test_value_and_grad_does_not_warn_if_the_wrapper_skips_all_updates(name):
    assert warnings_of(_take_gradients(OUTSIDE[name])) == []


def test_value_and_grad_has_no_private_parameters():
    assert list(inspect.signature(jmpscale.value_and_grad).parameters) == [
        "fun",
        "argnums",
        "has_aux",
        "overwrite_with_gradient",
        "transform",
    ]
