"""Gradients of a loss that `scale` has multiplied are unscaled, by the scaler that has scaled it.

Right programs, each of which unscales in another way, give no warning: each warning is an error. Nearly all programs
are only traced.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jmpscale

import meshes
from calls import ADAM, Mistake, check_message, traced
from messages import NEVER_UNSCALED, UNSCALED_BY_NEW
from tables import rows

pytestmark = pytest.mark.usefixtures("standard_promotion_and_ranks")

PARAMS = {"w": jnp.ones(3)}
TX = jmpscale.with_loss_scaling(ADAM)
OPT_STATE, STATE = TX.init(PARAMS), jmpscale.dynamic()


def loss_fn(params):
    return jnp.sum(params["w"] ** 2)


@jmpscale.autocast
def loss_of_matmul(params):
    return jnp.sum(jnp.ones((8, 3)) @ params["w"][:, None])


def scaled_grad(scaler, params, loss_fn=loss_fn):
    """Returns gradients at the loss scale."""
    return jax.grad(lambda params: jmpscale.scale(scaler, loss_fn(params)))(params)


def divide(grads, factor):
    return jax.tree.map(lambda g: g / factor, grads)


def apply(grads, opt_state, params, tx=TX, **extra_args):
    updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
    return optax.apply_updates(params, updates), opt_state


def wrapper(grads_fn, tx=TX):
    """Returns a step of the optax wrapper; `grads_fn(opt_state, params)` returns its gradients."""
    return lambda params, opt_state: apply(grads_fn(opt_state, params), opt_state, params, tx)


def trace(step, *state):
    return lambda: traced(step, *(state or (PARAMS, OPT_STATE)))


def functional(scaler, params, opt_state, *, unscale=lambda scaler, grads: grads, flag_of_loss=False):
    loss, grads = jax.value_and_grad(lambda params: jmpscale.scale(scaler, loss_fn(params)))(params)
    grads = unscale(scaler, grads)
    finite = jmpscale.all_finite((loss, grads) if flag_of_loss else grads)
    params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, grads), params, opt_state)
    return jmpscale.update(scaler, finite), params, opt_state


FUNCTIONAL_STATE = STATE, PARAMS, ADAM.init(PARAMS)


def on_devices(step, check_vma=True):
    def call():
        mesh = meshes.make_mesh(d=8)
        traced(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma), PARAMS, OPT_STATE)

    return call


# --- wrong programs ---

never_unscaled = wrapper(scaled_grad)


def with_the_value(params, opt_state):
    loss, grads = jax.value_and_grad(lambda params: jmpscale.scale(opt_state, loss_fn(params)))(params)
    return apply(grads, opt_state, params, value=loss / 2.0**16)


def with_auxiliary_data(params, opt_state):
    def scaled_loss_fn(params):
        loss = loss_fn(params)
        return jmpscale.scale(opt_state, loss), loss

    grads, loss = jax.grad(scaled_loss_fn, has_aux=True)(params)
    return apply(grads, opt_state, params, value=loss)


def after_a_report(opt_state, params):
    grads = scaled_grad(opt_state, params)
    jmpscale.grad_report(grads, scaler=opt_state)
    return grads


def second_of_two_steps(params, opt_state):
    loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params)
    return never_unscaled(*apply(grads, opt_state, params, value=loss))


NEVER = {
    "compiled": trace(never_unscaled),
    "value_and_grad of JAX": trace(with_the_value),
    "auxiliary data": trace(with_auxiliary_data),
    "scaler of the state": trace(wrapper(lambda state, params: scaled_grad(jmpscale.get_scaler(state), params))),
    "autocast": trace(wrapper(lambda state, params: scaled_grad(state, params, loss_of_matmul))),
    "clipped": trace(wrapper(lambda state, params: jax.tree.map(jnp.sign, scaled_grad(state, params)))),
    "report": trace(wrapper(after_a_report)),
    "second of two steps": trace(second_of_two_steps),
    "shard_map": on_devices(never_unscaled),
    "shard_map without types": on_devices(
        wrapper(scaled_grad, jmpscale.with_loss_scaling(ADAM, axis_name=())), check_vma=False
    ),
    "vmap": trace(jax.vmap(never_unscaled), *jax.tree.map(lambda x: x[None], (PARAMS, OPT_STATE))),
    "scan": trace(lambda *state: lax.scan(lambda c, _: (never_unscaled(*c), None), state, None, 2)),
    "Equinox": lambda: eqx.filter_jit(never_unscaled).lower(PARAMS, OPT_STATE),
    "functional": trace(functional, *FUNCTIONAL_STATE),
    "functional, flag of the loss": trace(lambda *state: functional(*state, flag_of_loss=True), *FUNCTIONAL_STATE),
    "functional, scan": trace(
        lambda *state: lax.scan(lambda c, _: (functional(*c), None), state, None, 2), *FUNCTIONAL_STATE
    ),
}


# JAX 0.7 reads the results of a compiled function, such as `update`, so the scale of a second step has been read.
if jax.__version_info__ < (0, 8):
    del NEVER["second of two steps"]


@pytest.mark.guards
@pytest.mark.parametrize("call", rows(NEVER))
def test_update_warns_if_gradients_of_a_scaled_loss_are_not_unscaled(call):
    check_message(Mistake(call, NEVER_UNSCALED, raises=UserWarning))


def unscaled_after_update(scaler, params, check=False):
    grads = scaled_grad(scaler, params)
    scaler = jmpscale.update(scaler, jmpscale.all_finite(grads))
    grads = jmpscale.unscale_and_check(scaler, grads)[0] if check else jmpscale.unscale(scaler, grads)
    return scaler, grads


def second_step_after_update(scaler, params):
    scaler, _, _ = functional(scaler, params, ADAM.init(params), unscale=jmpscale.unscale)
    return unscaled_after_update(scaler, params)


BY_NEW = {
    "unscale": trace(unscaled_after_update, STATE, PARAMS),
    "unscale_and_check": trace(lambda *state: unscaled_after_update(*state, check=True), STATE, PARAMS),
    "second of two steps": trace(second_step_after_update, STATE, PARAMS),
    "scan": trace(
        lambda *state: lax.scan(lambda c, _: (unscaled_after_update(*c), None), state, None, 2), STATE, PARAMS
    ),
}


if jax.__version_info__ < (0, 8):
    del BY_NEW["second of two steps"]


@pytest.mark.guards
@pytest.mark.parametrize("call", rows(BY_NEW))
def test_unscale_warns_about_the_scaler_from_after_update(call):
    check_message(Mistake(call, UNSCALED_BY_NEW, raises=UserWarning))


# --- right programs ---


def unscaled_by(unscale):
    """Traces a step whose scaled gradients `unscale(state, grads)` unscales."""
    return trace(wrapper(lambda state, params: unscale(state, scaled_grad(state, params))))


def read_before(opt_state, params):
    factor = opt_state.scaler.loss_scale
    return divide(scaled_grad(opt_state, params), factor)


def inverse_before(opt_state, params):
    inverse = jax.jit(lambda scaler: 1 / scaler.loss_scale)(opt_state.scaler)
    return jax.tree.map(lambda g: g * inverse, scaled_grad(opt_state, params))


def cotangent(opt_state, params):
    _, vjp = jax.vjp(lambda params: jmpscale.scale(opt_state, loss_fn(params)), params)
    return vjp(jmpscale.unscale(opt_state, jnp.float32(1)))[0]


def two_steps(params, opt_state):
    step = wrapper(lambda state, params: jmpscale.unscale(state, scaled_grad(state, params)))
    return step(*step(params, opt_state))


def two_functional_steps(*state):
    state = functional(*state, unscale=jmpscale.unscale)
    return functional(*state, unscale=jmpscale.unscale, flag_of_loss=True)


def unscaled_in_the_chain(params, opt_state):
    """A transformation of the user unscales by an extra argument."""
    by_extra_argument = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda grads, state, params=None, *, factor, **_: (divide(grads, factor), state),
    )
    tx = jmpscale.with_loss_scaling(optax.chain(by_extra_argument, optax.sgd(1e-3)))
    opt_state = tx.init(params)._replace(scaler=opt_state.scaler)
    return apply(scaled_grad(opt_state, params), opt_state, params, tx, factor=opt_state.scaler.loss_scale)


def unscaled_in_optax_step(scaler, params, opt_state):
    grads = scaled_grad(scaler, params)
    finite = jmpscale.all_finite(grads)
    tx = optax.GradientTransformation(
        ADAM.init, lambda grads, state, params: ADAM.update(jmpscale.unscale(scaler, grads), state, params)
    )
    step = jmpscale.optax_step(tx, grads)
    params, opt_state = jmpscale.apply_if(finite, step, params, opt_state)
    return jmpscale.update(scaler, finite), params, opt_state


def updated_before_unscaling(scaler, params, opt_state):
    grads = scaled_grad(scaler, params)
    finite = jmpscale.all_finite(grads)
    new_scaler = jmpscale.update(scaler, finite)
    grads = jmpscale.unscale(scaler, grads)
    params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, grads), params, opt_state)
    return new_scaler, params, opt_state


def updated_before_unscaling_twice(*state):
    return updated_before_unscaling(*updated_before_unscaling(*state))


def hidden_scale_after_update(scaler, params, opt_state):
    """The second loss is scaled in a compiled function, which the marks do not show."""
    scaler, params, opt_state = updated_before_unscaling(scaler, params, opt_state)
    grads = jax.grad(jax.jit(lambda params: jmpscale.scale(scaler, loss_fn(params))))(params)
    return jmpscale.unscale(scaler, grads)


def adversarial(generator, g_state, critic, d_state):
    """Both losses are scaled before any gradient is unscaled, and the optimizers run in the other order."""
    g_grads = scaled_grad(g_state, generator)
    d_grads = scaled_grad(d_state, critic)
    generator, g_state = apply(jmpscale.unscale(g_state, g_grads), g_state, generator)
    critic, d_state = apply(jmpscale.unscale(d_state, d_grads), d_state, critic)
    return generator, g_state, critic, d_state


def unscaled_by_an_equal_scaler(params, opt_state, other_state):
    return apply(jmpscale.unscale(other_state, scaled_grad(opt_state, params)), opt_state, params)


def accumulated_in_two_calls():
    scaler = jax.tree.map(jnp.asarray, STATE)
    summed = scaled_grad(scaler, PARAMS)
    summed = jax.tree.map(jnp.add, summed, scaled_grad(scaler, PARAMS))
    grads, finite = jmpscale.unscale_and_check(scaler, summed)
    jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, grads), PARAMS, ADAM.init(PARAMS))
    jmpscale.update(scaler, finite)


def accumulated_by_a_compiled_function():
    add = jax.jit(lambda summed, scaler: jax.tree.map(jnp.add, summed, scaled_grad(scaler, PARAMS)))
    summed = add(add(PARAMS, OPT_STATE), OPT_STATE)
    apply(jax.jit(jmpscale.unscale)(OPT_STATE, summed), OPT_STATE, PARAMS)


def accumulated_in_a_scan(opt_state, params):
    def body(summed, _):
        return jax.tree.map(jnp.add, summed, scaled_grad(opt_state, params)), None

    return jmpscale.unscale(opt_state, lax.scan(body, jax.tree.map(jnp.zeros_like, params), None, 2)[0])


def hessian_product(opt_state, params):
    _, product = jax.jvp(lambda params: scaled_grad(opt_state, params), (params,), (params,))
    return jmpscale.unscale(opt_state, product)


def gradient_penalty(opt_state, params):
    def penalized(params):
        return loss_fn(params) + optax.tree.norm(jax.grad(loss_fn)(params), squared=True)

    return jmpscale.unscale(opt_state, scaled_grad(opt_state, params, penalized))


def sign_of_another_gradient(opt_state, params):
    step = jax.tree.map(jnp.sign, scaled_grad(opt_state, params))
    return jmpscale.value_and_grad(loss_fn)(opt_state, jax.tree.map(jnp.add, params, step))[1]


def by_scaled_backward(opt_state, params):
    return jax.grad(jmpscale.scaled_backward(loss_fn, opt_state))(params)


def static_by_the_number(params):
    tx = jmpscale.with_loss_scaling(ADAM, jmpscale.static(1024.0))
    opt_state = tx.init(params)
    return apply(divide(scaled_grad(opt_state, params), 1024.0), opt_state, params, tx)


def disabled(params):
    tx = jmpscale.with_loss_scaling(ADAM, jmpscale.disabled())
    return wrapper(scaled_grad, tx)(params, tx.init(params))


def nnx_step():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def step(unscale, model, optimizer):
        grads = nnx.grad(lambda model: jmpscale.scale(optimizer.opt_state, jnp.sum(model(jnp.ones(3)))))(model)
        optimizer.update(model, unscale(optimizer.opt_state, grads))

    for unscale in (
        jmpscale.unscale,
        lambda state, grads: divide(grads, jmpscale.get_scaler(state).loss_scale),
        lambda state, grads: divide(grads, state.scaler.loss_scale[...]),
        lambda state, grads: jax.jit(jmpscale.unscale)(state.scaler, grads),
    ):
        nnx.jit(functools.partial(step, unscale))(model, optimizer)


def steps(make_step):
    """Runs a step eagerly, twice."""
    params, opt_state = make_step(PARAMS, OPT_STATE)
    make_step(params, opt_state)


by_attribute = wrapper(lambda state, params: divide(scaled_grad(state, params), state.scaler.loss_scale))

RIGHT = {
    "unscale": unscaled_by(jmpscale.unscale),
    "unscale_and_check": unscaled_by(lambda state, grads: jmpscale.unscale_and_check(state, grads)[0]),
    "attribute": trace(by_attribute),
    "attribute, eager": lambda: steps(by_attribute),
    "attribute, scan": trace(lambda *state: lax.scan(lambda c, _: (by_attribute(*c), None), state, None, 2)),
    "attribute, vmap": trace(jax.vmap(by_attribute), *jax.tree.map(lambda x: x[None], (PARAMS, OPT_STATE))),
    "attribute, shard_map": on_devices(by_attribute),
    "attribute, Equinox": lambda: eqx.filter_jit(by_attribute).lower(PARAMS, OPT_STATE),
    "attribute, read first": trace(wrapper(read_before)),
    "metrics": unscaled_by(lambda state, grads: divide(grads, jmpscale.metrics(state)["loss_scale"])),
    "scaled number": unscaled_by(lambda state, grads: divide(grads, jmpscale.scale(state, 1.0))),
    "tree.get of optax": unscaled_by(lambda state, grads: divide(grads, optax.tree.get(state, "loss_scale"))),
    "leaves": unscaled_by(lambda state, grads: divide(grads, jax.tree.leaves(state.scaler)[0])),
    "compiled function": unscaled_by(lambda state, grads: jax.jit(jmpscale.unscale)(state, grads)),
    "compiled function, called first": trace(wrapper(inverse_before)),
    "compiled function, eager": lambda: steps(
        wrapper(lambda state, params: jax.jit(jmpscale.unscale)(state, scaled_grad(state, params)))
    ),
    "closure of a compiled function": unscaled_by(
        lambda state, grads: jax.jit(lambda grads: jmpscale.unscale(state, grads))(grads)
    ),
    "branch": unscaled_by(
        lambda state, grads: lax.cond(grads["w"][0] > 1, jmpscale.unscale, lambda state, grads: grads, state, grads)
    ),
    "map over examples": unscaled_by(lambda state, grads: jax.vmap(jmpscale.unscale, (None, 0))(state, grads)),
    "cotangent": trace(wrapper(cotangent)),
    "two steps": trace(two_steps),
    "two functional steps": trace(two_functional_steps, *FUNCTIONAL_STATE),
    "transformation of the user": trace(unscaled_in_the_chain),
    "transformation in optax_step": trace(unscaled_in_optax_step, *FUNCTIONAL_STATE),
    "update before unscale": trace(updated_before_unscaling, *FUNCTIONAL_STATE),
    "update before unscale, two steps": trace(updated_before_unscaling_twice, *FUNCTIONAL_STATE),
    "scale in a compiled function": trace(hidden_scale_after_update, *FUNCTIONAL_STATE),
    "two scalers": trace(adversarial, PARAMS, OPT_STATE, PARAMS, OPT_STATE),
    "two scalers, eager": lambda: adversarial(PARAMS, TX.init(PARAMS), PARAMS, TX.init(PARAMS)),
    "equal scaler": trace(unscaled_by_an_equal_scaler, PARAMS, OPT_STATE, OPT_STATE),
    "two calls": accumulated_in_two_calls,
    "two compiled calls": accumulated_by_a_compiled_function,
    "sum in a scan": trace(wrapper(accumulated_in_a_scan)),
    "Hessian-vector product": trace(wrapper(hessian_product)),
    "gradient penalty": trace(wrapper(gradient_penalty)),
    "sign of another gradient": trace(wrapper(sign_of_another_gradient)),
    "scaled_backward": trace(wrapper(by_scaled_backward)),
    "static scale": trace(static_by_the_number, PARAMS),
    "disabled": trace(disabled, PARAMS),
    "NNX": nnx_step,
}


@pytest.mark.parametrize("run", rows(RIGHT, only_full={"NNX", "attribute, eager"}))
def test_scale_gives_no_warning_if_gradients_are_unscaled(run):
    run()
