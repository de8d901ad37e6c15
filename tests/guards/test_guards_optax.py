"""`with_loss_scaling` and `optax_step` take an optimizer, and then its gradients, state, parameters and loss."""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import jmpscale

from calls import (
    ADAM,
    ADAM16,
    GRADS,
    INTS,
    LARGEST,
    LOSS,
    OPT_STATE,
    SCALE,
    SCALE_STATE,
    SGD,
    SMALLEST,
    STATE,
    TRUE,
    TX,
    W16,
    W32,
    Mistake,
    after_gradients,
    check_message,
    loss_and_aux,
    loss_of,
    traced,
    train_step,
    warnings_of,
)
from messages import BETWEEN, CONSTANT, NO_AXIS, NO_FLOAT, NO_INTEGER, ONLY_IN
from tables import rows

pytestmark = pytest.mark.guards


def _inner(update, state=0):
    """Calls `update` of `with_loss_scaling` around an optimizer with a state, by default a count."""
    tx = jmpscale.with_loss_scaling(optax.GradientTransformation(lambda _: jnp.asarray(state), update))
    return lambda: tx.update(GRADS, tx.init(GRADS), GRADS)


def _wrap(*args, **options):
    return lambda: jmpscale.with_loss_scaling(*args, **options)


def _gradients_of_sum():
    return jmpscale.value_and_grad(loss_of)(STATE, GRADS)[1]


