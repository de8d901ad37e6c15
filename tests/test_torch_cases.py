"""The numeric tests of `torch.amp.GradScaler`, ported from PyTorch 2.13 (`test/test_torch.py`, `test_grad_scaling_*`).

torch is not needed: each run is compared with a control in JAX that scales nothing, at torch's tolerances
(rtol 1e-5, and atol 1e-7 unless a case says otherwise), and with the numbers in torch's own text.

| torch's test                | reproduced                    | deliberately different here                           |
|-----------------------------|-------------------------------|-------------------------------------------------------|
| `update_scale`              | scale and growth tracker      | -                                                     |
| `unscale`                   | the flag, the values          | dtypes mix in one call; float16 is returned as float32|
| `unscale_sparse`            | the same for BCOO             | float16 duplicates that add up past 65504 are widened |
|                             |                               | first, so the sum is finite and no step is skipped    |
| `scale`                     | nested losses, same structure | on one device: JAX shards an array, not a list        |
| `scale_will_not_overflow`   | scale, parameters stay finite | there is a max_scale, to which the scale is set where |
|                             |                               | torch keeps the one it had                            |
| `clipping`                  | clips at max_norm times scale | -                                                     |
| `clipping_separate_unscale` | unscales, then clips          | no order of calls to get wrong, hence no error for it |
| `penalty`                   | norm of a scaled gradient     | `unscale` is differentiable: nothing done by hand     |
| `accumulation`              | sums scaled micro-batches     | with the optax wrapper, unscaled ones                 |
| `multiple`                  | optimizers skip one by one    | functional API only: `with_loss_scaling` holds one    |
|                             |                               | scaler and skips the step of all parameters           |

torch has no limits. A port states its `min_scale`, 2^-14, far below any scale it meets; the default `max_scale` is far
above, except in `scale_will_not_overflow`, whose first scale of 1e38 is above 2^126, the largest valid one, and is
moved there.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import jmpscale

from cases import some_of_all

pytestmark = pytest.mark.once

MIN_SCALE = 2.0**-14
SKIPPED_BATCH = 2

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5)


# Single calls


def test_update_scale(variant):
    update = variant(jmpscale.update)
    state = jmpscale.dynamic(4.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2, min_scale=MIN_SCALE)
    seen = []
    for finite in [True, True, False]:
        state = update(state, jnp.array(finite))
        seen.append((state.loss_scale.item(), state.finite_steps.item()))
    assert seen == [(4.0, 1), (8.0, 0), (2.0, 0)]


FOUR = jmpscale.dynamic(4.0, min_scale=MIN_SCALE)
FULL, INF, NAN = (np.full((10, 10), 4.0, np.float32) for _ in range(3))
INF[2, 2], NAN[2, 2] = np.inf, np.nan


@pytest.mark.parametrize(
    ("grads", "finite"),
    [
        ((FULL, FULL), True),
        ((FULL, FULL.T), True),
        ((FULL, FULL[:, :5]), True),
        ((FULL[:, :5], FULL[:, :5]), True),
        ((FULL, INF), False),
        ((FULL, NAN), False),
        ((FULL, INF[:, :5]), False),
        ((FULL, NAN[:, :5]), False),
        ((INF, FULL[:, :5]), False),
        ((INF[:, :5], FULL[:, :5]), False),
    ],
)
def test_unscale(grads, finite, variant):
    unscaled, flag = variant(jmpscale.unscale_and_check)(FOUR, grads)
    assert flag.item() is finite
    for before, after in zip(*map(jax.device_get, (grads, unscaled)), strict=True):
        good = np.isfinite(before)
        assert_close(after[good], 1.0, atol=1e-7)
        assert not np.isfinite(after[~good]).any()


@pytest.mark.parametrize("bad_value", [jnp.inf, jnp.nan])
@pytest.mark.parametrize("bad_leaf", [None, 0, 1, 2, 3])
def test_unscale_of_mixed_dtypes(bad_value, bad_leaf, variant):
    grads = [x.copy() for x in (FULL, FULL[:, :5], FULL.astype(np.float16), FULL.astype(np.float16))]
    if bad_leaf is not None:
        grads[bad_leaf][2, 2] = bad_value
    unscaled, finite = variant(jmpscale.unscale_and_check)(FOUR, grads)
    assert finite.item() is (bad_leaf is None)
    for i, grad in enumerate(unscaled):
        assert grad.dtype == jnp.float32
        if i != bad_leaf:
            assert_close(grad, 1.0, atol=1e-7)


def _sparse_gradient(values, columns=(2, 0, 2), rows=(0, 1, 1), dtype=jnp.float32):
    indices = jnp.array(list(zip(rows, columns, strict=True)))
    return sparse.BCOO((jnp.array(values, dtype), indices), shape=(2, 3))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_unscale_sparse(dtype, transform):
    unscale_and_check = transform(jmpscale.unscale_and_check)
    grad, finite = unscale_and_check(FOUR, _sparse_gradient([16.0, 32.0, 64.0], dtype=dtype))
    assert finite
    assert_close(grad.todense(), [[0.0, 0.0, 4.0], [8.0, 0.0, 16.0]], atol=1e-7)
    for bad_value in [jnp.inf, jnp.nan]:
        _, finite = unscale_and_check(FOUR, _sparse_gradient([16.0, 32.0, bad_value], dtype=dtype))
        assert not finite


@pytest.mark.parametrize("loss_scale", [4.0, 1.0])  # torch's, and one at which the unscaled sum is too large as well
def test_sparse_float16_duplicates_do_not_overflow(loss_scale):
    grads = _sparse_gradient([64_000.0, 32.0, 64_000.0], rows=(0, 1, 0), dtype=jnp.float16)
    assert grads.todense()[0, 2] == jnp.inf, "torch adds the duplicates up in float16, and skips"
    grad, finite = jmpscale.unscale_and_check(jmpscale.dynamic(loss_scale, min_scale=MIN_SCALE), grads)
    assert finite
    want = np.array([[0.0, 0.0, 128_000.0], [32.0, 0.0, 0.0]]) / loss_scale
    assert_close(grad.todense(), want, atol=1e-7)


def test_scale(variant):
    def nested(t0, t1):
        return (t1, (t0, t1), [t0, (t1, t0)])

    four, eight = (jnp.full((), value, jnp.float32) for value in (4.0, 8.0))
    scaled = variant(jmpscale.scale)(jmpscale.dynamic(2.0, min_scale=MIN_SCALE), nested(four, four))
    assert scaled == nested(eight, eight)
    assert jax.tree.structure(scaled) == jax.tree.structure(nested(four, four))


# Training runs. torch's `_create_scaling_case`: two linear layers, SGD, four batches, mean squared error, and the
# gradient of the second layer's weight overwritten with inf at the third of them. The control skips that step.
# `test_the_common_run` is just that; the other tests change one thing in it, as torch's do.


def _layer(seed, inputs=8, outputs=8):
    draw = functools.partial(np.random.default_rng(seed).uniform, -(inputs**-0.5), inputs**-0.5)
    return {"w": jnp.array(draw((inputs, outputs)), jnp.float32), "b": jnp.array(draw(outputs), jnp.float32)}


def _normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _two_layers(seed):
    return [_layer(seed), _layer(seed + 1)]


def _predict(params, x):
    for one in params:
        x = x @ one["w"] + one["b"][None, :]
    return x


def _mean_squared_error(prediction, target):
    return jnp.mean((prediction - target) ** 2)


def _loss_of_batch(params, batch):
    return _mean_squared_error(_predict(params, batch[0]), batch[1])


SGD = optax.sgd(1.0)
MOMENTUM = optax.sgd(1.0, momentum=0.5)
BATCHES = list(_normal(2, 4, 2, 8, 8))


def _starting_scaler(enabled):
    if not SCALERS[enabled]:
        return jmpscale.disabled()
    return jmpscale.dynamic(128.0, growth_factor=2.0, growth_interval=1, min_scale=MIN_SCALE)


def _fill_with_inf(grads):
    """Overwrites the gradient of the last layer's weight."""
    *others, last = grads
    return [*others, last | {"w": jnp.full_like(last["w"], jnp.inf)}]


