"""The numeric tests of `torch.amp.GradScaler`, ported from PyTorch 2.13 (`test/test_torch.py`, `test_grad_scaling_*`).

torch is not needed: each run is compared with a control in JAX that scales nothing, at torch's tolerances
(rtol 1e-5, and atol 1e-7 unless a case says otherwise), and with the numbers in torch's own text.

| torch's test              | reproduced                                      | deliberately better, or other, here          |
|---------------------------|-------------------------------------------------|----------------------------------------------|
| `update_scale`            | scale and growth tracker at every step          | -                                            |
| `unscale`                 | which gradients are finite, and their values    | dtypes and shapes mix in one call; float16   |
|                           |                                                 | is accepted and comes back as float32        |
| `unscale_sparse`          | the same for BCOO, in float32 and float16       | float16 duplicates that add up past 65504    |
|                           |                                                 | are widened first, so finite: no step lost   |
| `scale`                   | nested losses, structure kept                   | on one device; JAX shards an array instead   |
| `will_not_overflow`       | scale and parameters stay finite                | there is a max_scale, which the scale is set |
|                           |                                                 | to where torch keeps the scale it had        |
| `clipping`                | clip scaled gradients at max_norm times scale   | the control clips as optax does              |
| `clipping_separate_       | unscale, then clip                              | no order of calls to get wrong: the check    |
| unscale`                  |                                                 | comes with the division                      |
| `penalty`                 | gradient penalty through a scaled inner gradient| `unscale` is differentiable                  |
| `accumulation`            | two micro-batches to a step, summed while scaled| -                                            |
| `multiple`                | two optimizers, one scale, separate skips       | functional route only: in optax one wrapper  |
|                           |                                                 | holds one scaler and skips as a whole        |

torch has no limits. A port states its `min_scale`, 2^-14, far below any scale it meets; the default `max_scale` is far
above, except in `will_not_overflow`, whose first scale of 1e38 is above the largest legal one of 2^126 and is moved
there.
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
        seen.append((state.loss_scale.item(), state.good_steps.item()))
    assert seen == [(4.0, 1), (8.0, 0), (2.0, 0)]


FOUR = jmpscale.dynamic(4.0, min_scale=MIN_SCALE)
FULL = jnp.full((10, 10), 4.0, jnp.float32)
INF = FULL.at[2, 2].set(jnp.inf)
NAN = FULL.at[2, 2].set(jnp.nan)


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
    for before, after in zip(grads, unscaled, strict=True):
        good = np.isfinite(before)
        assert_close(after[good], 1.0, atol=1e-7)
        assert not np.isfinite(after[~good]).any()


@pytest.mark.parametrize("bad_value", [jnp.inf, jnp.nan])
@pytest.mark.parametrize("bad_leaf", [None, 0, 1, 2, 3])
def test_unscale_of_mixed_dtypes(bad_value, bad_leaf, variant):
    grads = [FULL, FULL[:, :5], FULL.astype(jnp.float16), FULL.astype(jnp.float16)]
    if bad_leaf is not None:
        grads[bad_leaf] = grads[bad_leaf].at[2, 2].set(bad_value)
    unscaled, finite = variant(jmpscale.unscale_and_check)(FOUR, grads)
    assert finite.item() is (bad_leaf is None)
    for i, grad in enumerate(unscaled):
        assert grad.dtype == jnp.float32
        if i != bad_leaf:
            assert_close(grad, 1.0, atol=1e-7)


def sparse_gradient(values, columns=(2, 0, 2), rows=(0, 1, 1), dtype=jnp.float32):
    indices = jnp.array(list(zip(rows, columns, strict=True)))
    return sparse.BCOO((jnp.array(values, dtype), indices), shape=(2, 3))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_unscale_sparse(dtype, transform):
    unscale_and_check = transform(jmpscale.unscale_and_check)
    grad, finite = unscale_and_check(FOUR, sparse_gradient([16.0, 32.0, 64.0], dtype=dtype))
    assert finite
    assert_close(grad.todense(), [[0.0, 0.0, 4.0], [8.0, 0.0, 16.0]], atol=1e-7)
    for bad_value in [jnp.inf, jnp.nan]:
        _, finite = unscale_and_check(FOUR, sparse_gradient([16.0, 32.0, bad_value], dtype=dtype))
        assert not finite


def test_sparse_float16_duplicates_do_not_overflow():
    grads = sparse_gradient([64_000.0, 32.0, 64_000.0], rows=(0, 1, 0), dtype=jnp.float16)
    assert grads.todense()[0, 2] == jnp.inf, "torch adds the duplicates up in float16, and skips"
    grad, finite = jmpscale.unscale_and_check(FOUR, grads)
    assert finite
    assert_close(grad.todense(), [[0.0, 0.0, 32_000.0], [8.0, 0.0, 0.0]], atol=1e-7)


def test_scale(variant):
    def nested(t0, t1):
        return (t1, (t0, t1), [t0, (t1, t0)])

    four, eight = (jnp.full((), value, jnp.float32) for value in (4.0, 8.0))
    scaled = variant(jmpscale.scale)(jmpscale.dynamic(2.0, min_scale=MIN_SCALE), nested(four, four))
    assert scaled == nested(eight, eight)
    assert jax.tree.structure(scaled) == jax.tree.structure(nested(four, four))


# Training runs. torch's `_create_scaling_case`: two linear layers, SGD, four batches, mean squared error, and the
# gradient of the second layer's weight overwritten with inf at the third of them. The control leaves that step out.


def layer(rng):
    return {name: rng.uniform(-1, 1, shape).astype(np.float32) / 8**0.5 for name, shape in {"w": (8, 8), "b": 8}.items()}


def model(seed):
    rng = np.random.default_rng(seed)
    return [layer(rng), layer(rng)]


def predict(params, x):
    for layer in params:
        x = x @ layer["w"] + layer["b"][None, :]
    return x


def mean_squared_error(prediction, target):
    return jnp.mean((prediction - target) ** 2)


BATCHES = list(np.random.default_rng(1).standard_normal((4, 2, 8, 8), np.float32))
SGD = optax.sgd(1.0)


def starting_scaler(enabled):
    if not enabled:
        return jmpscale.disabled()
    return jmpscale.dynamic(128.0, growth_factor=2.0, growth_interval=1, min_scale=MIN_SCALE)


def fill_with_inf(params):
    second = params[1] | {"w": jnp.full_like(params[1]["w"], jnp.inf)}
    return [params[0], second]


def on_the_way_back(edit, params):
    """Returns `params`, so that the gradient reaching them is edited: as torch's tests overwrite `.grad`."""

    @jax.custom_vjp
    def identity(params):
        return params

    identity.defvjp(lambda params: (params, None), lambda _, grads: (edit(grads),))
    return identity(params)


