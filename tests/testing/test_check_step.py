"""testing.check_step finds mistakes by running the step, without any warning, and accepts right steps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import jax_utils, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import check_step

import meshes
from arrays import normal

X, Y, Z = normal(0, 32, 8), normal(1, 32, 1), normal(2, 32, 4)
KEY_DATA = jax.random.key_data(jax.random.key(0))  # which programs without typed keys hold
PARAMS = {"a": normal(3, 8, 16, scale=1 / 3), "b": normal(4, 16, 1, scale=1 / 4)}
ADAM = optax.adam(1e-3)
WRAPPED = jmpscale.with_loss_scaling(ADAM)
SGD = jmpscale.with_loss_scaling(optax.scale(-1e-3))

pytestmark = pytest.mark.usefixtures("standard_promotion")


@jmpscale.autocast
def _loss(params):
    return 2.0**-6 * jnp.mean((jnp.tanh(X @ params["a"]) @ params["b"] - Y) ** 2)


GRADIENTS = jmpscale.value_and_grad(_loss)


def _rows(programs, default):
    return [pytest.param(name, marks=[] if name in default else pytest.mark.full) for name in programs]


# --- steps with an optimizer of optax ---


def _wrapper(tx, gradients=GRADIENTS):
    """Returns a step with an optimizer that contains the wrapper, and its state."""

    def step(state):
        params, opt_state = state
        loss, grads = gradients(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return step, (PARAMS, tx.init(PARAMS))


def _inside_multi_steps():
    step, state = _wrapper(optax.MultiSteps(WRAPPED, 2))
    return lambda state: step(step(state)), state


def _scaled_twice(opt_state, params):
    return jmpscale.value_and_grad(lambda params: jmpscale.scale(opt_state, _loss(params)))(opt_state, params)


def _by_another_scaler(opt_state, params):
    return jmpscale.value_and_grad(_loss)(jmpscale.dynamic(), params)


def _never_scaled(opt_state, params):
    return jax.value_and_grad(_loss)(params)


def _scaled_by_a_number(opt_state, params):
    """Takes gradients of a small loss, of which the number, which no scaler knows, is too small."""
    small = jmpscale.scaled_backward(lambda params: 2.0**-20 * _loss(params), 2.0**2)
    return jax.value_and_grad(small)(params)


def _update_after_wrapper():
    """Returns a step that also updates the scaler of the wrapper."""
    step, state = _wrapper(WRAPPED)

    def wrong(state):
        params, opt_state = step(state)
        scaler = opt_state.scaler
        return params, opt_state._replace(scaler=jmpscale.update(scaler, scaler.step_applied))

    return wrong, state


def _average_of_parameters(is_gated):
    """Returns a step with an average that is still a copy of the parameters after a step at a learning rate of zero."""
    step, state = _wrapper(jmpscale.with_loss_scaling(optax.sgd(optax.linear_schedule(0, 1e-3, 10))))

    def with_average(state):
        average, state = state
        params, opt_state = step(state)
        applied = jmpscale.get_scaler(opt_state).step_applied if is_gated else True
        new = jmpscale.apply_if(applied, partial(optax.incremental_update, params, step_size=0.5), average)
        return new, (params, opt_state)

    return with_average, (PARAMS, state)


def _sam_in_opaque_mode():
    """Returns a step whose optimizer takes a second gradient, which the wrapper does not check."""
    inner = optax.contrib.sam(ADAM, optax.chain(optax.contrib.normalize(), optax.sgd(0.1)), opaque_mode=True)
    tx = jmpscale.with_loss_scaling(inner)

    def step(state):
        params, opt_state = state
        loss, grads = GRADIENTS(opt_state, params)

        def grad_fn(params, _):
            return GRADIENTS(opt_state, params)[1]

        updates, new = tx.update(grads, opt_state, params, value=loss, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), new

    return step, (PARAMS, tx.init(PARAMS))


# --- steps with the functional API ---


def _functional(finish):
    """Returns a step whose end is a function of parameters, optimizer state, scaler, loss, gradients and the flag."""

    def step(state):
        params, opt_state, scaler = state
        loss, grads = jmpscale.value_and_grad(_loss)(scaler, params)
        return finish(params, opt_state, scaler, loss, grads, jmpscale.all_finite((loss, grads)))

    return step, (PARAMS, ADAM.init(PARAMS), jmpscale.dynamic())


def _apply(flag, grads, params, opt_state):
    return jmpscale.apply_if(flag, jmpscale.optax_step(ADAM, grads), params, opt_state)


def _sam():
    """Returns a step that takes both gradients of sharpness-aware minimization, and checks both."""

    def finish(params, opt_state, scaler, loss, first, _):
        factor = 0.1 / optax.tree.norm(first)
        _, grads = GRADIENTS(scaler, jax.tree.map(lambda w, g: w + factor * g, params, first))
        flag = jmpscale.all_finite((loss, first, grads))
        return *_apply(flag, grads, params, opt_state), jmpscale.update(scaler, flag, loss=loss)

    return _functional(finish)


def _right(params, opt_state, scaler, loss, grads, flag):
    return *_apply(flag, grads, params, opt_state), jmpscale.update(scaler, flag, loss=loss)


def _unscaled_twice(params, opt_state, scaler, loss, grads, flag):
    return _right(params, opt_state, scaler, loss, jmpscale.unscale(scaler, grads), flag)


def _updated_twice(params, opt_state, scaler, loss, grads, flag):
    *others, new = _right(params, opt_state, scaler, loss, grads, flag)
    return *others, jmpscale.update(new, flag, loss=loss)


def _update_inside_apply_if(params, opt_state, scaler, loss, grads, flag):
    def step(params, opt_state, scaler):
        return *jmpscale.optax_step(ADAM, grads)(params, opt_state), jmpscale.update(scaler, flag)

    return jmpscale.apply_if(flag, step, params, opt_state, scaler)


def _flag_of_an_earlier_step(params, opt_state, scaler, loss, grads, flag):
    return *_apply(scaler.step_applied, grads, params, opt_state), jmpscale.update(scaler, flag, loss=loss)


def _flag_of_the_loss(params, opt_state, scaler, loss, grads, flag):
    return _right(params, opt_state, scaler, loss, grads, jmpscale.all_finite(loss))


def _flag_of_one_leaf(name, params, opt_state, scaler, loss, grads, flag):
    return _right(params, opt_state, scaler, loss, grads, jmpscale.all_finite(grads[name]))


def _updates_only_if_not_finite(params, opt_state, scaler, loss, grads, flag):
    new = jax.lax.cond(flag, lambda: scaler, lambda: jmpscale.update(scaler, flag, loss=loss))
    return *_apply(flag, grads, params, opt_state), new


def _with_scaler(change, params, opt_state, scaler, loss, grads, flag):
    """Ends a step with fields of the new scaler changed by a function of the old scaler and the new one."""
    *others, new = _right(params, opt_state, scaler, loss, grads, flag)
    return *others, new._replace(**change(scaler, new))


def _smaller_scale(old, new):
    return {"loss_scale": jnp.minimum(old.loss_scale, new.loss_scale)}


def _limited_scale(old, new):
    return {"loss_scale": jnp.minimum(new.loss_scale, 2.0**16)}


def _averaged_scale(old, new):
    return {"loss_scale": jnp.where(new.loss_scale < old.loss_scale, 0.95 * old.loss_scale, new.loss_scale)}


def _flag_by(is_finite, params, opt_state, scaler, loss, grads, flag):
    """Ends a step whose flag is the conjunction of a function of each gradient."""
    return _right(params, opt_state, scaler, loss, grads, jnp.stack(list(map(is_finite, jax.tree.leaves(grads)))).all())


FLAGS = {  # functions of a gradient that miss a sign, NaN or elements
    "maximum": lambda g: jnp.isfinite(g.max()),
    "minimum": lambda g: jnp.isfinite(g.min()),
    "NaN": lambda g: ~jnp.isnan(g).any(),
    "infinity": lambda g: ~jnp.isinf(g).any(),
    "first element": lambda g: jnp.isfinite(g.ravel()[0]),
    "last element": lambda g: jnp.isfinite(g.ravel()[-1]),
    "all but the first row": lambda g: jnp.isfinite(g[1:]).all(),
}


def _with_part_of_many(count, is_checked=lambda i: True):
    """Returns a step with many parameters, kernels and biases in turn, whose flag is about some of them."""
    keys = jax.random.split(jax.random.key(1), count)
    params = [jax.random.normal(key, (8, 8) if i % 2 == 0 else (8,)) / 3 for i, key in enumerate(keys)]

    @jmpscale.autocast
    def loss_fn(params):
        x = X
        for w in params:
            x = jnp.tanh(x @ w if w.ndim > 1 else x + w[None])
        return jnp.mean(x**2)

    def step(state):
        params, scaler = state
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params)
        flag = jmpscale.all_finite([g for i, g in enumerate(grads) if is_checked(i)])
        params = jmpscale.apply_if(flag, lambda p: jax.tree.map(lambda p, g: p - 1e-3 * g, p, grads), params)
        return params, jmpscale.update(scaler, flag, loss=loss)

    return step, (params, jmpscale.dynamic())


def _in_bfloat16(inner):
    """Returns a step with parameters in bfloat16, and its state."""
    tx, params = jmpscale.with_loss_scaling(inner, jmpscale.static(1.0)), jmpscale.cast(PARAMS, jnp.bfloat16)
    return _wrapper(tx)[0], (params, tx.init(params))


def _average_in_bfloat16():
    """Returns a step with an average of the parameters in bfloat16, and its state after 20 steps."""
    step, (params, opt_state) = _wrapper(jmpscale.with_loss_scaling(optax.adam(3e-3), jmpscale.static(1.0)))

    @jax.jit
    def with_average(state):
        average, state = state
        params, opt_state = step(state)
        new = jax.tree.map(lambda a, p: (0.999 * a + 0.001 * p).astype(a.dtype), average, params)
        return jmpscale.select_tree(opt_state.scaler.step_applied, new, average), (params, opt_state)

    state = jmpscale.cast(params, jnp.bfloat16), (params, opt_state)
    for _ in range(20):
        state = with_average(state)
    return with_average, state


def _copy_of_masters(dtype, update_from=lambda master, copy: master):
    """Returns a step whose half-precision parameters are a copy of float32 ones, which the optimizer updates."""

    def loss_fn(params):
        return 2.0**-6 * jnp.mean((jnp.tanh(X.astype(dtype) @ params["a"]) @ params["b"]).astype(jnp.float32) ** 2)

    def step(state):
        copy, master, opt_state = state
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, copy)
        updates, opt_state = WRAPPED.update(jmpscale.cast(grads, jnp.float32), opt_state, master, value=loss)
        master = optax.apply_updates(update_from(master, copy), updates)
        return jmpscale.cast(master, dtype), master, opt_state

    return step, (jmpscale.cast(PARAMS, dtype), PARAMS, WRAPPED.init(PARAMS))


def _update_of_half_copy(dtype):
    """Returns a step that adds updates to a copy of the parameters in half precision."""
    step, state = _wrapper(jmpscale.with_loss_scaling(optax.sgd(1e-2), jmpscale.dynamic(2.0**12)))

    def wrong(state):
        params, (new, opt_state) = state[0], step(state)
        rounded = jmpscale.cast(jmpscale.cast(params, dtype), jnp.float32)
        new = jax.tree.map(lambda r, new, old: r + (new - old), rounded, new, params)
        return jmpscale.select_tree(opt_state.scaler.step_applied, new, params), opt_state

    return wrong, state


def _flag_of_scaled_gradients(scaler, *, unscales_first):
    """Returns a step that takes the flag of the scaled gradients, or of the unscaled ones."""

    def step(state):
        params, scaler = state
        loss, grads = jax.value_and_grad(lambda params: jmpscale.scale(scaler, _loss(params)))(params)
        unscaled = jmpscale.unscale(scaler, grads)
        flag = jmpscale.all_finite((loss, unscaled if unscales_first else grads))
        new = jax.tree.map(lambda p, g: p - 1e-2 * g, params, unscaled)
        return jmpscale.select_tree(flag, new, params), jmpscale.update(scaler, flag, loss=_loss(params))

    return step, (PARAMS, scaler)


def _dual_averaging():
    """Returns a step whose parameters are a function of the sum of all gradients."""

    def step(state):
        params, total, scaler = state
        loss, grads = GRADIENTS(scaler, params)
        flag = jmpscale.all_finite((loss, grads))
        total = jmpscale.select_tree(flag, jax.tree.map(jnp.add, total, grads), total)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, total)
        return params, total, jmpscale.update(scaler, flag, loss=loss)

    return step, (PARAMS, jax.tree.map(jnp.zeros_like, PARAMS), jmpscale.dynamic())


def _copy_for_evaluation(is_gated):
    """Returns a step that also returns a copy of the parameters, or of the parameters as they are without the gate."""

    def step(state):
        _, params, scaler = state
        loss, grads = GRADIENTS(scaler, params)
        flag = jmpscale.all_finite((loss, grads))
        raw = jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads)
        new = jmpscale.select_tree(flag, raw, params)
        return jax.tree.map(lambda p: 1.0 * p, new if is_gated else raw), new, jmpscale.update(scaler, flag, loss=loss)

    return step, (PARAMS, PARAMS, jmpscale.dynamic())


def _scale_of_another_leaf():
    """Returns a step whose loss is scaled by a number in the state that is not the scaler's."""

    def whole_step(state):
        params, opt_state = state["rest"]
        grads = jax.grad(lambda params: state["scale"] * _loss(params))(params)
        grads = jmpscale.unscale(jmpscale.static(1.0)._replace(loss_scale=state["scale"]), grads)
        updates, opt_state = WRAPPED.update(grads, opt_state, params, value=_loss(params))
        return {"scale": state["scale"], "rest": (optax.apply_updates(params, updates), opt_state)}

    return whole_step, {"scale": jnp.float32(2.0**10), "rest": (PARAMS, WRAPPED.init(PARAMS))}


