"""Training steps for check_step. Each function returns a step, a function of its state, and the first state."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jmpscale

import meshes
from arrays import normal

X, Y, Z = normal(0, 32, 8), normal(1, 32, 1), normal(2, 32, 4)
PARAMS = {"a": normal(3, 8, 16, scale=1 / 3), "b": normal(4, 16, 1, scale=1 / 4)}
GENERATOR = {"g": normal(5, 4, 8, scale=1 / 2)}
ADAM = optax.adam(1e-3)
WRAPPED = jmpscale.with_loss_scaling(ADAM)
SGD = jmpscale.with_loss_scaling(optax.scale(-1e-3))


# --- losses ---


def large_loss(params, x=X, y=Y):
    """Computes a loss in float32 that is larger than usual."""
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


@jmpscale.autocast
def loss_fn(params, x=X, y=Y):
    return 2.0**-6 * large_loss(params, x, y)


def in_float16(params, x=X, y=Y):
    half, x = jmpscale.cast((params, x), jnp.float16)
    return jnp.mean(((jnp.tanh(x @ half["a"]) @ half["b"]).astype(jnp.float32) - y) ** 2)


def of_two_magnitudes(params):
    half, x = jmpscale.cast((params, X), jnp.float16)
    return jnp.mean((x @ half["a"]).astype(jnp.float32)) + 2.0**-36 * jnp.mean(half["b"].astype(jnp.float32))


def normalized(params):
    """Computes a loss to which a bias contributes rounding noise only."""
    half, x = jmpscale.cast((params, X), jnp.float16)
    hidden = x @ half["a"] + half["b"].T
    hidden = (hidden - hidden.mean(0, keepdims=True)) / (hidden.std(0, keepdims=True) + jnp.float16(0.1))
    return jnp.mean((hidden.astype(jnp.float32).sum(1, keepdims=True) - Y) ** 2)


@jax.custom_vjp
def _kernel(x):
    """Returns its argument; the derivative is a kernel in float16."""
    return x


def _run_kernel(_, g):
    out = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(g.shape, jnp.float16), g.astype(jnp.float16))
    return (out.astype(g.dtype),)


_kernel.defvjp(lambda x: (x, None), _run_kernel)


def with_kernel(params):
    return 2.0**-14 * large_loss(jax.tree.map(_kernel, params))


def rounding(params):
    """Computes a small difference of cosines, which float16 rounds to zero."""
    half, x = jmpscale.cast((params, X), jnp.float16)
    small = 1 - jnp.cos(jnp.float16(0.002) * (x @ half["a"]))
    return jnp.mean((1e6 * small.astype(jnp.float32)) ** 2)


@jax.custom_vjp
def _clip_cotangent(x):
    return x


_clip_cotangent.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-2, 1e-2),))


def with_clip_in_a_derivative_rule(params):
    return in_float16(jax.tree.map(_clip_cotangent, params))


# --- gradients: functions of a scaler, parameters and perhaps a batch, which return the loss and its gradients ---

GRADIENTS = jmpscale.value_and_grad(loss_fn)


def changed(change):
    """Returns right gradients after a change of each leaf."""

    def gradients(scaler, params):
        loss, grads = GRADIENTS(scaler, params)
        return loss, jax.tree.map(change, grads)

    return gradients


def by_hand(scaled_loss, unscale, loss_fn=loss_fn):
    """Returns the gradients of a function that scales the loss, after another one that unscales them."""

    def gradients(scaler, params):
        grads = jax.grad(lambda params: scaled_loss(scaler, loss_fn(params), params))(params)
        return loss_fn(params), unscale(scaler, grads)

    return gradients


def scaled(scaler, loss, params):
    return jmpscale.scale(scaler, loss)


def scaled_without_penalty(scaler, loss, params):
    return jmpscale.scale(scaler, loss) + 1e-4 * jnp.sum(params["a"] ** 2)


def not_unscaled(scaler, grads):
    return grads


def loss_unscaled_by_hand(scaler, params):
    """Returns a loss that is NaN at an infinite scale."""
    loss, grads = jmpscale.value_and_grad(large_loss)(scaler, params)
    return jmpscale.scale(scaler, loss) / jmpscale.get_scaler(scaler).loss_scale, grads


def scaled_twice(scaler, params):
    return jmpscale.value_and_grad(lambda params: jmpscale.scale(scaler, loss_fn(params)))(scaler, params)


def scaled_by_another_scaler(scaler, params):
    return GRADIENTS(jmpscale.dynamic(), params)


def never_scaled(scaler, params):
    return jax.value_and_grad(loss_fn)(params)


def scaled_by_a_number(scaler, params):
    """Takes gradients of a small loss, of which the number, which no scaler knows, is too small."""
    small = jmpscale.scaled_backward(lambda params: 2.0**-20 * loss_fn(params), 2.0**2)
    return jax.value_and_grad(small)(params)


def by_scaled_backward(scaler, params):
    return jax.value_and_grad(jmpscale.scaled_backward(loss_fn, scaler))(params)


def _of_small_loss(scaler, params):
    return jmpscale.value_and_grad(lambda params: 1e-9 * in_float16(params))(scaler, params)


def in_float16_after_unscaling(scaler, params):
    loss, grads = _of_small_loss(scaler, params)
    return loss, jmpscale.cast(jmpscale.cast(grads, jnp.float16), jnp.float32)


def of_jax_in_part(scaler, params):
    """Takes the gradient of the last layer from JAX."""
    loss, grads = _of_small_loss(scaler, params)
    return loss, grads | {"b": jax.grad(lambda params: 1e-9 * in_float16(params))(params)["b"]}


def of_finite_micro_batches(scaler, params):
    """Sums the gradients of the micro-batches that are finite."""
    loss, grads = jax.vmap(lambda x, y: GRADIENTS(scaler, params, x, y))(X.reshape(4, 8, -1), Y.reshape(4, 8, -1))
    finite = jax.vmap(jmpscale.all_finite)(grads)
    return loss.mean(), jax.tree.map(lambda g: jnp.where(finite[:, None, None], g, 0).sum(0), grads)


def with_unused_gradient(scaler, params):
    """Differentiates a value that the step does not train."""

    def loss_of_more(more):
        return loss_fn(more | {"a": more["a"] * more["frozen"][:, None]})

    loss, grads = jmpscale.value_and_grad(loss_of_more)(scaler, params | {"frozen": jnp.ones(8)})
    return loss, {name: grads[name] for name in params}


def in_shard_map(opt_state, params):
    """Takes gradients whose types show that they are equal on all devices."""

    @partial(jax.shard_map, mesh=meshes.make_mesh(d=8), in_specs=(P(), P(), P("d"), P("d")), out_specs=P())
    def on_devices(opt_state, params, x, y):
        return jmpscale.value_and_grad(lambda params: jax.lax.pmean(loss_fn(params, x, y), "d"))(opt_state, params)

    return on_devices(opt_state, params, X, Y)


# --- steps with an optimizer of optax that contains the wrapper ---


def wrapper(tx=WRAPPED, gradients=GRADIENTS, params=PARAMS):
    def step(state):
        params, opt_state = state
        loss, grads = gradients(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))


def inside_multi_steps():
    step, state = wrapper(optax.MultiSteps(WRAPPED, 2))
    return lambda state: step(step(state)), state


def update_after_wrapper():
    """Returns a step that also updates the scaler of the wrapper."""
    step, state = wrapper()

    def wrong(state):
        params, opt_state = step(state)
        scaler = opt_state.scaler
        return params, opt_state._replace(scaler=jmpscale.update(scaler, scaler.step_applied))

    return wrong, state


def sam_in_opaque_mode():
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


def loop(length, gradients=GRADIENTS):
    step, state = wrapper(gradients=gradients)
    return lambda state: jax.lax.scan(lambda state, _: (step(state), None), state, length=length)[0], state


def loop_with_one_scale(length):
    """Returns a loop whose gradients are scaled by the scale from before it."""

    def whole_step(state):
        step, _ = wrapper(gradients=lambda _, params: GRADIENTS(state[1], params))
        return jax.lax.scan(lambda carry, _: (step(carry), None), state, length=length)[0]

    return whole_step, wrapper()[1]


def update_of_half_copy(dtype):
    """Returns a step that adds updates to a copy of the parameters in half precision."""
    step, state = wrapper(jmpscale.with_loss_scaling(optax.sgd(1e-2), jmpscale.dynamic(2.0**12)))

    def wrong(state):
        params, (new, opt_state) = state[0], step(state)
        rounded = jmpscale.cast(jmpscale.cast(params, dtype), jnp.float32)
        new = jax.tree.map(lambda r, new, old: r + (new - old), rounded, new, params)
        return jmpscale.select_tree(opt_state.scaler.step_applied, new, params), opt_state

    return wrong, state


def rounds_parameters():
    def rounded(params):
        return jmpscale.cast(jmpscale.cast(params, jnp.float16), jnp.float32)

    step, (params, opt_state) = wrapper(jmpscale.with_loss_scaling(optax.sgd(1e-3)))

    def wrong(state):
        params, opt_state = step(state)
        return rounded(params), opt_state

    return wrong, (rounded(params), opt_state)


def in_bfloat16(inner):
    """Returns a step with parameters in bfloat16."""
    return wrapper(jmpscale.with_loss_scaling(inner, jmpscale.static(1.0)), params=jmpscale.cast(PARAMS, jnp.bfloat16))


def copy_of_masters(dtype, update_from=lambda master, copy: master):
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


def scale_of_another_leaf():
    """Returns a step whose loss is scaled by a number in the state that is not the scaler's."""

    def step(state):
        params, opt_state = state["rest"]
        grads = jax.grad(lambda params: state["scale"] * loss_fn(params))(params)
        grads = jmpscale.unscale(jmpscale.static(1.0)._replace(loss_scale=state["scale"]), grads)
        updates, opt_state = WRAPPED.update(grads, opt_state, params, value=loss_fn(params))
        return {"scale": state["scale"], "rest": (optax.apply_updates(params, updates), opt_state)}

    return step, {"scale": jnp.float32(2.0**10), "rest": (PARAMS, WRAPPED.init(PARAMS))}


