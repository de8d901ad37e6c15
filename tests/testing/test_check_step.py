"""testing.check_step accepts right steps, and names the mistake of each wrong one, without help from any warning."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import jax_utils, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import check_step

import check_step_programs as programs
import meshes
from check_step_programs import ADAM, GRADIENTS, PARAMS, SGD, WRAPPED, X, Y, functional, loss_fn, with_flag, wrapper
from tables import names

KEY_DATA = jax.random.key_data(jax.random.key(0))  # which programs without typed keys hold
ONLY_A, ONLY_B = {"a": True, "b": False}, {"a": False, "b": True}

pytestmark = pytest.mark.usefixtures("standard_promotion")


def _scaled(inner, scaler=None, **options):
    return wrapper(jmpscale.with_loss_scaling(inner, scaler, **options))


def _of_loss(loss_fn, inner=ADAM, scaler=None):
    """Returns a step with right gradients of a loss function."""
    return wrapper(jmpscale.with_loss_scaling(inner, scaler), jmpscale.value_and_grad(loss_fn))


def _in_chain(*parts):
    return wrapper(optax.chain(*parts))


# --- right steps ---

RIGHT = {  # functions that return a step and its state
    # the wrapper
    "wrapper": wrapper,
    "wrapper: casts by hand": lambda: _of_loss(programs.in_float16),
    "wrapper: in float32": lambda: _of_loss(programs.large_loss),
    "wrapper: max_norm": lambda: _scaled(ADAM, max_norm=1.0),
    "wrapper: MultiSteps inside": lambda: _scaled(optax.MultiSteps(ADAM, 3)),
    "wrapper: clip inside": lambda: _scaled(optax.chain(optax.clip(0.1), optax.sgd(0.1))),
    "wrapper: scaled_backward": lambda: wrapper(gradients=programs.by_scaled_backward),
    "wrapper: scale and unscale": lambda: wrapper(gradients=programs.by_hand(programs.scaled, jmpscale.unscale)),
    "wrapper: loss unscaled by hand": lambda: wrapper(gradients=programs.loss_unscaled_by_hand),
    "wrapper: shard_map": lambda: wrapper(gradients=programs.in_shard_map),
    "wrapper: gradient that is not used": lambda: wrapper(gradients=programs.with_unused_gradient),
    # the functional API
    "functional": lambda: functional(programs.right),
    "functional: SAM": programs.sam,
    "functional: sums in the state": programs.with_sums,
    "functional: dual averaging": programs.dual_averaging,
    "functional: flag of the norm": lambda: programs.with_flag_of_each(lambda g: jnp.isfinite(jnp.linalg.norm(g))),
    "functional: flag of many leaves": lambda: programs.flag_of_part_of_many(40),
    "functional: flag of the scaled gradients": lambda: programs.flag_of_scaled_gradients(
        jmpscale.dynamic(), unscales_first=False
    ),
    # the scaler
    "large scale": lambda: _of_loss(programs.large_loss, scaler=jmpscale.static(2.0**60)),
    "small scale": lambda: functional(programs.right, scaler=jmpscale.static(1e-6)),
    "scale that may fall below 1": lambda: programs.flag_of_scaled_gradients(
        jmpscale.dynamic(2.0**10, min_scale=2.0**-10), unscales_first=True
    ),
    "scale that falls by a factor of 100": lambda: _scaled(ADAM, jmpscale.dynamic(backoff_factor=0.01)),
    "two scalers": programs.gan,
    # several steps in one
    "loop of steps": lambda: programs.loop(4),
    "loop of which the first step overflows at 2^126": lambda: programs.loop(
        3, jmpscale.value_and_grad(lambda params: 7 * programs.large_loss(params))
    ),
    "loop of which the second step overflows after a growth": lambda: programs.loop(
        3, jmpscale.value_and_grad(programs.in_float16)
    ),
    # copies and averages of the parameters
    "float16 copy of float32 parameters": lambda: programs.copy_of_masters(jnp.float16),
    "bfloat16 copy of float32 parameters": lambda: programs.copy_of_masters(jnp.bfloat16),
    "average at a learning rate of zero": lambda: programs.average_of_parameters(is_gated=True),
    "copy for evaluation": lambda: programs.copy_for_evaluation(is_gated=True),
    # gradients that are hard to compare
    "bias before a normalization": lambda: _of_loss(programs.normalized),
    "kernel in float16": lambda: _of_loss(programs.with_kernel, optax.sgd(0.1)),
    "gradients that are zero at smaller scales": lambda: _of_loss(
        programs.of_two_magnitudes, optax.adam(0.1, eps=1e-20)
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", names(RIGHT, default={"functional", "float16 copy of float32 parameters"}))
def test_check_step_accepts_a_right_step_without_output(name, capsys):
    step, state = RIGHT[name]()
    check_step(jax.jit(step))(state)
    assert capsys.readouterr().out == ""


# --- mistakes ---

HIDDEN = "Something replaces infinity and NaN before the check"
PART = "was not skipped when a part of the unscaled gradients was infinite"
UNSCALED = "at an infinite loss scale: the loss was not scaled, or not by the scaler of the state"
RETURNED = "was not skipped at an infinite loss scale: it returned the scaler that it received"
DEPENDS = r"differs by .*% at a loss scale of 2\^-8\. Scale every term"
AFTER_SKIP = "after a skipped step"
TWICE = "one overflow counted as 2 skips: the scaler is updated more than once"
BESIDE = "If a transformation beside with_loss_scaling in optax.chain makes this change, place it inside"
IN_FLOAT32 = "differs from the change in float32"
NARROW = "First run jmpscale.diagnose, .* parameters, unscaled gradients or averages of them are converted to float16"
OF_ADAM = r"the change of state\[1\]\.inner_state\[0\]\.[mn]u"
FLAGS = {  # functions of a gradient that miss a sign, NaN or elements
    "maximum": lambda g: jnp.isfinite(g.max()),
    "minimum": lambda g: jnp.isfinite(g.min()),
    "NaN": lambda g: ~jnp.isnan(g).any(),
    "infinity": lambda g: ~jnp.isinf(g).any(),
    "first element": lambda g: jnp.isfinite(g.ravel()[0]),
    "last element": lambda g: jnp.isfinite(g.ravel()[-1]),
    "all but the first row": lambda g: jnp.isfinite(g[1:]).all(),
}
MISTAKES = {  # as RIGHT, and a pattern of the message
    # transformations before the wrapper in a chain
    "after clip": (lambda: _in_chain(optax.clip(1.0), WRAPPED), f"{PART}.*{HIDDEN}"),
    "after zero_nans": (lambda: _in_chain(optax.zero_nans(), WRAPPED), HIDDEN),
    "after momentum": (lambda: _in_chain(optax.trace(0.9), SGD), r"changed state\[1\]\[0\]\.trace"),
    "after sign": (lambda: _in_chain(optax.scale_by_sign(), SGD), PART),
    # transformations behind the wrapper in a chain
    "before weight decay": (
        lambda: _in_chain(WRAPPED, optax.add_decayed_weights(-1e-4)),
        rf"the skipped step changed state\[0\].*{BESIDE}",
    ),
    "before noise": (
        lambda: _in_chain(WRAPPED, optax.add_noise(0.1, 0.5, key=0)),
        rf"the skipped step changed state\[0\].*{BESIDE}",
    ),
    "before Adam": (
        lambda: _in_chain(jmpscale.with_loss_scaling(optax.identity()), ADAM),
        rf"the skipped step changed state\[1\].*{BESIDE}",
    ),
    "before a schedule": (
        lambda: _in_chain(WRAPPED, optax.scale_by_schedule(lambda count: 1.0)),
        r"the skipped step changed state\[1\]\[1\]\.count: 0 before, 1 after",
    ),
    "before plateau": (
        lambda: _in_chain(WRAPPED, optax.contrib.reduce_on_plateau()),
        r"changed state\[1\]\[1\]\.best_value",
    ),
    # transformations around the wrapper
    "inside apply_if_finite": (lambda: wrapper(optax.apply_if_finite(WRAPPED, 5)), RETURNED),
    "inside masked": (
        lambda: _in_chain(optax.masked(WRAPPED, ONLY_A), optax.masked(optax.scale(-1e-3), ONLY_B)),
        r"the skipped step changed state\[0\]\['b'\]",
    ),
    "inside partition": (
        lambda: wrapper(optax.partition({"scaled": WRAPPED, "plain": ADAM}, {"a": "scaled", "b": "plain"})),
        r"the skipped step changed state\[0\]\['b'\]",
    ),
    "inside MultiSteps": (programs.inside_multi_steps, r"changed state\[1\]\.gradient_step"),
    # the loss is not scaled, or not by the scaler
    "never scaled": (lambda: wrapper(gradients=programs.never_scaled), UNSCALED),
    "scaled by another scaler": (lambda: wrapper(gradients=programs.scaled_by_another_scaler), UNSCALED),
    "scaled by a number": (
        lambda: wrapper(gradients=programs.scaled_by_a_number),
        f"{UNSCALED}.*a loss scale that is a number: run a few steps",
    ),
    "scaled by another leaf": (
        programs.scale_of_another_leaf,
        r"the loss is scaled by state\['scale'\], not by the scaler",
    ),
    "penalty that is not scaled": (
        lambda: wrapper(gradients=programs.by_hand(programs.scaled_without_penalty, jmpscale.unscale)),
        rf"\['a'\] {DEPENDS}",
    ),
    "part that is not scaled": (
        lambda: wrapper(jmpscale.with_loss_scaling(optax.adamw(1e-3)), programs.of_jax_in_part),
        rf"{OF_ADAM}\['b'\] {IN_FLOAT32} by 100% .*{NARROW}",
    ),
    "loss too large for the scaler": (
        lambda: _of_loss(lambda params: 1e8 * loss_fn(params)),
        r"skipped at every loss scale of the scaler, down to 2\^0, its min_scale, but not at 2\^-\d+",
    ),
    # the gradients depend on the scale
    "scaled twice": (lambda: wrapper(gradients=programs.scaled_twice), DEPENDS),
    "never unscaled": (lambda: wrapper(gradients=programs.by_hand(programs.scaled, programs.not_unscaled)), DEPENDS),
    "unscaled twice": (lambda: functional(programs.unscaled_twice), DEPENDS),
    "unscaled by the new scaler": (
        programs.unscaled_by_the_new_scaler,
        r"differs by .*% if the scale grows after the step",
    ),
    "clip in a derivative rule": (
        lambda: _of_loss(programs.with_clip_in_a_derivative_rule, optax.sgd(0.1)),
        DEPENDS,
    ),
    # the flag
    "gradients by nan_to_num": (lambda: wrapper(gradients=programs.changed(jnp.nan_to_num)), HIDDEN),
    "gradients of finite micro-batches": (lambda: wrapper(gradients=programs.of_finite_micro_batches), HIDDEN),
    "second gradient of SAM in opaque mode": (programs.sam_in_opaque_mode, PART),
    "flag of the loss": (lambda: with_flag(lambda scaler, loss, grads: jmpscale.all_finite(loss)), HIDDEN),
    "flag of the scaled loss": (lambda: with_flag(programs.of_scaled_loss), HIDDEN),
    "flag of a large scaled loss": (
        lambda: with_flag(
            programs.of_scaled_loss, jmpscale.value_and_grad(lambda params: 1e3 * programs.in_float16(params))
        ),
        HIDDEN,
    ),
    "flag of the first leaf": (
        lambda: with_flag(lambda scaler, loss, grads: jmpscale.all_finite(grads["a"])),
        rf"{PART}.*\['b'\]",
    ),
    "flag of the last leaf": (
        lambda: with_flag(lambda scaler, loss, grads: jmpscale.all_finite(grads["b"])),
        rf"{PART}.*\['a'\]",
    ),
    "flag of one part, and a gate for each": (
        programs.flag_of_one_part,
        rf"{PART}: the change of state\[0\]\['b'\] .* 100%\. {HIDDEN}",
    ),
    "flag without one of 20 leaves": (
        lambda: programs.flag_of_part_of_many(20, lambda i: i != 13),
        rf"{PART}.*\[0\]\[13\]",
    ),
    "flag of the kernels among 34 leaves": (lambda: programs.flag_of_part_of_many(34, lambda i: i % 2 == 0), PART),
    "flag without one of 34 leaves": (
        lambda: programs.flag_of_part_of_many(34, lambda i: i != 20),
        rf"{PART}.*\[0\]\[20\]",
    ),
    "flag of the scaled gradients at a scale below 1": (
        lambda: programs.flag_of_scaled_gradients(jmpscale.dynamic(2.0**10, min_scale=2.0**-10), unscales_first=False),
        f"{PART}.*If the flag is computed from the scaled gradients, call unscale first",
    ),
    **{
        f"flag by {name}": (lambda is_finite=is_finite: programs.with_flag_of_each(is_finite), HIDDEN)
        for name, is_finite in FLAGS.items()
    },
    "flag with a limit": (
        lambda: with_flag(lambda _, __, grads: jmpscale.all_finite(grads) & (optax.tree.norm(grads) < 1e-6)),
        "the step is skipped in float32, .* other conditions",
    ),
    "flag that is inverted": (
        lambda: with_flag(lambda _, __, grads: ~jmpscale.all_finite(grads)),
        r"the step was skipped at every loss scale\. .* the flag for update is inverted",
    ),
    # the update of the scaler
    "updated twice": (lambda: functional(programs.updated_twice), TWICE),
    "updated after the wrapper": (programs.update_after_wrapper, TWICE),
    "never updated": (lambda: functional(programs.old_scaler), RETURNED),
    "updated inside apply_if": (lambda: functional(programs.update_inside_apply_if), RETURNED),
    "updated only if not finite": (
        lambda: functional(programs.updates_only_if_not_finite),
        "finite_steps is still 0 after a finite step, so the scale never grows. Call update in every step",
    ),
    "updated with statistics as the loss": (
        lambda: functional(programs.statistics_in_the_loss),
        "the loss passed to update is not finite at .*: pass the unscaled loss",
    ),
    "finite steps that are reset": (
        lambda: programs.with_scaler(lambda old, new: {"finite_steps": old.finite_steps}),
        "finite_steps is still 0 after a finite step",
    ),
    "finite steps as a step count": (programs.counts_by_finite_steps, "do not count steps by its finite_steps"),
    "scale that never grows": (
        lambda: programs.with_scaler(programs.smaller_scale),
        r"the scale does not grow from 2\^\d+ after growth_interval finite steps, .* use max_scale",
    ),
    "scale that is put back": (
        lambda: programs.with_scaler(lambda old, new: {"loss_scale": old.loss_scale}),
        "the skipped step did not reduce the scale at",
    ),
    "scale that backs off by another factor": (
        lambda: programs.with_scaler(programs.averaged_scale),
        r"1 step was skipped at a loss scale of 2\^\d+, and the scale became [\de.+]+, not 2\^\d+, as backoff_factor",
    ),
    "scale with a limit": (
        lambda: programs.with_scaler(programs.limited_scale),
        r"1 step was skipped at a loss scale of 2\^\d+, and the scale became 2\^16, not 2\^\d+, as backoff_factor",
    ),
    "scale from before a loop": (
        lambda: programs.loop_with_one_scale(4),
        "4 steps were skipped at .* the scaler that the loop carries",
    ),
    # the gate
    "not gated": (
        lambda: functional(programs.not_gated),
        r"changed state\[0\]\['a'\]: -?\d\S* before, nan after, at \[0, 0\]\. Gate it",
    ),
    "gate by the flag of the step before": (lambda: functional(programs.flag_of_an_earlier_step), AFTER_SKIP),
    "average by the flag of the step before": (
        programs.average_by_the_flag_of_the_step_before,
        rf"state\[0\] differs by 100% {AFTER_SKIP}",
    ),
    "average by the scale": (
        lambda: programs.average_of_outputs(lambda old, new, _: new.loss_scale >= old.loss_scale),  # as in torch
        r"the skipped step changed state\[0\]: .* by step_applied",
    ),
    "average by the loss": (
        lambda: programs.average_of_outputs(lambda _, __, loss: jnp.isfinite(loss)),
        r"the skipped step changed state\[0\]",
    ),
    "average at a learning rate of zero": (
        lambda: programs.average_of_parameters(is_gated=False),
        r"the skipped step changed state\[0\]\['a'\]: ",
    ),
    "average that is NaN": (
        lambda: programs.average_by_the_flag_of_the_step_before(jnp.nan),
        r"state\[0\] contains NaN, .* Check an earlier state",
    ),
    "copy of the first step": (programs.copies_in_the_first_step, r"the skipped step changed state\[0\]\['a'\]"),
    "copy for evaluation": (
        lambda: programs.copy_for_evaluation(is_gated=False),
        r"the skipped step changed state\[0\]\['a'\]",
    ),
    # what is computed or stored in half precision
    "loss that rounds": (
        lambda: _of_loss(programs.rounding, optax.sgd(0.1)),
        rf"state\[0\]\['a'\] {IN_FLOAT32} .*\. First run jmpscale\.diagnose, which names the line",
    ),
    "gradients in float16": (
        lambda: wrapper(gradients=programs.in_float16_after_unscaling),
        f"{IN_FLOAT32} .*{NARROW}",
    ),
    "parameters in float16": (programs.rounds_parameters, rf"state\[0\]\['[ab]'\] {IN_FLOAT32} .*{NARROW}"),
    "parameters in bfloat16": (
        lambda: programs.in_bfloat16(optax.adam(3e-4)),
        r"state\[0\]\['[ab]'\] is bfloat16, and its change is below its rounding: \d+(\.\d+)?% of the change is lost",
    ),
    "average in bfloat16": (programs.average_in_bfloat16, r"state\[0\]\['[ab]'\] is bfloat16, and its change is below"),
    "decay that rounds to 1": (
        lambda: programs.in_bfloat16(optax.inject_hyperparams(optax.adam)(1e-2)),
        r"all gradients are finite: the optimizer divides by zero\..*hyperparams\['b2'\] is 1 in bfloat16",
    ),
    **{
        f"update of a copy in {dtype.__name__}": (
            partial(programs.update_of_half_copy, dtype),
            rf"the change of state\[0\]\['[ab]'\] {IN_FLOAT32} by .*{NARROW}",
        )
        for dtype in (jnp.float16, jnp.bfloat16)
    },
    "update from the copy of float32 parameters": (
        lambda: programs.copy_of_masters(jnp.float16, lambda master, copy: jmpscale.cast(copy, jnp.float32)),
        r"the skipped step changed state\[1\]\['a'\]",
    ),
    # two scalers
    "two scalers: nan_to_num": (lambda: programs.gan(partial(jax.tree.map, jnp.nan_to_num)), HIDDEN),
    "two scalers: the other one": (lambda: programs.gan(scaler_of_generator=0), UNSCALED),
    "two scalers: average": (lambda: programs.gan(gate=False), r"the skipped step changed state\[3\]\['g'\]"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", names(MISTAKES, default={"after clip", "updated twice"}))
def test_check_step_names_the_mistake_without_a_warning(name):
    create, pattern = MISTAKES[name]
    step, state = create()
    with pytest.raises(AssertionError, match=pattern):
        check_step(jax.jit(step))(state)


# --- what a step may take, return and do ---


@pytest.mark.full
def test_check_step_keeps_a_state_that_the_step_donates():
    step, state = _of_loss(programs.in_float16)
    state = jax.tree.map(jnp.copy, state)
    check_step(jax.jit(step, donate_argnums=0))(state)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.full
def test_check_step_accepts_infinities_and_numbers_in_the_state():
    step, state = programs.with_other_leaves()
    check_step(step)(state)


@pytest.mark.full
def test_check_step_ignores_leaves(capsys):
    step, state = programs.with_count()
    with pytest.raises(AssertionError, match=r"changed state\[0\]: 1.0 before, 1.9 after.*ignore='state\[0\]'"):
        check_step(step)(state)
    check_step(step, ignore="state[0]")(state)
    assert "state[1] (a random key), state[2] (a count) also changed" in capsys.readouterr().out
    check_step(step, ignore=["state[0]", "state[1]", "state[2]"])(state)
    assert capsys.readouterr().out == ""


@pytest.mark.full
def test_check_step_keeps_memory_spaces():
    step, state = wrapper()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    device, host = map(place.with_memory_kind, ("device", "pinned_host"))
    compiled = jax.jit(step)
    check_step(lambda state: jax.device_put(compiled(jax.device_put(state, device)), host))(jax.device_put(state, host))


UNTRACEABLE = {  # what a step may do with a value where JAX cannot trace it, and the error that this raises there
    "if": (lambda x: 1 if x > 0 else 2, "a TracerBoolConversionError"),
    "index": (lambda x: [1, 2][0 * x.astype(jnp.int32)], "a TracerIntegerConversionError"),
    "mask": (lambda x: PARAMS["b"][PARAMS["b"] > x], "a NonConcreteBooleanIndexError"),
    "format": (lambda x: f"{x:.3f}", "a TypeError"),
}


@pytest.mark.parametrize("name", names(UNTRACEABLE, default=()))
def test_check_step_accepts_a_right_step_that_jax_cannot_trace(name):
    use, error = UNTRACEABLE[name]
    step, state = wrapper()
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


@pytest.mark.full
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


@pytest.mark.full
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
    step, (params, opt_state) = wrapper()

    def with_running_loss(params, opt_state, mean):
        params, opt_state = step((params, opt_state))
        new = 0.9 * mean + 0.1 * loss_fn(params)
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
    step, state = functional(programs.right)

    def counted(state):
        calls.append(1)
        return step(state)

    check_step(counted)(state)
    assert len(calls) <= 4  # each of them traces the step


class _TrainState(TrainState):
    key: jax.Array


@pytest.mark.full
@pytest.mark.parametrize(
    "key", [pytest.param(jax.random.key(0), marks=pytest.mark.full, id="key"), pytest.param(KEY_DATA, id="key data")]
)
def test_check_step_accepts_counts_and_keys_of_a_train_state_in_one_line(key, capsys):
    @jax.jit
    def train_step(state):
        key, noise = jax.random.split(state.key)
        x = jax.random.normal(noise, ())
        loss, grads = jmpscale.value_and_grad(lambda params: loss_fn(params) + 0 * x)(state.opt_state, state.params)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, value=loss)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, key=key)

    state = _TrainState.create(apply_fn=loss_fn, params=PARAMS, tx=WRAPPED, key=key)
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


@pytest.mark.full
def test_check_step_accepts_steps_of_flax_and_of_a_mesh():
    tx = jmpscale.with_loss_scaling(ADAM)

    def train_step(state):
        _, grads = GRADIENTS(state.opt_state, state.params)
        return state.apply_gradients(grads=grads)

    state = TrainState.create(apply_fn=loss_fn, params=PARAMS, tx=tx)
    sharded = jax.device_put(state, jax.NamedSharding(meshes.make_mesh(), P()))
    for compiled, given in ((jax.jit(train_step), state), (jax.jit(train_step, donate_argnums=0), sharded)):
        with pytest.warns(UserWarning, match="update does not see that the loss is not finite, .* as value= to tx"):
            check_step(compiled, ignore=["state.step"])(given)

    model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
    optimizer, starts = nnx.Optimizer(model, tx, wrt=nnx.Param), set()

    @nnx.jit
    def nnx_step(model, optimizer):
        loss_fn = jmpscale.autocast(lambda model: jnp.mean((model(X) - Y) ** 2))
        grad_fn = jmpscale.value_and_grad(loss_fn, transform=nnx.value_and_grad)
        loss, grads = grad_fn(optimizer.opt_state, model)
        optimizer.update(model, grads, value=loss)

    def step_of(model, optimizer, state):
        variables, optimizer.opt_state = state
        nnx.update(model, variables)
        nnx_step(model, optimizer)
        return nnx.state(model), optimizer.opt_state

    def step_in_place(state):
        starts.add(float(jnp.sum(state[0].kernel[...])))
        return step_of(model, optimizer, state)

    state = nnx.state(model), optimizer.opt_state
    check_step(lambda state: step_of(*nnx.clone((model, optimizer)), state))(state)
    with pytest.warns(UserWarning, match=r"JAX cannot trace the step, .* With Flax NNX, pass the model"):
        check_step(step_in_place)(state)
    assert len(starts) == 4  # the given state, the state after a step, NaN, large numbers


@pytest.mark.full
def test_check_step_compares_devices():
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), axis_name="d")

    def local(average, params, opt_state, x, y):
        loss, grads = average(jmpscale.value_and_grad(programs.large_loss)(opt_state, params, x, y))
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    def check(average):
        specs = {"in_specs": (P(), P(), P("d"), P("d")), "out_specs": P(), "check_vma": False}
        step = jax.jit(jax.shard_map(partial(local, average), mesh=meshes.make_mesh(d=8), **specs))
        check_step(step)(PARAMS, tx.init(PARAMS), X, Y)

    def sharded_step(state):
        """Returns the state of a step in which devices hold different parameters, and decide independently."""
        params, scaler = state
        loss, grad = jmpscale.value_and_grad(jmpscale.autocast(lambda w, x: jnp.sum((x @ w) ** 2)))(scaler, params, X)
        finite = jmpscale.all_finite(grad, axis_name=())
        params = jmpscale.apply_if(finite, lambda w: w - 1e-3 * grad, params)
        return params, jmpscale.update(scaler, finite, loss=loss, axis_name=())

    check(lambda grads: jax.lax.pmean(grads, "d"))
    specs = {"in_specs": ((P(None, "d"), P()),), "out_specs": (P(None, "d"), P()), "check_vma": False}
    step = jax.jit(jax.shard_map(sharded_step, mesh=meshes.make_mesh(d=8), **specs))
    with pytest.raises(AssertionError, match=r"(?s)state\[1\]\.loss_scale differs between devices"):
        check_step(step)((jnp.full((8, 8), 2.0 ** -jnp.arange(8.0)), jmpscale.dynamic()))
    with pytest.raises(AssertionError, match=r"(?s)params\['a'\] differs between devices.*jax\.lax\.pmean"):
        check(lambda grads: grads)