def _loss_too_large():
    """Returns a step that fits at loss scales below the min_scale of its scaler."""
    return _wrapper(WRAPPED, jmpscale.value_and_grad(lambda params: 1e8 * _loss(params)))


# --- a step with two scalers ---

GENERATOR = {"g": normal(5, 4, 8, scale=1 / 2)}


def _gan(gradients=lambda grads: grads, scaler_of_generator=1, gate=True):
    """Returns a step of a generative adversarial network: two networks, each with an optimizer and an average."""

    @jmpscale.autocast
    def discriminator_loss(params, generator):
        real, fake = (jnp.tanh(x @ params["a"]) @ params["b"] for x in (X, jnp.tanh(Z @ generator["g"])))
        return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))

    @jmpscale.autocast
    def generator_loss(generator, params):
        return jnp.mean(jax.nn.softplus(-jnp.tanh(jnp.tanh(Z @ generator["g"]) @ params["a"]) @ params["b"]))

    def step(state):
        params, generator, opt_states, average = state
        loss, grads = jmpscale.value_and_grad(discriminator_loss)(opt_states[0], params, generator)
        updates, first = WRAPPED.update(gradients(grads), opt_states[0], params, value=loss)
        params = optax.apply_updates(params, updates)
        scalers = first, opt_states[1]
        loss, grads = jmpscale.value_and_grad(generator_loss)(scalers[scaler_of_generator], generator, params)
        updates, second = WRAPPED.update(grads, opt_states[1], generator, value=loss)
        generator = optax.apply_updates(generator, updates)
        flag = second.scaler.step_applied if gate else True
        average = jmpscale.apply_if(flag, lambda x: optax.incremental_update(generator, x, 0.1), average)
        return params, generator, (first, second), average

    opt_states = WRAPPED.init(PARAMS), WRAPPED.init(GENERATOR)
    return step, (PARAMS, GENERATOR, opt_states, GENERATOR)