def _edit_cotangent(edit, params):
    """Returns `params`, and edits their gradient in the backward pass, as torch's tests overwrite `.grad`."""

    @jax.custom_vjp
    def identity(params):
        return params

    identity.defvjp(lambda params: (params, None), lambda _, grads: (edit(grads),))
    return identity(params)


class _Case(NamedTuple):
    """What a test changes in the common training run.

    Attributes:
      loss_fn: maps the scaler (None in the control), the parameters and a batch to the loss.
      edit_scaled: maps the scaler and the scaled gradients to new scaled gradients.
    """

    loss_fn: Any = lambda scaler, params, batch: _loss_of_batch(params, batch)
    edit_scaled: Any = lambda scaler, grads: grads
    optimizer: optax.GradientTransformation = SGD
    control_optimizer: optax.GradientTransformation = SGD
    params: Any = _two_layers(0)
    batches: Any = BATCHES


def _with_overflow(case, scaler, overflow):
    """Returns the loss of one step, whose scaled gradient is overwritten with inf if `overflow`, and then edited."""

    def edit(grads):
        new = jax.tree.map(functools.partial(jnp.where, overflow), _fill_with_inf(grads), grads)
        return case.edit_scaled(scaler, new)

    return lambda params, batch: case.loss_fn(scaler, _edit_cotangent(edit, params), batch)