# --- steps with the wrapper, and with other leaves in the state ---


def average_of_parameters(is_gated):
    """Returns a step with an average that is still a copy of the parameters after a step at a learning rate of zero."""
    step, state = wrapper(jmpscale.with_loss_scaling(optax.sgd(optax.linear_schedule(0, 1e-3, 10))))

    def with_average(state):
        average, state = state
        params, opt_state = step(state)
        applied = jmpscale.get_scaler(opt_state).step_applied if is_gated else True
        new = jmpscale.apply_if(applied, partial(optax.incremental_update, params, step_size=0.5), average)
        return new, (params, opt_state)

    return with_average, (PARAMS, state)


def average_in_bfloat16():
    """Returns a step with an average of the parameters in bfloat16, and its state after 20 steps."""
    step, (params, opt_state) = wrapper(jmpscale.with_loss_scaling(optax.adam(3e-3), jmpscale.static(1.0)))

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


def average_of_outputs(is_applied):
    """Returns a step with an average that is gated by a function of the old scaler, the new one and the loss."""
    step, state = wrapper()

    def with_average(state):
        mean, (params, opt_state) = state
        new = step((params, opt_state))
        applied = is_applied(jmpscale.get_scaler(opt_state), jmpscale.get_scaler(new), loss_fn(params))
        return jmpscale.apply_if(applied, lambda _: jnp.mean((X @ params["a"]) ** 2), mean), new

    return with_average, (jnp.ones(()), state)


