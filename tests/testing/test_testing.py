"""jmpscale.testing: each tool finds or plants a fault, and its message names the leaf."""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import assert_replicated, check_step
from jmpscale.testing._first_difference import first_difference

import meshes
import worker
from arrays import normal

# --- check_step ---

X, Y = normal(0, 32, 8), normal(1, 32, 1)
PARAMS = {"inner": normal(2, 8, 16, scale=1 / 3), "outer": normal(3, 16, 1, scale=1 / 4)}
ADAM = optax.adamw(1e-3)


def _loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["inner"]) @ params["outer"] - y) ** 2)


def _loss_by_hand(params, x, y):
    half, x = jmpscale.cast((params, x), jnp.float16)
    return jnp.mean(((jnp.tanh(x @ half["inner"]) @ half["outer"]).astype(jnp.float32) - y) ** 2)


def _of_two_magnitudes(params, x, y):
    half, x = jmpscale.cast((params, x), jnp.float16)
    return jnp.mean((x @ half["inner"]).astype(jnp.float32)) + 2.0**-36 * jnp.mean(half["outer"].astype(jnp.float32))


def _normalized(params, x, y):
    """Computes a loss to which a bias contributes rounding noise only."""
    half, x = jmpscale.cast((params, x), jnp.float16)
    hidden = x @ half["inner"] + half["outer"].T
    hidden = (hidden - hidden.mean(0, keepdims=True)) / (hidden.std(0, keepdims=True) + jnp.float16(0.1))
    return jnp.mean((hidden.astype(jnp.float32).sum(1, keepdims=True) - y) ** 2)


@jax.custom_vjp
def _kernel(x):
    """Returns its argument; the derivative is a kernel in float16."""
    return x


def _run_kernel(_, g):
    out = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(g.shape, jnp.float16), g.astype(jnp.float16))
    return (out.astype(g.dtype),)


_kernel.defvjp(lambda x: (x, None), _run_kernel)


def _with_kernel(params, x, y):
    return 2.0**-14 * _loss(jax.tree.map(_kernel, params), x, y)


def _rounding(params, x, y):
    """Computes a small difference of cosines, which float16 rounds to zero."""
    half, x = jmpscale.cast((params, x), jnp.float16)
    small = 1 - jnp.cos(jnp.float16(0.002) * (x @ half["inner"]))
    return jnp.mean((1e6 * small.astype(jnp.float32)) ** 2)


LOSSES = {"autocast": jmpscale.autocast(_loss), "by hand": _loss_by_hand, "float32": _loss}


def _wrapper(loss_fn, inner=ADAM, gradients=jmpscale.value_and_grad, scaler=None, **options):
    """Returns a step with the wrapper, which donates its state, and the state."""
    tx = jmpscale.with_loss_scaling(inner, scaler, **options)

    def step(state):
        params, opt_state = state
        loss, grads = gradients(loss_fn)(opt_state, params, X, Y)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step, donate_argnums=0), (PARAMS, tx.init(PARAMS))


def _functional(loss_fn, flag=lambda scaler, loss, grads: jmpscale.all_finite(grads), scaler=None):
    def step(state):
        params, opt_state, scaler = state
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, X, Y)
        finite = flag(scaler, loss, grads)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, grads), params, opt_state)
        return params, opt_state, jmpscale.update(scaler, finite, loss=loss)

    return jax.jit(step), (PARAMS, ADAM.init(PARAMS), scaler or jmpscale.dynamic())


def _with_sums(loss_fn):
    """Returns a step that adds gradients to sums in the state, and resets them after a skip, too."""

    def step(state):
        params, opt_state, scaler, sums = state
        for batch in zip(jnp.split(X, 2), jnp.split(Y, 2), strict=True):
            loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, *batch)
            sums = jax.tree.map(jnp.add, sums, grads)
        finite = jmpscale.all_finite(sums)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, sums), params, opt_state)
        return params, opt_state, jmpscale.update(scaler, finite, loss=loss), jax.tree.map(jnp.zeros_like, sums)

    return jax.jit(step), (*_functional(loss_fn)[1], jax.tree.map(jnp.zeros_like, PARAMS))