def _functional_api(case, scaler):
    tx = case.optimizer
    params = case.params

    @jax.jit
    def train_step(params, opt_state, scaler, batch, overflow):
        loss_fn = _with_overflow(case, scaler, overflow)
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, batch)
        finite = jmpscale.all_finite(grads)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)
        return loss, params, opt_state, jmpscale.update(scaler, finite, loss=loss)

    opt_state = tx.init(params)
    for batch, overflow in _training_data(case, scaler):
        loss, params, opt_state, scaler = train_step(params, opt_state, scaler, batch, overflow)
        yield loss, params, opt_state, scaler


def _optax_wrapper(case, scaler):
    tx = jmpscale.with_loss_scaling(case.optimizer, scaler)
    params = case.params

    @jax.jit
    def train_step(params, opt_state, batch, overflow):
        loss_fn = _with_overflow(case, jmpscale.get_scaler(opt_state), overflow)
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return loss, optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch, overflow in _training_data(case, scaler):
        loss, params, opt_state = train_step(params, opt_state, batch, overflow)
        yield loss, params, opt_state.inner_state, jmpscale.get_scaler(opt_state)


def _training_data(case, scaler):
    """Yields batches, and whether the gradient overflows; in torch's runs without a scaler it does not."""
    for i, batch in enumerate(case.batches):
        yield batch, jnp.array(i == SKIPPED_BATCH and scaler.config.mode != "disabled")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _control_step(loss_fn, tx, params, opt_state, batch, overflow):
    loss, grads = jax.value_and_grad(lambda params: loss_fn(None, params, batch))(params)
    updates, new_opt_state = tx.update(grads, opt_state, params)
    trained = optax.apply_updates(params, updates), new_opt_state
    return loss, *jax.tree.map(functools.partial(jnp.where, overflow), (params, opt_state), trained)


def _control(case, scaler):
    params = case.params
    opt_state = case.control_optimizer.init(params)
    for batch, overflow in _training_data(case, scaler):
        loss, params, opt_state = _control_step(
            case.loss_fn, case.control_optimizer, params, opt_state, batch, overflow
        )
        yield loss, params, opt_state


# Each yields loss, parameters, optimizer state and scaler after each step.
APIS = {"functional": _functional_api, "optax": _optax_wrapper}
SCALERS = {"dynamic": True, "disabled": False}


def apis(*default):
    """Runs a test with an API and a scaler or a disabled one; all but `default`, pairs of names, with `--full`."""
    return pytest.mark.parametrize(("api", "enabled"), some_of_all(APIS, SCALERS, default=default))


def _assert_trains_as_the_control(case, api, scaler, atol=1e-7):
    """Compares losses, parameters and optimizer states at every step; returns the scalers after each."""
    scalers = []
    for got, want in zip(APIS[api](case, scaler), _control(case, scaler), strict=True):
        *results, after = got
        for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(want), strict=True):
            assert_close(x, y, atol=atol)
        scalers.append(after)
    return scalers