class Case(NamedTuple):
    """What a test changes in the common training run; the defaults are the plain run."""

    # loss_fn(scaler, params, batch), the same without a scaler, and what is done with the gradients while scaled.
    loss_fn: Any = lambda _, params, batch: mean_squared_error(predict(params, batch[0]), batch[1])
    control_loss_fn: Any = None
    edit_scaled: Any = lambda _, grads: grads
    optimizer: optax.GradientTransformation = SGD
    control_optimizer: optax.GradientTransformation = SGD
    atol: float = 1e-7


def with_bad_batch(case, scaler, bad):
    """Returns the loss of one step, whose scaled gradient is bad if `bad`, and then edited."""

    def edit(grads):
        bad_grads = jax.tree.map(functools.partial(jnp.where, bad), fill_with_inf(grads), grads)
        return case.edit_scaled(scaler, bad_grads)

    return lambda params, batch: case.loss_fn(scaler, on_the_way_back(edit, params), batch)


def functional_route(case, scaler):
    tx = case.optimizer
    params = model(0)

    @jax.jit
    def train_step(params, opt_state, scaler, batch, bad):
        loss_fn = with_bad_batch(case, scaler, bad)
        loss, grads, finite = jmpscale.value_and_grad(loss_fn)(scaler, params, batch)

        def step(params, opt_state):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = jmpscale.apply_if(finite, step, params, opt_state)
        return loss, params, opt_state, jmpscale.update(scaler, finite, loss=loss)

    opt_state = tx.init(params)
    for batch, bad in training_data(scaler):
        loss, params, opt_state, scaler = train_step(params, opt_state, scaler, batch, bad)
        yield loss, params, opt_state, scaler