def _not_gated(loss_fn):
    def step(state):
        params, opt_state, scaler = state
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, X, Y)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        scaler = jmpscale.update(scaler, jmpscale.all_finite(grads), loss=loss)
        return optax.apply_updates(params, updates), opt_state, scaler

    return jax.jit(step), _functional(loss_fn)[1]


def _loses_scaler(loss_fn):
    step, state = _functional(loss_fn)
    return lambda state: (*step(state)[:2], state[2]), state


def _three_steps(loss_fn):
    step, state = _wrapper(loss_fn)
    return jax.jit(lambda state: jax.lax.scan(lambda state, _: (step(state), None), state, length=3)[0]), state


def _four_steps_with_one_scale(loss_fn):
    """Returns a loop whose gradients are scaled by the scale from before it."""
    tx = jmpscale.with_loss_scaling(ADAM)

    def loop(state):
        def step(carry, _):
            params, opt_state = carry
            loss, grads = jmpscale.value_and_grad(loss_fn)(state[1], params, X, Y)
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)
            return (optax.apply_updates(params, updates), opt_state), None

        return jax.lax.scan(step, state, length=4)[0]

    return jax.jit(loop), (PARAMS, tx.init(PARAMS))


def _with_other_leaves(loss_fn):
    """Returns a step whose state also has infinities, a Python number that it reads, and one that becomes an array."""
    step, state = _wrapper(loss_fn)

    def whole_step(state):
        return *state[:2], jnp.asarray(state[2]), step(state[3]) if state[1] else None

    return whole_step, (np.array([-np.inf, 0.0]), True, 3, state)


def _unscaled_by_the_new_scaler(loss_fn):
    def step(state):
        params, opt_state, old = state
        grads = jax.grad(lambda params: jmpscale.scale(old, loss_fn(params, X, Y)))(params)
        new = jmpscale.update(old, jmpscale.all_finite(grads))
        grads, finite = jmpscale.unscale_and_check(new, grads)
        return *jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, grads), params, opt_state), new

    return jax.jit(step), _functional(loss_fn)[1]


def _puts_scale_back(loss_fn):
    step, state = _functional(loss_fn)

    def wrong(state):
        *others, scaler = step(state)
        return *others, scaler._replace(loss_scale=state[2].loss_scale)

    return wrong, state


def _counts_by_finite_steps(loss_fn):
    def step(state):
        params, scaler = state
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, X, Y)
        finite = jmpscale.all_finite(grads)
        rate = 0.01 * jnp.minimum(scaler.finite_steps, 10)  # zero in the first step
        params = jmpscale.apply_if(finite, lambda p: jax.tree.map(lambda p, g: p - rate * g, p, grads), params)
        return params, jmpscale.update(scaler, finite, loss=loss)

    return jax.jit(step), (PARAMS, jmpscale.dynamic())


def _with_flag_of_one_part(loss_fn):
    """Returns a step whose last layer has a gate of its own, about which `update` is not told."""

    def step(state):
        params, scaler = state
        _, grads = jmpscale.value_and_grad(lambda *args: 2.0**10 * loss_fn(*args))(scaler, params, X, Y)
        flags = {name: jmpscale.all_finite(grads[name]) for name in params}
        params = {
            name: jmpscale.apply_if(flags[name], lambda w, g: (w - 1e-6 * g, g), params[name], grads[name])[0]
            for name in params
        }
        return params, jmpscale.update(scaler, flags["inner"])

    return jax.jit(step), (PARAMS, jmpscale.dynamic())


def _with_statistics_in_the_loss(loss_fn):
    def step(state):
        params, opt_state, scaler = state
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, X, Y)
        finite = jmpscale.all_finite(grads)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, grads), params, opt_state)
        logs = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return params, opt_state, jmpscale.update(scaler, finite, loss=logs)

    return jax.jit(step), _functional(loss_fn)[1]