HIDDEN = "Something replaces infinity and NaN before the check"
PART = "was not skipped when a part of the unscaled gradients was infinite"
UNSCALED = "at an infinite loss scale: the loss was not scaled, or not by the scaler of the state"
RETURNED = "at an infinite loss scale: it returned the scaler"
NARROW = "parameters, unscaled gradients or averages of them are converted to"
DEPENDS = r"differs by .* at a loss scale of 2\^-8"
BESIDE = "If a transformation beside with_loss_scaling in optax.chain makes this change, place it inside"
TWICE = "one overflow counted as 2 skips: the scaler is updated more than once"
ONLY_A, ONLY_B = {"a": True, "b": False}, {"a": False, "b": True}
MISTAKES: dict[str, tuple[Any, str]] = {  # functions that return a step and its state, and the words of the message
    "after clip": (lambda: _wrapper(optax.chain(optax.clip(1.0), WRAPPED)), PART),
    "after zero_nans": (lambda: _wrapper(optax.chain(optax.zero_nans(), WRAPPED)), HIDDEN),
    "after momentum": (lambda: _wrapper(optax.chain(optax.trace(0.9), SGD)), r"changed state\[1\]\[0\]\.trace"),
    "after sign": (lambda: _wrapper(optax.chain(optax.scale_by_sign(), SGD)), PART),
    "before weight decay": (
        lambda: _wrapper(optax.chain(WRAPPED, optax.add_decayed_weights(-1e-4))),
        rf"the skipped step changed state\[0\].*{BESIDE}",
    ),
    "before noise": (
        lambda: _wrapper(optax.chain(WRAPPED, optax.add_noise(0.1, 0.5, key=0))),
        rf"the skipped step changed state\[0\].*{BESIDE}",
    ),
    "before Adam": (
        lambda: _wrapper(optax.chain(jmpscale.with_loss_scaling(optax.identity()), ADAM)),
        rf"the skipped step changed state\[1\].*{BESIDE}",
    ),
    "before a schedule": (
        lambda: _wrapper(optax.chain(WRAPPED, optax.scale_by_schedule(lambda count: 1.0))),
        r"the skipped step changed state\[1\]\[1\]\.count: 0 before, 1 after",
    ),
    "before plateau": (
        lambda: _wrapper(optax.chain(WRAPPED, optax.contrib.reduce_on_plateau())),
        r"changed state\[1\]\[1\]\.best_value",
    ),
    "inside apply_if_finite": (lambda: _wrapper(optax.apply_if_finite(WRAPPED, 5)), RETURNED),
    "inside masked": (
        lambda: _wrapper(optax.chain(optax.masked(WRAPPED, ONLY_A), optax.masked(optax.scale(-1e-3), ONLY_B))),
        r"the skipped step changed state\[0\]\['b'\]",
    ),
    "inside partition": (
        lambda: _wrapper(optax.partition({"scaled": WRAPPED, "plain": ADAM}, {"a": "scaled", "b": "plain"})),
        r"the skipped step changed state\[0\]\['b'\]",
    ),
    "inside MultiSteps": (_inside_multi_steps, r"changed state\[1\]\.gradient_step"),
    "SAM in opaque mode": (_sam_in_opaque_mode, PART),
    "scaled twice": (lambda: _wrapper(WRAPPED, _scaled_twice), DEPENDS),
    "another scaler": (lambda: _wrapper(WRAPPED, _by_another_scaler), UNSCALED),
    "never scaled": (lambda: _wrapper(WRAPPED, _never_scaled), UNSCALED),
    "scaled by a number": (
        lambda: _wrapper(WRAPPED, _scaled_by_a_number),
        f"{UNSCALED}.*a loss scale that is a number: run a few steps",
    ),
    "update after the wrapper": (_update_after_wrapper, TWICE),
    "unscaled twice": (lambda: _functional(_unscaled_twice), DEPENDS),
    "updated twice": (lambda: _functional(_updated_twice), TWICE),
    "update inside apply_if": (lambda: _functional(_update_inside_apply_if), RETURNED),
    "flag of an earlier step": (lambda: _functional(_flag_of_an_earlier_step), "after a skipped step"),
    "flag of the loss": (lambda: _functional(_flag_of_the_loss), HIDDEN),
    "flag of the first leaf": (lambda: _functional(partial(_flag_of_one_leaf, "a")), rf"{PART}.*\['b'\]"),
    "flag of the last leaf": (lambda: _functional(partial(_flag_of_one_leaf, "b")), rf"{PART}.*\['a'\]"),
    "flag without one of 20 leaves": (lambda: _with_part_of_many(20, lambda i: i != 13), rf"{PART}.*\[0\]\[13\]"),
    "flag of the kernels among 34 leaves": (lambda: _with_part_of_many(34, lambda i: i % 2 == 0), PART),
    "flag without one of 34 leaves": (lambda: _with_part_of_many(34, lambda i: i != 20), rf"{PART}.*\[0\]\[20\]"),
    **{
        f"flag by {name}": (lambda flag=flag: _functional(partial(_flag_by, flag)), HIDDEN)
        for name, flag in FLAGS.items()
    },
    "update only if not finite": (
        lambda: _functional(_updates_only_if_not_finite),
        "finite_steps is still 0 after a finite step, so the scale never grows. Call update in every step",
    ),
    "finite steps that are reset": (
        lambda: _functional(partial(_with_scaler, lambda old, new: {"finite_steps": old.finite_steps})),
        "finite_steps is still 0 after a finite step",
    ),
    "scale that never grows": (
        lambda: _functional(partial(_with_scaler, _smaller_scale)),
        r"the scale does not grow from 2\^\d+ after growth_interval finite steps, .* use max_scale",
    ),
    "scale that backs off by another factor": (
        lambda: _functional(partial(_with_scaler, _averaged_scale)),
        r"1 step was skipped at a loss scale of 2\^\d+, and the scale became [\de.+]+, not 2\^\d+, as backoff_factor",
    ),
    "scale with a limit": (
        lambda: _functional(partial(_with_scaler, _limited_scale)),
        r"1 step was skipped at a loss scale of 2\^\d+, and the scale became 2\^16, not 2\^\d+, as backoff_factor",
    ),
    "parameters in bfloat16": (
        lambda: _in_bfloat16(optax.adam(3e-4)),
        r"state\[0\]\['[ab]'\] is bfloat16, and its change is below its rounding: \d+(\.\d+)?% of the change is lost",
    ),
    "average in bfloat16": (_average_in_bfloat16, r"state\[0\]\['[ab]'\] is bfloat16, and its change is below"),
    "decay that rounds to 1": (
        lambda: _in_bfloat16(optax.inject_hyperparams(optax.adam)(1e-2)),
        r"all gradients are finite: the optimizer divides by zero\..*hyperparams\['b2'\] is 1 in bfloat16",
    ),
    "scale of another leaf": (_scale_of_another_leaf, r"the loss is scaled by state\['scale'\], not by the scaler"),
    **{
        f"update of a copy in {dtype.__name__}": (
            partial(_update_of_half_copy, dtype),
            rf"the change of state\[0\]\['[ab]'\] differs from the change in float32 by .*{NARROW}",
        )
        for dtype in (jnp.float16, jnp.bfloat16)
    },
    "update of the copy of float32 parameters": (
        lambda: _copy_of_masters(jnp.float16, lambda master, copy: jmpscale.cast(copy, jnp.float32)),
        r"the skipped step changed state\[1\]\['a'\]",
    ),
    "flag of the scaled gradients at a scale below 1": (
        lambda: _flag_of_scaled_gradients(jmpscale.dynamic(2.0**10, min_scale=2.0**-10), unscales_first=False),
        f"{PART}.*If the flag is computed from the scaled gradients, call unscale first",
    ),
    "copy for evaluation that is not gated": (
        lambda: _copy_for_evaluation(is_gated=False),
        r"the skipped step changed state\[0\]\['a'\]",
    ),
    "average at a learning rate of zero": (
        lambda: _average_of_parameters(is_gated=False),
        r"the skipped step changed state\[0\]\['a'\]: ",
    ),
    "loss too large for the scaler": (
        _loss_too_large,
        r"skipped at every loss scale of the scaler, down to 2\^0, its min_scale, but not at 2\^-\d+",
    ),
    "two scalers: nan_to_num": (lambda: _gan(partial(jax.tree.map, jnp.nan_to_num)), HIDDEN),
    "two scalers: the other one": (lambda: _gan(scaler_of_generator=0), UNSCALED),
    "two scalers: average": (lambda: _gan(gate=False), r"the skipped step changed state\[3\]\['g'\]"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", _rows(MISTAKES, {"after sign", "updated twice", "flag by maximum", "scale that never grows"})
)
def test_check_step_finds_the_mistake_without_a_warning(name):
    create, words = MISTAKES[name]
    step, state = create()
    with pytest.raises(AssertionError, match=words):
        check_step(jax.jit(step))(state)


def _with_unused_gradient():
    """Returns a step that differentiates a value that it does not train."""

    def gradients(opt_state, params):
        more = params | {"frozen": jnp.ones(8)}

        def loss_fn(more):
            return _loss(more | {"a": more["a"] * more["frozen"][:, None]})

        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, more)
        return loss, {name: grads[name] for name in params}

    return _wrapper(WRAPPED, gradients)