def average_by_the_flag_of_the_step_before(mean=1.0):
    step, state = wrapper()

    def with_average(state):
        mean, state = state
        applied = jmpscale.get_scaler(state).step_applied
        return jmpscale.apply_if(applied, lambda mean: 0.9 * mean + 1.0, mean), step(state)

    return with_average, (jnp.float32(mean), state)


def copies_in_the_first_step():
    """Returns a step that copies the parameters in the first step alone, even if it is skipped."""
    step, state = wrapper()

    def with_copy(state):
        copy, (params, opt_state) = state
        is_first = opt_state.inner_state[0].count == 0
        return jax.tree.map(partial(jnp.where, is_first), params, copy), step((params, opt_state))

    return with_copy, (jax.tree.map(jnp.zeros_like, PARAMS), state)


def with_count():
    """Returns a step whose state also has a statistic, a key and a Python number that change at every call."""
    step, state = wrapper()

    @jax.jit
    def whole_step(state):
        mean, key, count, state = state
        return 0.9 * mean + 1.0, jax.random.fold_in(key, 0), count + 1, step(state)

    return whole_step, (jnp.ones(()), jax.random.key(0), 0, state)


def with_other_leaves():
    """Returns a step whose state also has infinities, a Python number that it reads, and one that becomes an array."""
    step, state = wrapper()

    def whole_step(state):
        return *state[:2], jnp.asarray(state[2]), step(state[3]) if state[1] else None

    return whole_step, (np.array([-np.inf, 0.0]), True, 3, state)