def _with_count(loss_fn):
    """Returns a step whose state also has a statistic, a key and a Python number that change at every call."""
    step, state = _wrapper(loss_fn)

    @jax.jit
    def whole_step(state):
        mean, key, count, state = state
        return 0.9 * mean + 1.0, jax.random.fold_in(key, 0), count + 1, step(state)

    return whole_step, (jnp.ones(()), jax.random.key(0), 0, state)


def _changed(change):
    """Returns a `value_and_grad` whose gradients a function changes."""

    def gradients(loss_fn):
        def grad_fn(*args):
            loss, grads = jmpscale.value_and_grad(loss_fn)(*args)
            return loss, jax.tree.map(change, grads)

        return grad_fn

    return gradients


def _by_hand(scaled_loss, unscale):
    """Returns a `value_and_grad` that consists of a function for the scaled loss, and one for its gradients."""

    def gradients(loss_fn):
        def grad_fn(scaler, params, *batch):
            grads = jax.grad(lambda params: scaled_loss(scaler, loss_fn(params, *batch), params))(params)
            return loss_fn(params, *batch), unscale(scaler, grads)

        return grad_fn

    return gradients


def _unscaled_by_hand(loss_fn):
    """Returns a `value_and_grad` whose loss is unscaled by hand, so it is NaN at an infinite scale."""

    def grad_fn(scaler, *args):
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, *args)
        return jmpscale.scale(scaler, loss) / jmpscale.get_scaler(scaler).loss_scale, grads

    return grad_fn


def _small(loss_fn):
    return lambda *args: 1e-9 * loss_fn(*args)


def _of_jax_in_part(loss_fn):
    """Takes the gradient of the last layer from JAX."""

    def grad_fn(scaler, *args):
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, *args)
        return loss, grads | {"outer": jax.grad(loss_fn)(*args)["outer"]}

    return grad_fn


def _of_micro_batches(loss_fn):
    """Sums the gradients of the micro-batches that are finite."""

    def grad_fn(scaler, params, x, y):
        loss, grads = jax.vmap(lambda x, y: jmpscale.value_and_grad(loss_fn)(scaler, params, x, y))(
            x.reshape(4, 8, -1), y.reshape(4, 8, -1)
        )
        finite = jax.vmap(jmpscale.all_finite)(grads)
        return loss.mean(), jax.tree.map(lambda g: jnp.where(finite[:, None, None], g, 0).sum(0), grads)

    return grad_fn


@jax.custom_vjp
def _clip_cotangent(x):
    return x


_clip_cotangent.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-2, 1e-2),))


def _with_flag_of_the_step_before(loss_fn):
    """Returns a step that gates an average by the flag of the step before."""
    step, state = _wrapper(loss_fn)

    @jax.jit
    def whole_step(state):
        mean, state = state
        applied = jmpscale.get_scaler(state).step_applied
        mean = jmpscale.apply_if(applied, lambda mean: 0.9 * mean + 1.0, mean)
        return mean, step(state)

    return whole_step, (jnp.ones(()), state)


def _gates_average(is_applied, loss_fn):
    """Returns a step whose average is gated by a function of the old state, the new state and the loss."""
    step, state = _wrapper(loss_fn)

    @jax.jit
    def wrong(state):
        mean, (params, opt_state) = state
        new = step((params, opt_state))
        applied = is_applied(jmpscale.get_scaler(opt_state), jmpscale.get_scaler(new), loss_fn(params, X, Y))
        return jmpscale.apply_if(applied, lambda _: jnp.mean((X @ params["inner"]) ** 2), mean), new

    return wrong, (jnp.ones(()), state)


def _copies_in_the_first_step(loss_fn):
    """Returns a step that copies the parameters in the first step alone, even if it is skipped."""
    step, state = _wrapper(loss_fn)

    @jax.jit
    def wrong(state):
        copy, (params, opt_state) = state
        is_first = opt_state.inner_state[0].count == 0
        return jax.tree.map(partial(jnp.where, is_first), params, copy), step((params, opt_state))

    return wrong, (jax.tree.map(jnp.zeros_like, PARAMS), state)