WRONG_CALLS = {
    "scaler": Mistake(_wrap(STATE), "got ScalerState. The optimizer comes first: with_loss_scaling(inner,"),
    "scaler first": Mistake(
        _wrap(STATE, ADAM), "got ScalerState. The optimizer comes first: with_loss_scaling(inner, scal"
    ),
    "framework": Mistake(
        _wrap(SimpleNamespace()), "got SimpleNamespace. Pass one, ... goes around with_loss_scaling, not"
    ),
    "function": Mistake(_wrap(optax.adam), "inner must be an optax.GradientTransformation, got function."),
    "init alone": Mistake(_wrap(SimpleNamespace(init=ADAM.init)), "inner must be ... got SimpleNamespace."),
    "update alone": Mistake(_wrap(SimpleNamespace(update=ADAM.update)), "inner must be ... got SimpleNamespace."),
    "gradients as parameters": Mistake(
        lambda: SCALE.update(GRADS, SCALE_STATE, _gradients_of_sum()),
        "params must be the parameters, got gradients. The arguments are (grads, state, params).",
    ),
    "parameters that are not arrays": Mistake(
        lambda: TX.init({"model": eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))}),
        "params must contain only arrays, got relu as params['model'].activation. Omit other leaves, as eqx.filter(mod",
    ),
    "wrapped in a chain": Mistake(
        lambda: _wrap(optax.chain(SGD, optax.chain(TX)), jmpscale.disabled())().init(GRADS),
        "inner must not contain with_loss_scaling, got ... Wrap the whole optimizer once.",
    ),
    "scaler in the gradients": Mistake(
        lambda: SCALE.update({"model": GRADS, "scaler": STATE}, SCALE_STATE),
        "the gradients contain a ScalerState, which the optimizer would change. Keep it out of params.",
    ),
    "max_norm": Mistake(_wrap(ADAM, max_norm="1"), f"max_norm {NO_FLOAT} '1'"),
    "warn_after_skips": Mistake(_wrap(ADAM, warn_after_skips=1.5), f"warn_after_skips {NO_INTEGER} 1.5"),
    "loss by another name": Mistake(
        lambda: TX.update(GRADS, OPT_STATE, GRADS, loss=LOSS),
        "tx.update(grads, state, params, value=loss), got loss=. Write value=.",
    ),
    "loss by position": Mistake(
        lambda: TX.update(GRADS, OPT_STATE, GRADS, LOSS), "value=loss), got another value by pos"
    ),
    "loss first": Mistake(
        lambda: TX.update(loss_and_aux(1)[0], OPT_STATE, GRADS), "got the loss in place of the gradients."
    ),
    "state first": Mistake(
        lambda: TX.update(OPT_STATE, GRADS), "the arguments are tx.update(grads, state, params), got the state first."
    ),
    "inner state": Mistake(lambda: TX.update(GRADS, ADAM.init(GRADS)), "got tuple. The ... ._replace(inner_state=...)"),
    "updates of inner": Mistake(
        _inner(lambda g, s, p: ({"w": g["w"]}, s)),
        f"updates['b'] {ONLY_IN} input. Gate optax_step(inner, grads) with apply_if.",
    ),
    "structure of inner": Mistake(
        _inner(lambda g, s, p: (g, (s, s))), "state is int32[] in its input and a tuple ... outside"
    ),
    "dtype of inner": Mistake(
        _inner(lambda g, s, p: (g, s > 0)), "state was int32[] and is bool[]. ... .astype in inner"
    ),
    "parameters of two dtypes": Mistake(  # as optax.contrib.prodigy and momo, which mix their dtypes in the state
        _inner(lambda g, s, p: (g, W32), jnp.ones(2, jnp.bfloat16)),
        "state was bfloat16[2] and is float32[2]. Keep all parameters in float32, or convert it with .astype in inner.",
    ),
    "state without a norm": Mistake(
        lambda: _wrap(ADAM, max_norm=1.0)().update(GRADS, OPT_STATE),
        "state.grad_norm must be an array because max_norm is set, got None. ... tx.init(params).grad_norm",
        raises=ValueError,
    ),
    "state with a norm": Mistake(
        lambda: _wrap(ADAM)().update(GRADS, _wrap(ADAM, max_norm=1.0)().init(GRADS)),
        "state.grad_norm must be None because max_norm is not set, got an array. ... tx.init(params).grad_norm",
        raises=ValueError,
    ),
    "axis of max_norm": Mistake(
        lambda: (tx := _wrap(ADAM, max_norm=1.0, norm_axis_name="x")()).update(GRADS, tx.init(GRADS)),
        f"axis_name 'x' {NO_AXIS} a mapped axis",
        raises=ValueError,
    ),
    "no skips": Mistake(_wrap(ADAM, warn_after_skips=0), f"warn_after_skips {BETWEEN} 1 ... got 0.", raises=ValueError),
    "small max_norm": Mistake(
        _wrap(ADAM, max_norm=SMALLEST / 2), "max_norm must ... got 2^-127. Omit it to clip", raises=ValueError
    ),
    "large max_norm": Mistake(_wrap(ADAM, max_norm=LARGEST * 1.5), f"max_norm {BETWEEN}", raises=ValueError),
    "inside apply_if": Mistake(
        lambda: jmpscale.apply_if(True, lambda state: SCALE.update(GRADS, state)[1], SCALE_STATE),
        (
            "with_loss_scaling is inside jmpscale.apply_if: a skipped step would not adjust its scale, ... call "
            "tx.update without apply_if."
        ),
        raises=UserWarning,
    ),
    "gradients as the loss": Mistake(
        lambda: SCALE.update(GRADS, SCALE_STATE, value=_gradients_of_sum()),
        "the loss must be the unscaled loss, got gradients. Pass value=loss.",
        raises=UserWarning,
    ),
    "another scaler": Mistake(
        after_gradients(lambda state, grads, _: [SCALE.update(grads, x) for x in (state, SCALE_STATE)], SCALE_STATE),
        "the gradients were unscaled by another scaler ... wrap one optax.partition.",
        raises=UserWarning,
    ),
    "loss and dict": Mistake(
        lambda: SCALE.update(GRADS, SCALE_STATE, value=loss_and_aux({"x": LOSS})),
        "loss ... got a pair",
        raises=UserWarning,
    ),
    "float16 gradients": Mistake(
        lambda: SCALE.update({"w": jnp.ones(2, jnp.float16)}, SCALE_STATE),
        "the gradients must be float32, got float16[2] at updates['w']: unscaled gradients underflow.",
        raises=UserWarning,
    ),
    "constant state": Mistake(
        lambda: traced(lambda grads: SCALE.update(grads, SCALE_STATE), GRADS),
        (
            f"the optimizer state {CONSTANT}, so every call starts from the same one: the "
            "compiled function creates the optimizer state, or closes over it. Create it outside, pass it to the "
            "compiled function as an argument, and return the new one. It is right only in the first step of a "
            "compiled function that is a whole training run: then ignore this, or take all steps in jax.lax.scan."
        ),
        raises=UserWarning,
    ),
    "constant state, traced parameters": Mistake(
        lambda: traced(lambda params: SCALE.update(params, SCALE_STATE, params), GRADS),
        f"the optimizer state {CONSTANT}",
        raises=UserWarning,
    ),
    "float16 parameters": Mistake(
        lambda: TX.init({"w": W16, "n": INTS}), "the parameters are float16, ... float32, and use", raises=UserWarning
    ),
    "float16 averages": Mistake(
        lambda: jmpscale.with_loss_scaling(ADAM16).init(GRADS),
        "averages of gradients in float16 ... Change mu_dtype or accumulator_dtype to bfloat16",
        raises=UserWarning,
    ),
    "decay that rounds to 1": Mistake(
        lambda: _wrap(optax.inject_hyperparams(optax.adam)(1e-3))().init({"w": W32.astype(jnp.bfloat16)}),
        "the hyperparameter b2 is 1 in bfloat16, so its average never changes ... hyperparam_dtype=jnp.float32",
        raises=UserWarning,
    ),
    "average that cannot shrink": Mistake(
        lambda: _wrap(optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(1e-3))().init(
            {"w": W32.astype(jnp.bfloat16)}
        ),
        "an average with the decay b2=0.999 is bfloat16, in which it never becomes smaller",
        raises=UserWarning,
    ),
    "float16 averages of optax_step": Mistake(
        lambda: jmpscale.apply_if(True, jmpscale.optax_step(ADAM16, W32), W32, ADAM16.init(W32)),
        "averages of gradients in float16",
        raises=UserWarning,
    ),
    "MultiSteps inside": Mistake(
        lambda: _wrap(optax.MultiSteps(SGD, 2), max_norm=1.0)().init(GRADS),
        "max_norm clips the gradients of each micro-batch",
        raises=UserWarning,
    ),
}