def _assert_one_skip_in_four(scalers, enabled):
    dynamic = SCALERS[enabled]
    assert [state.loss_scale.item() for state in scalers] == ([256.0, 512.0, 256.0, 512.0] if dynamic else [1.0] * 4)
    assert [state.skipped.item() for state in scalers] == ([0, 0, 1, 1] if dynamic else [0] * 4)
    assert [state.last_skip.item() for state in scalers] == ([0, 0, 1, 1] if dynamic else [0] * 4)


@pytest.mark.parametrize(
    ("optimizer", "api", "enabled"),
    some_of_all(
        ["sgd", "momentum"],
        APIS,
        SCALERS,
        default=[("momentum", "functional", "dynamic")],
    ),
)
def test_the_common_run(optimizer, api, enabled):
    optimizer = {"sgd": SGD, "momentum": MOMENTUM}[optimizer]
    case = _Case(optimizer=optimizer, control_optimizer=optimizer)
    _assert_one_skip_in_four(_assert_trains_as_the_control(case, api, _starting_scaler(enabled)), enabled)


MAX_NORM = 0.2
CLIPPED_SGD = optax.chain(optax.clip_by_global_norm(MAX_NORM), SGD)


@apis(("optax", "dynamic"))
def test_clipping(api, enabled):
    def clip_scaled(scaler, grads):
        return optax.clip_by_global_norm(MAX_NORM * scaler.loss_scale).update(grads, optax.EmptyState())[0]

    case = _Case(edit_scaled=clip_scaled, control_optimizer=CLIPPED_SGD)
    _assert_one_skip_in_four(_assert_trains_as_the_control(case, api, _starting_scaler(enabled), atol=1e-5), enabled)


@apis(("functional", "dynamic"))
def test_clipping_separate_unscale(api, enabled):
    case = _Case(optimizer=CLIPPED_SGD, control_optimizer=CLIPPED_SGD)
    _assert_one_skip_in_four(_assert_trains_as_the_control(case, api, _starting_scaler(enabled)), enabled)


def _norm(grads):
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grads)))


@apis(("functional", "dynamic"))
def test_penalty(api, enabled):
    def penalised_loss(scaler, params, batch):
        loss = _loss_of_batch(params, batch)
        if scaler is None:
            return loss + _norm(jax.grad(_loss_of_batch)(params, batch))
        scaled_grads = jax.grad(lambda params: jmpscale.scale(scaler, _loss_of_batch(params, batch)))(params)
        return loss + _norm(jmpscale.unscale(scaler, scaled_grads))

    case = _Case(loss_fn=penalised_loss)
    _assert_one_skip_in_four(_assert_trains_as_the_control(case, api, _starting_scaler(enabled)), enabled)


@pytest.mark.usefixtures("standard_promotion")  # optax.adam relies on it
@pytest.mark.parametrize("api", some_of_all(APIS, default=[("optax",)]))
def test_scale_will_not_overflow(api):
    largest = jmpscale.dynamic(
        2.0**126, growth_factor=2.0**4, growth_interval=1, min_scale=MIN_SCALE, max_scale=2.0**126
    )
    adam = optax.adam(1e-3)
    # Inputs so small that the gradients times 2^126 are finite: torch's are left to chance.
    batch = 0.1 * _normal(3, 1, 5), 1e-30 * _normal(4, 1, 1)
    case = _Case(optimizer=adam, control_optimizer=adam, params=[_layer(0, 5, 1)], batches=[batch])
    [after] = _assert_trains_as_the_control(case, api, largest)
    assert after.loss_scale == 2.0**126
    assert after.skipped == 0, "the scale would have grown after this step"


# Runs whose steps have another form


def _sgd_step(grads):
    return lambda params: optax.apply_updates(params, SGD.update(grads, SGD.init(params))[0])