# --- steps with the functional API ---


def functional(finish, gradients=GRADIENTS, scaler=None):
    """Returns a step whose end is a function of parameters, optimizer state, scaler, loss, gradients and the flag."""

    def step(state):
        params, opt_state, scaler = state
        loss, grads = gradients(scaler, params)
        return finish(params, opt_state, scaler, loss, grads, jmpscale.all_finite((loss, grads)))

    return step, (PARAMS, ADAM.init(PARAMS), scaler or jmpscale.dynamic())


def _apply(flag, grads, params, opt_state):
    return jmpscale.apply_if(flag, jmpscale.optax_step(ADAM, grads), params, opt_state)


def right(params, opt_state, scaler, loss, grads, flag):
    return *_apply(flag, grads, params, opt_state), jmpscale.update(scaler, flag, loss=loss)


def with_flag(function, gradients=GRADIENTS):
    """Returns a step whose flag is a function of the scaler, the loss and the gradients."""

    def finish(params, opt_state, scaler, loss, grads, _):
        return right(params, opt_state, scaler, loss, grads, function(scaler, loss, grads))

    return functional(finish, gradients)


def with_flag_of_each(is_finite):
    """Returns a step whose flag is the conjunction of a function of each gradient."""
    return with_flag(lambda scaler, loss, grads: jnp.stack(list(map(is_finite, jax.tree.leaves(grads)))).all())


def of_scaled_loss(scaler, loss, grads):
    return jnp.isfinite(jmpscale.scale(scaler, loss))


def with_scaler(change):
    """Returns a step with fields of the new scaler changed by a function of the old scaler and the new one."""

    def finish(params, opt_state, scaler, loss, grads, flag):
        *others, new = right(params, opt_state, scaler, loss, grads, flag)
        return *others, new._replace(**change(scaler, new))

    return functional(finish)


def smaller_scale(old, new):
    return {"loss_scale": jnp.minimum(old.loss_scale, new.loss_scale)}


def limited_scale(old, new):
    return {"loss_scale": jnp.minimum(new.loss_scale, 2.0**16)}


def averaged_scale(old, new):
    return {"loss_scale": jnp.where(new.loss_scale < old.loss_scale, 0.95 * old.loss_scale, new.loss_scale)}


def unscaled_twice(params, opt_state, scaler, loss, grads, flag):
    return right(params, opt_state, scaler, loss, jmpscale.unscale(scaler, grads), flag)


def unscaled_by_the_new_scaler():
    def step(state):
        params, opt_state, old = state
        grads = jax.grad(lambda params: jmpscale.scale(old, loss_fn(params)))(params)
        new = jmpscale.update(old, jmpscale.all_finite(grads))
        grads, flag = jmpscale.unscale_and_check(new, grads)
        return *_apply(flag, grads, params, opt_state), new

    return step, functional(right)[1]


def not_gated(params, opt_state, scaler, loss, grads, flag):
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jmpscale.update(scaler, flag, loss=loss)


def updated_twice(params, opt_state, scaler, loss, grads, flag):
    *others, new = right(params, opt_state, scaler, loss, grads, flag)
    return *others, jmpscale.update(new, flag, loss=loss)


def old_scaler(params, opt_state, scaler, loss, grads, flag):
    return *_apply(flag, grads, params, opt_state), scaler


def update_inside_apply_if(params, opt_state, scaler, loss, grads, flag):
    def step(params, opt_state, scaler):
        return *jmpscale.optax_step(ADAM, grads)(params, opt_state), jmpscale.update(scaler, flag)

    return jmpscale.apply_if(flag, step, params, opt_state, scaler)


def updates_only_if_not_finite(params, opt_state, scaler, loss, grads, flag):
    new = jax.lax.cond(flag, lambda: scaler, lambda: jmpscale.update(scaler, flag, loss=loss))
    return *_apply(flag, grads, params, opt_state), new


def flag_of_an_earlier_step(params, opt_state, scaler, loss, grads, flag):
    return *_apply(scaler.step_applied, grads, params, opt_state), jmpscale.update(scaler, flag, loss=loss)


def statistics_in_the_loss(params, opt_state, scaler, loss, grads, flag):
    logs = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return right(params, opt_state, scaler, logs, grads, flag)