def _rounds_parameters(loss_fn):
    def in_float16(params):
        return jmpscale.cast(jmpscale.cast(params, jnp.float16), jnp.float32)

    step, (params, opt_state) = _wrapper(loss_fn, optax.sgd(1e-4))

    def wrong(state):
        params, opt_state = step(state)
        return in_float16(params), opt_state

    return wrong, (in_float16(params), opt_state)


def _scaled_loss_is_finite(scaler, loss, grads):
    return jnp.isfinite(jmpscale.scale(scaler, loss))


def _scaled(scaler, loss, params):
    return jmpscale.scale(scaler, loss)


def _scaled_without_penalty(scaler, loss, params):
    return jmpscale.scale(scaler, loss) + 1e-4 * jnp.sum(params["inner"] ** 2)


RIGHT = {  # functions that return a step and its state for a loss function
    "wrapper": _wrapper,
    "wrapper: max_norm": partial(_wrapper, max_norm=1.0),
    "wrapper: MultiSteps": partial(_wrapper, inner=optax.MultiSteps(ADAM, 3)),
    "wrapper: clip inside": partial(_wrapper, inner=optax.chain(optax.clip(0.1), optax.sgd(0.1))),
    "wrapper: scale by hand": partial(_wrapper, gradients=_by_hand(_scaled, jmpscale.unscale)),
    "wrapper: loss unscaled by hand": lambda _: _wrapper(_loss, gradients=_unscaled_by_hand),
    "wrapper: large scale": lambda _: _wrapper(_loss, scaler=jmpscale.static(2.0**60)),
    "functional": _functional,
    "functional: small scale": partial(_functional, scaler=jmpscale.static(1e-6)),
    "three steps of which the first overflows at 2^126": lambda _: _three_steps(lambda *args: 7 * _loss(*args)),
    "three steps of which the second overflows after a growth": _three_steps,
    "infinities and a number in the state": _with_other_leaves,
    "bias before a normalization": lambda _: _wrapper(_normalized),
    "sums in the state": _with_sums,
    "kernel in float16": lambda _: _wrapper(_with_kernel, optax.sgd(0.1)),
    "gradients that are zero at smaller scales": lambda _: _wrapper(_of_two_magnitudes, optax.adam(0.1, eps=1e-20)),
}


def _rows(programs, default, others):
    """Returns parameters: each program with a loss by hand, and others; the programs in `default` run by default."""
    rows = [*((program, "by hand") for program in programs), *others]
    marks = [[] if row[0] in default and row not in others else [pytest.mark.full] for row in rows]
    found = [pytest.param(*row, marks=own) for row, own in zip(rows, marks, strict=True)]
    return pytest.mark.parametrize(("program", "loss"), found)


@pytest.mark.usefixtures("standard_promotion")
@_rows(RIGHT, {"wrapper"}, [("wrapper", "autocast"), ("wrapper", "float32")])
def test_check_step_accepts_a_right_step(program, loss):
    step, state = RIGHT[program](LOSSES[loss])
    check_step(step)(state)


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
def test_check_step_ignores_leaves(capsys):
    step, state = _with_count(LOSSES["autocast"])
    with pytest.raises(AssertionError, match=r"changed state\[0\]: 1.0 before, 1.9 after.*ignore='state\[0\]'"):
        check_step(step)(state)
    check_step(step, ignore="state[0]")(state)
    assert "state[1] (a random key), state[2] (a count) also changed" in capsys.readouterr().out
    check_step(step, ignore=["state[0]", "state[1]", "state[2]"])(state)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.full
def test_check_step_accepts_steps_of_flax_and_of_a_mesh():
    tx = jmpscale.with_loss_scaling(ADAM)

    def train_step(state):
        _, grads = jmpscale.value_and_grad(LOSSES["autocast"])(state.opt_state, state.params, X, Y)
        return state.apply_gradients(grads=grads)

    state = TrainState.create(apply_fn=_loss, params=PARAMS, tx=tx)
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