def _accumulating_functional_api(scaler):
    """Sums scaled gradients, as torch does, and unscales the sum."""

    @jax.jit
    def train_step(params, scaler, micro_batches):
        scaled = [
            jax.grad(lambda params, batch: jmpscale.scale(scaler, _loss_of_batch(params, batch) / 2))(params, batch)
            for batch in micro_batches
        ]
        grads, finite = jmpscale.unscale_and_check(scaler, jax.tree.map(jnp.add, *scaled))
        params = jmpscale.apply_if(finite, _sgd_step(grads), params)
        return params, jmpscale.update(scaler, finite)

    params = _two_layers(0)
    for micro_batches in [BATCHES[:2], BATCHES[2:]]:
        params, scaler = train_step(params, scaler, micro_batches)
        yield params, scaler


def _accumulating_optax_wrapper(scaler):
    tx = jmpscale.with_loss_scaling(SGD, scaler)

    @jax.jit
    def train_step(params, opt_state, micro_batches):
        value_and_grad = jmpscale.value_and_grad(_loss_of_batch)
        grads = [value_and_grad(opt_state, params, batch)[1] for batch in micro_batches]
        updates, opt_state = tx.update(jax.tree.map(lambda a, b: (a + b) / 2, *grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = _two_layers(0)
    opt_state = tx.init(params)
    for micro_batches in [BATCHES[:2], BATCHES[2:]]:
        params, opt_state = train_step(params, opt_state, micro_batches)
        yield params, jmpscale.get_scaler(opt_state)


ACCUMULATING = {"functional": _accumulating_functional_api, "optax": _accumulating_optax_wrapper}


@apis(("optax", "dynamic"))
def test_accumulation(api, enabled):
    both_batches = [np.concatenate(pair, axis=1) for pair in (BATCHES[:2], BATCHES[2:])]
    case = _Case(batches=both_batches)
    scales = []
    for (params, scaler), (_, want, _) in zip(
        ACCUMULATING[api](_starting_scaler(enabled)), _control(case, _starting_scaler(enabled)), strict=True
    ):
        jax.tree.map(functools.partial(assert_close, atol=1e-7), params, want)
        scales.append(scaler.loss_scale.item())
    assert scales == ([256.0, 512.0] if SCALERS[enabled] else [1.0, 1.0])
    assert scaler.skipped == 0


def _losses_of_two_models(models, batch):
    outputs = [_predict(params, batch[0]) for params in models]
    return (
        _mean_squared_error(0.3 * outputs[0] + 0.7 * outputs[1], batch[1]),
        _mean_squared_error(0.6 * outputs[0] - 0.4 * outputs[1], batch[1]),
    )


@pytest.mark.parametrize("enabled", some_of_all(SCALERS, default=[("dynamic",)]))
def test_multiple(enabled):
    @jax.jit
    def train_step(models, scaler, batch, overflow):
        scaled = jax.grad(lambda models: sum(jmpscale.scale(scaler, _losses_of_two_models(models, batch))))(models)
        scaled[1] = jax.tree.map(functools.partial(jnp.where, overflow), _fill_with_inf(scaled[1]), scaled[1])
        results = [jmpscale.unscale_and_check(scaler, grads) for grads in scaled]
        flags = [finite for _, finite in results]
        models = [
            jmpscale.apply_if(finite, _sgd_step(grads), params)
            for params, (grads, finite) in zip(models, results, strict=True)
        ]
        return models, jmpscale.update(scaler, flags[0] & flags[1]), flags

    @jax.jit
    def control_step(models, batch, overflow):
        grads = jax.grad(lambda models: sum(_losses_of_two_models(models, batch)))(models)
        first, second = (_sgd_step(grads)(params) for grads, params in zip(grads, models, strict=True))
        return [first, jax.tree.map(functools.partial(jnp.where, overflow), models[1], second)]

    scaler = _starting_scaler(enabled)
    models = want = [_two_layers(0), _two_layers(10)]
    for batch, overflow in _training_data(_Case(), scaler):
        models, scaler, flags = train_step(models, scaler, batch, overflow)
        want = control_step(want, batch, overflow)
        assert [flag.item() for flag in flags] == [True, not overflow]
        jax.tree.map(functools.partial(assert_close, atol=1e-7), models, want)
    assert scaler.loss_scale == (512.0 if SCALERS[enabled] else 1.0)
    assert scaler.skipped == (1 if SCALERS[enabled] else 0)
