"""testing.check_step finds mistakes by running the step, without any warning, and accepts right steps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
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
    "scaled twice": (lambda: _wrapper(WRAPPED, _scaled_twice), DEPENDS),
    "another scaler": (lambda: _wrapper(WRAPPED, _by_another_scaler), UNSCALED),
    "never scaled": (lambda: _wrapper(WRAPPED, _never_scaled), UNSCALED),
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
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", _rows(RIGHT, {"functional"}))
def test_check_step_accepts_a_right_step_without_output(name, capsys):
    step, state = RIGHT[name]()
    check_step(jax.jit(step))(state)
    assert capsys.readouterr().out == ""


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

    with pytest.warns(UserWarning, match="update receives no loss, or under another name"):
        check_step(jax.jit(step))((PARAMS, WRAPPED.init(PARAMS)))