def sam():
    """Returns a step that takes both gradients of sharpness-aware minimization, and checks both."""

    def finish(params, opt_state, scaler, loss, first, _):
        factor = 0.1 / optax.tree.norm(first)
        _, grads = GRADIENTS(scaler, jax.tree.map(lambda w, g: w + factor * g, params, first))
        return right(params, opt_state, scaler, loss, grads, jmpscale.all_finite((loss, first, grads)))

    return functional(finish)


def with_sums():
    """Returns a step that adds gradients to sums in the state, and resets them after a skip, too."""

    def step(state):
        params, opt_state, scaler, sums = state
        for batch in zip(jnp.split(X, 2), jnp.split(Y, 2), strict=True):
            loss, grads = GRADIENTS(scaler, params, *batch)
            sums = jax.tree.map(jnp.add, sums, grads)
        new = right(params, opt_state, scaler, loss, sums, jmpscale.all_finite(sums))
        return *new, jax.tree.map(jnp.zeros_like, sums)

    return step, (*functional(right)[1], jax.tree.map(jnp.zeros_like, PARAMS))


# --- steps without an optimizer ---


def _descend(params, grads, rate):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def counts_by_finite_steps():
    def step(state):
        params, scaler = state
        loss, grads = GRADIENTS(scaler, params)
        flag = jmpscale.all_finite(grads)
        rate = jnp.minimum(scaler.finite_steps, 10)  # zero in the first step
        params = jmpscale.apply_if(flag, lambda params: _descend(params, grads, rate), params)
        return params, jmpscale.update(scaler, flag, loss=loss)

    return step, (PARAMS, jmpscale.dynamic())


def flag_of_one_part():
    """Returns a step whose last layer has a gate of its own, about which `update` is not told."""

    def step(state):
        params, scaler = state
        _, grads = jmpscale.value_and_grad(lambda params: 2.0**10 * in_float16(params))(scaler, params)
        flags = {name: jmpscale.all_finite(grads[name]) for name in params}
        params = {
            name: jmpscale.apply_if(flags[name], lambda w, g: (w - 1e-6 * g, g), params[name], grads[name])[0]
            for name in params
        }
        return params, jmpscale.update(scaler, flags["a"])

    return step, (PARAMS, jmpscale.dynamic())


def flag_of_part_of_many(count, is_checked=lambda i: True):
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
        params = jmpscale.apply_if(flag, lambda params: _descend(params, grads, 1e-3), params)
        return params, jmpscale.update(scaler, flag, loss=loss)

    return step, (params, jmpscale.dynamic())


def flag_of_scaled_gradients(scaler, *, unscales_first):
    """Returns a step that takes the flag of the scaled gradients, or of the unscaled ones."""

    def step(state):
        params, scaler = state
        loss, grads = jax.value_and_grad(lambda params: jmpscale.scale(scaler, loss_fn(params)))(params)
        unscaled = jmpscale.unscale(scaler, grads)
        flag = jmpscale.all_finite((loss, unscaled if unscales_first else grads))
        new = _descend(params, unscaled, 1e-2)
        return jmpscale.select_tree(flag, new, params), jmpscale.update(scaler, flag, loss=loss_fn(params))

    return step, (PARAMS, scaler)


def dual_averaging():
    """Returns a step whose parameters are a function of the sum of all gradients."""

    def step(state):
        params, total, scaler = state
        loss, grads = GRADIENTS(scaler, params)
        flag = jmpscale.all_finite((loss, grads))
        total = jmpscale.select_tree(flag, jax.tree.map(jnp.add, total, grads), total)
        return _descend(PARAMS, total, 0.1), total, jmpscale.update(scaler, flag, loss=loss)

    return step, (PARAMS, jax.tree.map(jnp.zeros_like, PARAMS), jmpscale.dynamic())


def copy_for_evaluation(is_gated):
    """Returns a step that also returns a copy of the parameters, or of the parameters as they are without the gate."""

    def step(state):
        _, params, scaler = state
        loss, grads = GRADIENTS(scaler, params)
        flag = jmpscale.all_finite((loss, grads))
        raw = _descend(params, grads, 1e-2)
        new = jmpscale.select_tree(flag, raw, params)
        return jax.tree.map(lambda p: 1.0 * p, new if is_gated else raw), new, jmpscale.update(scaler, flag, loss=loss)

    return step, (PARAMS, PARAMS, jmpscale.dynamic())


# --- a step with two scalers ---


def gan(gradients=lambda grads: grads, scaler_of_generator=1, gate=True):
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