HIDDEN = "Something replaces infinity and NaN before the check"
RETURNED = "was not skipped at an infinite loss scale: it returned the scaler that it received"
DEPENDS = r"differs by .*% at a loss scale of 2\^-8\. Scale every term"
NARROW = "First run jmpscale.diagnose, .* parameters, unscaled gradients or averages of them are converted to float16"
PART = "was not skipped when a part of the unscaled gradients was infinite"
IN_FLOAT32 = "differs from the change in float32"
OF_ADAM = r"the change of state\[1\]\.inner_state\[0\]\.[mn]u"
WRONG = {  # as RIGHT, and the words of the message
    "lost scaler": (_loses_scaler, RETURNED),
    "not gated": (_not_gated, r"changed state\[0\]\['inner'\]: -?\d\S* before, nan after, at \[0, 0\]\. Gate it"),
    "never unscaled": (
        partial(_wrapper, gradients=_by_hand(_scaled, lambda _, grads: grads)),
        DEPENDS,
    ),
    "penalty": (
        partial(_wrapper, gradients=_by_hand(_scaled_without_penalty, jmpscale.unscale)),
        rf"\['inner'\] {DEPENDS}",
    ),
    "gradients of JAX": (
        partial(_wrapper, gradients=lambda fun: lambda _, *args: jax.value_and_grad(fun)(*args)),
        "at an infinite loss scale: the loss was not scaled",
    ),
    "flag of the scaled loss": (partial(_functional, flag=_scaled_loss_is_finite), HIDDEN),
    "flag of a large scaled loss": (
        lambda fun: _functional(lambda *args: 1e3 * fun(*args), flag=_scaled_loss_is_finite),
        HIDDEN,
    ),
    "unscaled by the new scaler": (_unscaled_by_the_new_scaler, r"differs by .*% if the scale grows after the step"),
    "scale that is put back": (_puts_scale_back, "the skipped step did not reduce the scale at"),
    "step count": (_counts_by_finite_steps, "do not count steps by its finite_steps"),
    "flag of one part": (_with_flag_of_one_part, rf"{PART}: the change of state\[0\]\['outer'\] .* 100%\. {HIDDEN}"),
    "loss with statistics": (
        _with_statistics_in_the_loss,
        "the loss passed to update is not finite at .*: pass the unscaled loss",
    ),
    "outer scaler": (_four_steps_with_one_scale, "4 steps were skipped at .* the scaler that the loop carries"),
    "part that is not scaled": (
        lambda fun: _wrapper(_small(fun), gradients=_of_jax_in_part),
        rf"{OF_ADAM}\['outer'\] {IN_FLOAT32} by 100% .*{NARROW}",
    ),
    "gradients in float16": (
        lambda fun: _wrapper(_small(fun), gradients=_changed(lambda g: g.astype(jnp.float16).astype(g.dtype))),
        f"{IN_FLOAT32} .*{NARROW}",
    ),
    "clip in a derivative rule": (
        lambda fun: _wrapper(lambda params, *batch: fun(jax.tree.map(_clip_cotangent, params), *batch), optax.sgd(0.1)),
        DEPENDS,
    ),
    "flag of the step before": (_with_flag_of_the_step_before, r"state\[0\] differs by 100% after a skipped step"),
    "gate by the scale": (
        partial(_gates_average, lambda old, new, _: new.loss_scale >= old.loss_scale),  # as for torch's GradScaler
        r"the skipped step changed state\[0\]: .* by step_applied",
    ),
    "gate by the loss": (
        partial(_gates_average, lambda _, __, loss: jnp.isfinite(loss)),
        r"the skipped step changed state\[0\]",
    ),
    "branch of the first step": (_copies_in_the_first_step, r"the skipped step changed state\[0\]\['inner'\]"),
    "average that is NaN": (
        lambda fun: (lambda step, state: (step, (jnp.array(jnp.nan), state[1])))(*_with_flag_of_the_step_before(fun)),
        r"state\[0\] contains NaN, .* Check an earlier state",
    ),
    "loss that rounds": (
        lambda _: _wrapper(_rounding, optax.sgd(0.1)),
        rf"state\[0\]\['inner'\] {IN_FLOAT32} .*\. First run jmpscale\.diagnose, which names the line",
    ),
    "parameters in float16": (_rounds_parameters, rf"state\[0\]\['outer'\] {IN_FLOAT32} .*{NARROW}"),
    "flag with a limit": (
        partial(_functional, flag=lambda _, __, grads: jmpscale.all_finite(grads) & (optax.tree.norm(grads) < 1e-6)),
        "the step is skipped in float32, .* other conditions",
    ),
    "inverted flag": (
        partial(_functional, flag=lambda _, __, grads: ~jmpscale.all_finite(grads)),
        r"the step was skipped at every loss scale\. .* the flag for update is inverted",
    ),
    "jnp.nan_to_num": (partial(_wrapper, gradients=_changed(jnp.nan_to_num)), HIDDEN),
    "clip": (partial(_wrapper, gradients=_changed(lambda g: jnp.clip(g, -1, 1))), rf"{PART}.*{HIDDEN}"),
    "micro-batches": (partial(_wrapper, gradients=_of_micro_batches), HIDDEN),
}