def _loop(length):
    step, state = _wrapper(WRAPPED)
    return lambda state: jax.lax.scan(lambda state, _: (step(state), None), state, length=length)[0], state


def _in_shard_map():
    """Returns a step in which the types show that the gradients are equal on all devices."""
    mesh = meshes.make_mesh(d=8)

    def gradients(opt_state, params):
        @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("d"), P("d")), out_specs=P())
        def on_devices(opt_state, params, x, y):
            @jmpscale.autocast
            def loss_fn(params):
                return jax.lax.pmean(jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2) / 64, "d")

            return jmpscale.value_and_grad(loss_fn)(opt_state, params)

        return on_devices(opt_state, params, X, Y)

    return _wrapper(WRAPPED, gradients)


def _with_scaled_backward():
    def gradients(opt_state, params):
        return jax.value_and_grad(jmpscale.scaled_backward(_loss, opt_state))(params)

    return _wrapper(WRAPPED, gradients)


BY_A_FACTOR_OF_100 = jmpscale.dynamic(backoff_factor=0.01)
RIGHT = {
    "wrapper": lambda: _wrapper(WRAPPED),
    "functional": lambda: _functional(_right),
    "flag of the norm": lambda: _functional(partial(_flag_by, lambda g: jnp.isfinite(jnp.linalg.norm(g)))),
    "many leaves": lambda: _with_part_of_many(40),
    "average at a learning rate of zero": lambda: _average_of_parameters(is_gated=True),
    "gradient that is not used": _with_unused_gradient,
    "loop of steps": lambda: _loop(4),
    "scale that falls by a factor of 100": lambda: _wrapper(jmpscale.with_loss_scaling(ADAM, BY_A_FACTOR_OF_100)),
    "shard_map": _in_shard_map,
    "scaled_backward": _with_scaled_backward,
    "two scalers": _gan,
    "float16 copy of float32 parameters": lambda: _copy_of_masters(jnp.float16),
    "bfloat16 copy of float32 parameters": lambda: _copy_of_masters(jnp.bfloat16),
    "flag of the scaled gradients": lambda: _flag_of_scaled_gradients(jmpscale.dynamic(), unscales_first=False),
    "scale below 1": lambda: _flag_of_scaled_gradients(
        jmpscale.dynamic(2.0**10, min_scale=2.0**-10), unscales_first=True
    ),
    "dual averaging": _dual_averaging,
    "copy for evaluation": lambda: _copy_for_evaluation(is_gated=True),
    "SAM": _sam,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", _rows(RIGHT, {"functional", "float16 copy of float32 parameters"}))
def test_check_step_accepts_a_right_step_without_output(name, capsys):
    step, state = RIGHT[name]()
    check_step(jax.jit(step))(state)
    assert capsys.readouterr().out == ""


UNTRACEABLE = {  # what a step may do with a value where JAX cannot trace it, and the error that this raises there
    "if": (lambda x: 1 if x > 0 else 2, "a TracerBoolConversionError"),
    "index": (lambda x: [1, 2][0 * x.astype(jnp.int32)], "a TracerIntegerConversionError"),
    "mask": (lambda x: PARAMS["b"][PARAMS["b"] > x], "a NonConcreteBooleanIndexError"),
    "format": (lambda x: f"{x:.3f}", "a TypeError"),
}


@pytest.mark.parametrize("name", _rows(UNTRACEABLE, {"format"}))
def test_check_step_accepts_a_right_step_that_jax_cannot_trace(name):
    use, error = UNTRACEABLE[name]
    step, state = _wrapper(WRAPPED)
    compiled = jax.jit(step)

    def read(state):
        params, opt_state = compiled(state)
        use(params["b"][0, 0])
        return params, opt_state

    with pytest.warns(UserWarning, match=rf"which raises {error} at test_check_step\.py:\d+ \(.*float32\. Pass a step"):
        check_step(read)(state)


def test_check_step_raises_the_error_of_a_step():
    def step(state):
        raise LookupError("of the step")

    with pytest.raises(LookupError, match="of the step"):
        check_step(step)((PARAMS, WRAPPED.init(PARAMS)))


class _Model(nnx.Module):
    """A model that holds the loss scale of the optimizer's state, for a loop that takes only the model."""

    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(jnp.tanh(self.inner(x))))

    def scaled(self, x):
        return jmpscale.scaled_backward(jmpscale.autocast(type(self).__call__), self.loss_scale)(self, x)