@pytest.mark.parametrize("mistake", rows(WRONG_CALLS))
def test_with_loss_scaling_requires_an_optimizer_and_its_arguments(mistake):
    check_message(mistake)


def _apply(fn, *carry):
    return lambda: jmpscale.apply_if(TRUE, fn, *carry)


WRONG_STEPS = {
    "swapped": Mistake(lambda: jmpscale.optax_step(LOSS, ADAM), "tx must ... got Array. Call optax_step(tx, grads),"),
    "update function": Mistake(
        lambda: jmpscale.optax_step(ADAM.update, 1), "tx must be ... got function. ... not its update"
    ),
    "wrapped": Mistake(
        lambda: jmpscale.optax_step(TX, 1)(1, [OPT_STATE]), "tx must not contain with_loss_scaling, got"
    ),
    "scaler in the gradients": Mistake(lambda: jmpscale.optax_step(ADAM, [STATE]), "contain a ScalerState"),
    "tuple": Mistake(
        _apply(jmpscale.optax_step(ADAM, GRADS), (GRADS, ADAM.init(GRADS))), "carry must be ... got 1. Call"
    ),
    "opposite order": Mistake(
        _apply(jmpscale.optax_step(ADAM, GRADS), ADAM.init(GRADS), GRADS),
        (
            "carry must be two values, the parameters and then the optimizer state, got them in the opposite order. "
            "Call apply_if(finite, optax_step(tx, grads), params, opt_state)."
        ),
    ),
    "float16": Mistake(
        _apply(jmpscale.optax_step(SGD, W16), W32, SGD.init(W32)), "got float16[2] at grads", raises=UserWarning
    ),
}


@pytest.mark.parametrize("mistake", rows(WRONG_STEPS))
def test_optax_step_requires_an_optimizer_and_its_arguments(mistake):
    check_message(mistake)


def test_wrapper_does_not_repeat_the_warning_of_value_and_grad_about_a_constant():
    (warning,) = warnings_of(lambda: traced(lambda params: train_step(params, SCALE_STATE), GRADS))
    assert f"the optimizer state {CONSTANT}" in str(warning.message)