OTHERS = [("jnp.nan_to_num", "autocast"), ("never unscaled", "autocast"), ("gradients of JAX", "float32")]


@pytest.mark.filterwarnings("ignore:a loss was scaled", "ignore:the gradients are unscaled by the scaler")
@pytest.mark.usefixtures("standard_promotion")
@_rows(WRONG, {"clip"}, OTHERS)
def test_check_step_names_the_mistake(program, loss):
    create, words = WRONG[program]
    step, state = create(LOSSES[loss])
    with pytest.raises(AssertionError, match=words):
        check_step(step)(state)


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
def test_check_step_keeps_memory_spaces():
    step, state = _wrapper(_loss)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    device, host = map(place.with_memory_kind, ("device", "pinned_host"))
    check_step(lambda state: jax.device_put(step(jax.device_put(state, device)), host))(jax.device_put(state, host))


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
def test_check_step_compares_devices():
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), axis_name="d")

    def local(average, params, opt_state, x, y):
        loss, grads = average(jmpscale.value_and_grad(_loss)(opt_state, params, x, y))
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
    with pytest.raises(AssertionError, match=r"(?s)params\['inner'\] differs between devices.*jax\.lax\.pmean"):
        check(lambda grads: grads)


DIFFERENT = {  # two leaves, and the texts of the first elements that differ, and their place
    "scalars": (np.int32(0), np.int32(1), "0", "1", ""),
    "number and array": (1.0, jnp.float32(2.0), "1.0", "2.0", ""),
    "texts": ("a", "b", "a", "b", ""),
    "matrix": (jnp.ones((2, 3)), jnp.ones((2, 3)).at[1, 2].set(jnp.nan), "1.0", "nan", ", at [1, 2]"),
    "NaN in both": (np.array([np.nan, 1.0]), np.array([np.nan, 2.0]), "1.0", "2.0", ", at [1]"),
    "sign of zero": (np.array([0.0, 0.0]), np.array([0.0, -0.0]), "0.0", "-0.0", ", at [1]"),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16).at[1].set(3), "1", "3", ", at [1]"),
    "another dtype": (np.ones(2, np.float16), np.array([1.0, 2.0], np.float32), "1.0", "2.0", ", at [1]"),
    "booleans": (np.array([True, True]), np.array([True, False]), "True", "False", ", at [1]"),
    "key": (jax.random.key(0), jax.random.key(1), "0", "1", ", at [1]"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_first_difference_describes_one_element(name):
    one, other, *expected = DIFFERENT[name]
    assert list(first_difference(one, other)) == expected


# --- assert_replicated ---

PLACED = {  # each with an axis along which its shards are copies
    "w": (np.arange(1.0, 33.0, dtype=np.float32).reshape(8, 4), P("data"), "model"),
    "v": (np.arange(1.0, 33.0, dtype=np.float32).reshape(4, 8), P(None, "model"), "data"),
    "n": (np.float32(3.0), P(), "data"),
    "m": (np.float32(3.0), P(), "model"),
}


def _placed(name):
    x, spec, _ = PLACED[name]
    return jax.device_put(x, jax.NamedSharding(meshes.make_mesh(), spec))


def _drifted(x, spec, axis):
    """Returns an array whose sharding is replicated along `axis`, although the devices there hold different values."""

    def change(x):
        return jnp.where(jax.lax.axis_index(axis) == 1, -x, x)

    return jax.jit(jax.shard_map(change, mesh=meshes.make_mesh(), in_specs=spec, out_specs=spec, check_vma=False))(x)


def test_assert_replicated_accepts_equal_copies():
    state = {name: _placed(name) for name in PLACED}
    rows = jax.device_put(
        np.arange(16.0, dtype=np.float32).reshape(8, 2), jax.NamedSharding(meshes.make_mesh(), P("data", "model"))
    )
    all_axes = jax.device_put(
        np.arange(8.0, dtype=np.float32), jax.NamedSharding(meshes.make_mesh(), P(("data", "model")))
    )
    assert_replicated(state | {"rows": rows, "all_axes": all_axes, "numpy": np.ones(2), "key": jax.random.key(0)})
    assert_replicated(rows)
    assert_replicated({"matrix": all_axes.reshape(2, 4), "keys": jax.random.split(jax.random.key(1))})


@pytest.mark.parametrize("name", PLACED)
def test_assert_replicated_names_a_leaf_that_differs(name):
    state = {"a": np.ones(2), "b": _placed("w"), name: _drifted(*PLACED[name])}
    words = rf"tree\['{name}'\] differs between devices: -?[13]\.0 on \S+, -?[13]\.0 on [^ ,]+(, at \[0, 0\])?\. "
    with pytest.raises(AssertionError, match=words):
        assert_replicated(state)


def test_assert_replicated_compares_one_row_per_device():
    mesh = meshes.make_mesh(d=8)
    rows = jax.NamedSharding(mesh, P("d"))
    equal, different = jax.device_put((np.full((8, 2), 3.0), np.arange(8.0)), rows)
    assert_replicated({"w": equal, "n": equal[:, 0]})
    with pytest.raises(AssertionError, match=r"tree\['n'\] differs between devices: 0\.0 on .*, 1\.0 on .*, at \[0\]"):
        assert_replicated({"w": equal, "n": different})
    assert_replicated({"n": different, "other": jax.device_put(np.zeros(16), rows)})  # two rows for each device


def _on_two_processes(check, trees, monkeypatch):
    """Calls `check` in two threads as if in two processes; returns the errors. It raises if one waits for the other."""
    barrier, arrays = threading.Barrier(2, timeout=60), {}

    def gather(x):
        arrays[threading.current_thread().name] = x
        barrier.wait()
        gathered = np.stack([arrays["0"], arrays["1"]])
        barrier.wait()
        return gathered

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    errors = {}
    threads = [
        threading.Thread(target=lambda n=n: errors.update({n: worker.error_of(check, trees[n])}), name=str(n))
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [errors[0], errors[1]]


@pytest.mark.parametrize("name", worker.TREES)
def test_assert_replicated_raises_on_both_processes_or_on_neither(name, monkeypatch):
    make, words = worker.TREES[name]
    for error in _on_two_processes(assert_replicated, [make(0), make(1)], monkeypatch):
        assert error is None if words is None else words in (error or "")


def test_assert_replicated_compares_shards_of_other_processes(monkeypatch):
    """Simulates a second process, which holds other bits of one shard."""
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    other = np.where(x == 31, 30, x)
    equal, different = (jax.device_put(y, jax.NamedSharding(meshes.make_mesh(), P("data"))) for y in (x, other))
    assert _on_two_processes(assert_replicated, [{"w": equal}] * 2, monkeypatch) == [None, None]
    error = "AssertionError: tree['w'] differs between the processes 0 and 1. Give every process the same program"
    for found in _on_two_processes(assert_replicated, [{"w": equal}, {"w": different}], monkeypatch):
        assert found.startswith(error)