@nnx.jit
def _nnx_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model.scaled(x) - y) ** 2) / 64)(model)
    optimizer.update(model, grads, value=loss)
    return loss


def _nnx_objects():
    model = _Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, WRAPPED, wrt=nnx.Param)
    model.loss_scale = optimizer.opt_state.scaler.loss_scale
    return model, optimizer


@pytest.mark.full
@pytest.mark.filterwarnings("error")
def test_check_step_takes_nnx_objects_with_a_common_variable(capsys):
    model, optimizer = _nnx_objects()
    weights = model.inner.kernel[...]
    check_step(_nnx_step, ignore=("model.dropout", "optimizer.step"))(model, optimizer, X, y=Y)
    assert capsys.readouterr().out == ""
    assert model.inner.kernel[...] is weights
    assert model.loss_scale is optimizer.opt_state.scaler.loss_scale


@pytest.mark.filterwarnings("ignore")
def test_check_step_names_a_variable_that_is_the_scale_of_an_older_state():
    model, optimizer = _nnx_objects()
    optimizer.opt_state = jmpscale.replace_scaler(optimizer.opt_state, jmpscale.dynamic(2.0**10))
    words = r"the loss is scaled by model\.loss_scale\.value, not by the scaler .* optimizer\.opt_state was assigned"
    with pytest.raises(AssertionError, match=words):
        check_step(_nnx_step)(model, optimizer, X, Y)


