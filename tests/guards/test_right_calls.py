"""Right calls, some of them at a limit or near a mistake, neither raise nor warn."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jmpscale

import meshes
from calls import (
    ADAM,
    COUNTER,
    EQUINOX,
    FLAGS,
    GRADS,
    LARGEST,
    LOSS,
    NNX,
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
    after_gradients,
    apply_if_applied,
    float16,
    gate_variables,
    loss_and_aux,
    loss_of,
    per_device,
    traced,
    train_step,
    value_and_grad_of_vector,
)

BF16 = {"w": W32.astype(jnp.bfloat16)}


def _injected(rate, dtype=None, **decays):
    return jmpscale.with_loss_scaling(optax.inject_hyperparams(optax.adam, hyperparam_dtype=dtype)(rate, **decays))


def _update(**fields):
    return lambda: jmpscale.update(STATE._replace(**fields), True)


class Posterior(NamedTuple):
    """Has a field with the name of an average of optax."""

    mu: jax.Array
    sigma: jax.Array


def _value_and_grad(*args, fun=loss_of, **options):
    return lambda: jmpscale.value_and_grad(fun, **options)(STATE, *args)


def _grad(w, fun=loss_of, scale=8.0, **options):
    return lambda: jax.grad(jmpscale.scaled_backward(fun, scale, **options), **options)(w)


def _half_sum(w):
    return jnp.sum(w.astype(jnp.float16))


def _wrap(*args, **options):
    return lambda: jmpscale.with_loss_scaling(*args, **options)


def _apply(fn, *carry):
    return lambda: jmpscale.apply_if(TRUE, fn, *carry)


def _gate(new, state, finite=None):
    return jmpscale.apply_if(new.scaler.step_applied if finite is None else finite, lambda _: new, state)


MASK = {"w": True, "b": False}


def _step_from(state):
    """Returns a step that closes over its optimizer state."""
    return lambda params: optax.apply_updates(params, SCALE.update(params, state, params)[0])


def _loss_after_step(params):
    return loss_of(_step_from(SCALE_STATE)(params))


def _scan_of_steps(params, state=SCALE_STATE):
    """Carries a state that the program closes over."""
    return jax.lax.scan(lambda c, _: (train_step(*c)[:2], None), (params, state), None, 2)


def _run_from_constants():
    """Takes the first step of a whole run outside of the loop, from constants, as the loop of tfp does."""

    def step(params, state):
        grads = jax.grad(jmpscale.scaled_backward(loss_of, 8.0))(params)
        updates, state = SCALE.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.scan(lambda carry, _: (step(*carry), None), step(GRADS, SCALE_STATE), None, 2)


def _update_on_eager_devices():
    """Closes over the state in a program that `jax.shard_map` runs without compiling it."""
    mesh = meshes.make_mesh(d=1)
    update = jax.shard_map(lambda x: SCALE.update(x, SCALE_STATE)[0], mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    update(jnp.ones(8))


def _update_with_norm(grads, state):
    return jmpscale.with_loss_scaling(optax.scale(1.0), norm_axis_name="d").update(grads, state)[0]


def _update_disabled(grads):
    return jmpscale.with_loss_scaling(SGD).update(grads, OPT_STATE._replace(scaler=jmpscale.disabled()))


def _scan_of_a_new_scaler(flags):
    """Creates a scaler in the program, which adapts there."""
    return jax.lax.scan(lambda scaler, flag: (jmpscale.update(scaler, flag), None), jmpscale.dynamic(), flags)


def _update_by_all(loss, grads):
    jmpscale.update(STATE, jmpscale.all_finite((loss, grads)))
    return jmpscale.update(STATE, jmpscale.all_finite(loss) & jmpscale.all_finite(grads))


VALID_CALLS = {
    "update of an int64 field": _update(total_skips=np.int64(3)),
    "scale bfloat16": lambda: traced(jmpscale.scale, STATE, W32.astype(jnp.bfloat16)),
    "axis without a loss": lambda: per_device(lambda x: jmpscale.update(STATE, TRUE).loss_scale[None]),
    "axis of the norm": lambda: per_device(_update_with_norm, SCALE.init(W32)),
    "value_and_grad with NNX": _value_and_grad(GRADS, NNX),
    "value_and_grad with Equinox": lambda: _value_and_grad(eqx.nn.LayerNorm(2), EQUINOX)(),
    "value_and_grad of a vector": lambda: jmpscale.value_and_grad(lambda w: w[:1], transform=value_and_grad_of_vector)(
        jmpscale.disabled(), W32
    ),
    "flags of the loss and of the gradients": lambda: _update_by_all(*jmpscale.value_and_grad(loss_of)(STATE, GRADS)),
    "value_and_grad of the sum of scaled losses": _value_and_grad(
        GRADS, fun=lambda tree: jmpscale.scale(STATE, loss_of(tree)) + 0.0
    ),
    "value_and_grad by a static scale": lambda: traced(
        lambda params: jmpscale.value_and_grad(loss_of)(jmpscale.static(8.0), params), GRADS
    ),
    "has_aux of NumPy": _value_and_grad(W32, fun=lambda w: (jnp.sum(w), w), has_aux=np.True_),
    "value_and_grad of gradients": _value_and_grad(W32, fun=lambda w: jmpscale.value_and_grad(jnp.sum)(STATE, w)[0]),
    "argument called scaler": lambda: jmpscale.value_and_grad(lambda w, scaler: w * scaler)(STATE, 1.0, scaler=2.0),
    "scaled_backward float16 batch": lambda: _grad(W32, lambda w: loss_of([w, W16]))(),
    "scaled_backward float16 aux": _grad(W32, lambda w: (loss_of(w), _half_sum(w)), has_aux=True),
    "scaled_backward eagerly": _grad(W32, scale=STATE),
    "scaled_backward by an argument": lambda: traced(lambda state: _grad(W32, scale=state)(), STATE),
    "smallest max_norm": _wrap(ADAM, max_norm=SMALLEST),
    "largest max_norm": _wrap(ADAM, max_norm=LARGEST),
    "masked inside": lambda: _wrap(optax.masked(ADAM, MASK))().init(GRADS),
    "gate by the flag of the step": after_gradients(lambda s, _, ok: apply_if_applied(s, ok, True)),
    "gate of another scaler": after_gradients(lambda s, _, ok: _gate(jmpscale.update(s, ok), STATE, ok)),
    "gate of an adjusted scaler": after_gradients(lambda s, _, ok: _gate(*[jmpscale.update(s, ok)] * 2, ok)),
    "gate by another flag": after_gradients(lambda s, _, ok: _gate(jmpscale.update(s, ok), s, ok & TRUE)),
    "gate of copied variables": lambda: gate_variables(nnx.clone),
    "gradients in two updates": after_gradients(lambda s, g, _: SCALE.update(g, SCALE.update(g, s)[1]), SCALE_STATE),
    "unscaled loss": after_gradients(
        lambda s, g, _: SCALE.update(g, s, value=jmpscale.unscale(s, jmpscale.scale(s, LOSS))), SCALE_STATE
    ),
    "gradients by a copy": after_gradients(lambda s, g, _: SCALE.update(g, jax.tree.map(jnp.copy, s)), SCALE_STATE),
    "two losses": lambda: jmpscale.update(STATE, True, loss=loss_and_aux(LOSS)),
    "diagnosis of scaled_backward": lambda: jmpscale.diagnose(jmpscale.scaled_backward(loss_of, 8.0))(STATE, W32),
    "cast of a user's field": lambda: jmpscale.cast(Posterior(W32, W32), jnp.float16),
    "bfloat16 averages": lambda: jmpscale.with_loss_scaling(optax.adam(1e-3, mu_dtype=jnp.bfloat16)).init(GRADS),
    "bfloat16 parameters": lambda: TX.init(BF16),
    "decays in float32": lambda: _injected(1e-3).init(W32),
    "rate of 1 in bfloat16": lambda: _wrap(optax.inject_hyperparams(optax.sgd)(1.0, momentum=0.9))().init(BF16),
    "short averages in bfloat16": lambda: _injected(1e-3, b2=0.95, dtype=jnp.float32).init(BF16),
    "state with traced decays": lambda: traced(lambda p: _injected(1e-3).init(p).scaler.loss_scale, BF16),
    "frozen float16 parameters": lambda: TX.init({"w": W16, "adapter": W32}),
    "optax_step if disabled": _apply(jmpscale.optax_step(SGD, W16), W16, SGD.init(W16)),
    "optax_step without momentum": _apply(jmpscale.optax_step(SGD, W32), W32, SGD.init(W32)),
    "losses of an inner optimizer": lambda: SCALE.update(GRADS, SCALE_STATE, losses=LOSS, values=LOSS, loss_1=LOSS),
    "parameters with a gradient": after_gradients(
        lambda s, g, _: SCALE.update(g, s, {"w": g["w"], "b": GRADS["b"]}), SCALE_STATE
    ),
    "extra arguments": lambda: SCALE.update(
        GRADS, SCALE_STATE, GRADS, value_fn=loss_of, loss_fn=loss_of, grad=GRADS, key=1
    ),
    "state in an eager gradient": lambda: jax.grad(_loss_after_step)(GRADS),
    "state in a gradient": lambda: traced(jax.grad(_loss_after_step), GRADS),
    "state in vmap": lambda: traced(jax.vmap(_step_from(SCALE_STATE)), jax.tree.map(lambda x: x[None], GRADS)),
    "state is created for a scan": lambda: traced(lambda p: _scan_of_steps(p, SCALE.init(p)), GRADS),
    "state in scan": lambda: traced(_scan_of_steps, GRADS),
    "state in a run from constants": lambda: traced(_run_from_constants),
    "state in an eager scan": lambda: _scan_of_steps(GRADS),
    "state in an eager cond": lambda: jax.lax.cond(
        TRUE, lambda: SCALE.update(GRADS, SCALE_STATE), lambda: (GRADS, SCALE_STATE)
    ),
    "state on devices": lambda: per_device(lambda x, state: SCALE.update(x, state)[0], SCALE_STATE, check_vma=True),
    "state on eager devices": _update_on_eager_devices,
    "state is disabled": lambda: traced(_update_disabled, GRADS),
    "state is exported": lambda: jax.export.export(jax.jit(train_step))(GRADS, SCALE_STATE),
    "update in scan": lambda: traced(_scan_of_a_new_scaler, FLAGS),
    "update with a known flag": lambda: traced(lambda x: jmpscale.update(STATE, True), TRUE),
    "update in vmap": lambda: jax.vmap(lambda x: jmpscale.update(STATE, x))(TRUE[None]),
    "update if disabled": lambda: traced(lambda x: jmpscale.update(jmpscale.disabled(), x), TRUE),
    "report of a large leaf": lambda: traced(jmpscale.grad_report, float16(COUNTER)),
    "state is created in the step": lambda: traced(lambda grads: SCALE.update(grads, SCALE.init(grads)), GRADS),
}


@pytest.mark.parametrize("name", VALID_CALLS)
def test_valid_call_neither_raises_nor_warns(name):
    """A warning would raise, because warnings are errors."""
    VALID_CALLS[name]()