def optax_route(case, scaler):
    tx = jmpscale.with_loss_scaling(case.optimizer, scaler)
    params = model(0)

    @jax.jit
    def train_step(params, opt_state, batch, bad):
        scaler = jmpscale.get_scaler(opt_state)
        loss_fn = with_bad_batch(case, scaler, bad)

        def scaled_loss(params):
            loss = loss_fn(params, batch)
            return jmpscale.scale(scaler, loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return loss, optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch, bad in training_data(scaler):
        loss, params, opt_state = train_step(params, opt_state, batch, bad)
        yield loss, params, opt_state.inner_state, jmpscale.get_scaler(opt_state)


def training_data(scaler):
    """Yields batches, and whether the gradient is to be overwritten: only torch's enabled runs do that."""
    for i, batch in enumerate(BATCHES):
        yield batch, jnp.array(i == SKIPPED_BATCH and scaler.config.mode != "disabled")


def control(case, scaler):
    tx = case.control_optimizer
    loss_fn = case.control_loss_fn or functools.partial(case.loss_fn, None)
    params = model(0)
    opt_state = tx.init(params)
    for batch, bad in training_data(scaler):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        if not bad:
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        yield loss, params, opt_state


@pytest.fixture(params=[functional_route, optax_route], ids=["functional", "optax"])
def route(request):
    """One of the two ways to train with a scaler; yields loss, parameters, optimizer state, scaler at each step."""
    return request.param


@pytest.fixture(params=[True, False], ids=["dynamic", "disabled"])
def enabled(request):
    return request.param


def assert_trains_as_the_control(case, route, enabled):
    scalers = []
    for got, want in zip(
        route(case, starting_scaler(enabled)), control(case, starting_scaler(enabled)), strict=True
    ):
        *results, scaler = got
        jax.tree.map(functools.partial(assert_close, atol=case.atol), tuple(results), want)
        scalers.append(scaler)
    scales = [scaler.loss_scale.item() for scaler in scalers]
    assert scales == ([256.0, 512.0, 256.0, 512.0] if enabled else [1.0] * 4)
    assert scaler.skipped == (1 if enabled else 0)


def momentum_case():
    tx = optax.sgd(1.0, momentum=0.5)
    return Case(optimizer=tx, control_optimizer=tx)


@pytest.mark.parametrize("case", [Case(), momentum_case()], ids=["sgd", "momentum"])
def test_the_common_run(case, route, enabled):
    assert_trains_as_the_control(case, route, enabled)


MAX_NORM = 0.2
CLIPPED_SGD = optax.chain(optax.clip_by_global_norm(MAX_NORM), SGD)


def clip_scaled(scaler, grads):
    clip = optax.clip_by_global_norm(MAX_NORM * scaler.loss_scale)
    return clip.update(grads, clip.init(grads))[0]


def test_clipping(route, enabled):
    # The optimizers' states have other structures with and without a clip, so the control's clip is its loss's.
    case = Case(edit_scaled=clip_scaled, control_loss_fn=clipped_loss, atol=1e-5)
    assert_trains_as_the_control(case, route, enabled)


def clipped_loss(params, batch):
    def clip(grads):
        return CLIPPED_SGD.update(grads, CLIPPED_SGD.init(grads))[0]

    return Case().loss_fn(None, on_the_way_back(lambda grads: jax.tree.map(jnp.negative, clip(grads)), params), batch)


def test_clipping_separate_unscale(route, enabled):
    case = Case(optimizer=CLIPPED_SGD, control_optimizer=CLIPPED_SGD)
    assert_trains_as_the_control(case, route, enabled)