def _jax_step(returned, model, optimizer, x, y):
    """Changes copies of objects of Flax NNX, because `jax.jit` flattens them, and returns their state."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jmpscale.autocast
    def loss_fn(params):
        return 2.0**-6 * jnp.mean((nnx.merge(graphdef, params, rest)(x) - y) ** 2)

    loss, grads = jmpscale.value_and_grad(loss_fn)(optimizer.opt_state, params)
    optimizer.update(model, grads, value=loss)
    return returned(model, optimizer)


def _decayed(model, optimizer):
    nnx.update(model, jax.tree.map(lambda p: 0.99 * p, nnx.state(model, nnx.Param)))
    return nnx.state((model, optimizer))


@pytest.mark.full
@pytest.mark.parametrize("donated", [(), ("model", "optimizer")])
def test_check_step_compares_the_state_that_a_step_of_jax_jit_returns_of_nnx_objects(donated):
    def check(returned):
        model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(16, 1, rngs=nnx.Rngs(1)))
        optimizer = nnx.Optimizer(model, WRAPPED, wrt=nnx.Param)
        step = jax.jit(partial(_jax_step, returned), donate_argnames=donated)
        check_step(step, ignore="optimizer.step.value")(model, optimizer, X, Y)

    check(lambda model, optimizer: (nnx.state((model, optimizer)), 0.0))
    with pytest.raises(AssertionError, match=r"the skipped step changed model\.layers\[0\]\.kernel"):
        check(_decayed)
    with pytest.raises(ValueError, match=r"step must return optimizer, which contains the scaler"):
        check(lambda model, optimizer: nnx.state(model))


@pytest.mark.full
@pytest.mark.parametrize("is_right", [True, False])
def test_check_step_takes_the_copies_of_a_state_on_the_devices_of_pmap(is_right):
    meshes.require_devices(2)
    tx = jmpscale.with_loss_scaling(ADAM, axis_name="d")

    @partial(jax.pmap, axis_name="d", devices=jax.devices()[:2])
    def step(params, opt_state, x):
        loss_fn = jmpscale.autocast(lambda params: 2.0**-6 * jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2))
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params)
        if is_right:
            grads = jax.lax.pmean(grads, "d")
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    args = *jax_utils.replicate((PARAMS, tx.init(PARAMS)), jax.devices()[:2]), X.reshape(2, 16, 8)
    if is_right:
        check_step(step)(*args)
    else:
        with pytest.raises(AssertionError, match=r"(?s)params\['a'\] differs between devices"):
            check_step(step)(*args)


def test_check_step_names_what_may_be_state_and_was_taken_for_data(capsys):
    """A reconstruction looks like the new value of a batch."""
    tx = jmpscale.with_loss_scaling(optax.sgd(1e-2))

    @jax.jit
    def step(params, opt_state, batch):
        def reconstruct(params):
            return jnp.tanh(batch["x"] @ params["a"]) @ params["a"].T

        loss_fn = jmpscale.autocast(lambda params: 2.0**-6 * jnp.mean((reconstruct(params) - batch["x"]) ** 2))
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, {"x": reconstruct(params)}

    params = {"a": PARAMS["a"]}
    check_step(step)(params, tx.init(params), {"x": X})
    line = capsys.readouterr().out
    assert line.startswith("check_step: batch also came back changed from a skipped step, and was taken for data")
    assert line.endswith("pass ignore=('batch',).\n")
    check_step(step, ignore="batch")(params, tx.init(params), {"x": X})
    assert capsys.readouterr().out == ""


@pytest.mark.full
@pytest.mark.parametrize("is_gated", [True, False])
def test_check_step_finds_a_running_loss_that_is_an_argument_by_itself(is_gated):
    step, (params, opt_state) = _wrapper(WRAPPED)

    def with_running_loss(params, opt_state, mean):
        params, opt_state = step((params, opt_state))
        new = 0.9 * mean + 0.1 * _loss(params)
        return params, opt_state, jmpscale.select_tree(opt_state.scaler.step_applied, new, mean) if is_gated else new

    def check():
        check_step(jax.jit(with_running_loss))(params, opt_state, jnp.float32(0.5))

    if is_gated:
        check()
    else:
        with pytest.raises(AssertionError, match=r"the skipped step changed mean: 0\.5 before"):
            check()


def test_check_step_compiles_a_step_that_is_not_compiled():
    calls = []
    step, state = RIGHT["functional"]()

    def counted(state):
        calls.append(1)
        return step(state)

    check_step(counted)(state)
    assert len(calls) <= 4  # each of them traces the step


class _TrainState(TrainState):
    key: jax.Array


@pytest.mark.parametrize(
    "key", [pytest.param(jax.random.key(0), marks=pytest.mark.full, id="key"), pytest.param(KEY_DATA, id="key data")]
)
def test_check_step_accepts_counts_and_keys_of_a_train_state_in_one_line(key, capsys):
    @jax.jit
    def train_step(state):
        key, noise = jax.random.split(state.key)
        x = jax.random.normal(noise, ())
        loss, grads = jmpscale.value_and_grad(lambda params: _loss(params) + 0 * x)(state.opt_state, state.params)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, value=loss)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, key=key)

    state = _TrainState.create(apply_fn=_loss, params=PARAMS, tx=WRAPPED, key=key)
    check_step(train_step)(state)
    line = capsys.readouterr().out
    assert "state.step (a count), state.key (a random key)" in line
    assert line.endswith("pass ignore=('state.step', 'state.key').\n")
    check_step(train_step, ignore=("state.step", "state.key"))(state)
    assert capsys.readouterr().out == ""


@pytest.mark.full
@pytest.mark.parametrize("name", ["losses", None])
@pytest.mark.filterwarnings("ignore:the extra argument 'losses'")  # of the wrapper, for some names
def test_check_step_warns_about_a_loss_that_the_scaler_does_not_receive(name):
    def step(state):
        params, opt_state = state
        loss, grads = GRADIENTS(opt_state, params)
        updates, opt_state = WRAPPED.update(grads, opt_state, params, **({name: loss} if name else {}))
        return optax.apply_updates(params, updates), opt_state

    with pytest.warns(UserWarning, match="reduces the loss scale: pass the unscaled loss, as value= to"):
        check_step(jax.jit(step))((PARAMS, WRAPPED.init(PARAMS)))
