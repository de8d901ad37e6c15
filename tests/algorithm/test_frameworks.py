"""Models of Linen, NNX, Equinox and Haiku train as without jmpscale, and an overflow changes only the scaler.

Each model has layers with several kinds of leaves: batch statistics, random streams, recurrent cells, power iterations,
LoRA, shared weights, functions and Python numbers.
"""

import functools
import itertools
import sys
import types
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jmpscale

import compiling
from bits import assert_equal_bits
from faults import overflow_backward
from precision import filled

pytestmark = pytest.mark.usefixtures("standard_promotion_and_ranks")  # layers rely on both
SGD = optax.sgd(optax.linear_schedule(0.1, 0.0, 100), momentum=0.9)
SCALER = jmpscale.dynamic(2.0**10)
WRAPPED_SGD = jmpscale.with_loss_scaling(SGD, SCALER)
X = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3)), jnp.float32)
NO_FAULT, BACKWARD, FORWARD = map(jnp.array, range(3))  # where a step overflows


def inputs(fault):
    return X + jnp.where(fault == FORWARD, jnp.inf, 0.0)


def loss_of(prediction, fault):
    prediction = overflow_backward(prediction, fault == BACKWARD)
    return jnp.mean((prediction - 1) ** 2)


def compute_gradients(api, loss_fn, holder, *args, transform=jax.value_and_grad, has_aux=True):
    if api == "plain":
        return transform(loss_fn, has_aux=has_aux)(*args)
    if api == "scaled_backward":
        return transform(jmpscale.scaled_backward(loss_fn, holder, has_aux=has_aux), has_aux=has_aux)(*args)
    return jmpscale.value_and_grad(loss_fn, has_aux=has_aux, transform=transform)(holder, *args)


# Each framework has a function that creates the training state, and a step with one branch for each API. The step
# returns the new state and the scaler. Only the functional API changes this scaler; the wrapper has one in the state.


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        x = nn.Dropout(0.5, deterministic=False)(jnp.tanh(x))
        x = nn.SpectralNorm(nn.Dense(4))(x, update_stats=True)
        return nn.GRUCell(2)(jnp.ones((5, 2)), x)[1]


def linen_loss(params, stats, key, fault):
    variables = {"params": params, **stats}
    prediction, stats = LinenNet().apply(variables, inputs(fault), rngs={"dropout": key}, mutable=list(stats))
    return loss_of(prediction, fault), stats


class TrainState(train_state.TrainState):
    stats: Any


def start_linen(tx):
    variables = filled(LinenNet().init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    return TrainState.create(apply_fn=None, params=variables.pop("params"), tx=tx, stats=variables)


def linen(api, state, scaler, fault):
    key = jax.random.fold_in(jax.random.key(7), state.step)
    holder = scaler if api == "functional" else state
    (loss, stats), grads = compute_gradients(api, linen_loss, holder, state.params, state.stats, key, fault)
    if api == "plain":
        return state.apply_gradients(grads=grads, stats=stats), scaler
    if api == "functional":
        finite = jmpscale.all_finite(grads)
        state = jmpscale.apply_if(finite, lambda state: state.apply_gradients(grads=grads, stats=stats), state)
        return state, jmpscale.update(scaler, finite, loss=loss)
    new = state.apply_gradients(grads=grads)
    applied = jmpscale.get_scaler(new).step_applied
    return new.replace(stats=jmpscale.select_tree(applied, stats, state.stats)), scaler


class NNXNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout, self.lora = nnx.Dropout(0.5, rngs=rngs), nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs)
        self.cell = nnx.GRUCell(4, 2, rngs=rngs)

    def __call__(self, x):
        x = self.lora(self.dropout(jnp.tanh(self.norm(self.inner(x)))))
        return self.cell(jnp.ones((5, 2)), x)[1]


def nnx_loss(model, fault):
    return loss_of(model(inputs(fault)), fault)


@functools.cache
def split_nnx():
    graphdef, abstract_state = nnx.split(nnx.eval_shape(NNXNet))
    return graphdef, filled(lambda: abstract_state)


def make_nnx(tx, state=None):
    model = nnx.clone(nnx.merge(*split_nnx()))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    if state is not None:
        nnx.update((model, optimizer), state)
    return model, optimizer


def start_nnx(tx):
    return nnx.state(make_nnx(tx))


def nnx_optimizer(api, state, scaler, fault):
    model, optimizer = make_nnx(TX[api], state)
    others = nnx.clone(nnx.state(model, nnx.Not(nnx.Param)))  # batch statistics and random streams
    holder, options = scaler if api == "functional" else optimizer.opt_state, {"transform": nnx.value_and_grad}
    loss, grads = compute_gradients(api, nnx_loss, holder, model, fault, has_aux=False, **options)
    if api in ("plain", "functional"):
        optimizer.update(model, grads)
        new = nnx.state((model, optimizer))
        if api == "plain":
            return new, scaler
        finite = jmpscale.all_finite(grads)
        return jmpscale.apply_if(finite, lambda _: new, state), jmpscale.update(scaler, finite, loss=loss)
    optimizer.update(model, grads, value=loss)
    applied = jmpscale.get_scaler(optimizer.opt_state).step_applied
    nnx.update(model, jmpscale.apply_if(applied, lambda _: nnx.state(model, nnx.Not(nnx.Param)), others))
    return nnx.state((model, optimizer)), scaler


class State(NamedTuple):
    params: Any
    stats: Any
    opt_state: Any
    key: jax.Array


def explicit(loss_fn, transform, api, state, scaler, fault):
    """The step of frameworks whose functions take and return all state: Equinox and Haiku."""
    now, later = jax.random.split(state.key)
    holder = scaler if api == "functional" else state.opt_state
    args = state.params, state.stats, now, fault
    (loss, stats), grads = compute_gradients(api, loss_fn, holder, *args, transform=transform)
    if api == "functional":
        finite = jmpscale.all_finite(grads)
        step = jmpscale.optax_step(SGD, grads)
        params, opt_state = jmpscale.apply_if(finite, step, state.params, state.opt_state)
        stats, key = jmpscale.apply_if(finite, lambda *_: (stats, later), state.stats, state.key)
        return State(params, stats, opt_state, key), jmpscale.update(scaler, finite, loss=loss)
    value = {} if api == "plain" else {"value": loss}
    updates, opt_state = TX[api].update(grads, state.opt_state, state.params, **value)
    if api != "plain":
        applied = jmpscale.get_scaler(opt_state).step_applied
        stats = jmpscale.select_tree(applied, stats, state.stats)
    return State(eqx.apply_updates(state.params, updates), stats, opt_state, later), scaler


class EquinoxNet(eqx.Module):
    mlp: eqx.nn.MLP  # its activation is a function
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout  # its probability is a Python number
    shared: eqx.nn.Shared
    spectral: eqx.nn.SpectralNorm
    name: str

    def __init__(self):
        key = jax.random.key(0)
        self.mlp, self.dropout, self.name = eqx.nn.MLP(3, 4, 4, 1, key=key), eqx.nn.Dropout(0.5), "net"
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        pair = eqx.nn.Linear(4, 4, key=key), eqx.nn.Linear(4, 4, key=key)
        self.shared = eqx.nn.Shared(pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(4, 2, key=key), "weight", key=key)

    def __call__(self, x, stats, key):
        x, stats = self.norm(self.mlp(x), stats)
        first, second = self.shared()
        return self.spectral(second(first(self.dropout(jnp.tanh(x), key=key))), stats)


def equinox_loss(model, stats, key, fault):
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
    prediction, stats = batched(inputs(fault), stats, key)
    return loss_of(prediction, fault), stats


@functools.cache
def make_equinox():
    return filled(eqx.nn.make_with_state(EquinoxNet))


def start_equinox(tx):
    model, stats = make_equinox()
    return State(model, stats, tx.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(7))


@hk.transform_with_state
def haiku_net(x):
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(hk.Linear(4)(x), is_training=True)
    x = hk.dropout(hk.next_rng_key(), 0.5, jnp.tanh(x))
    return hk.GRU(2)(x, jnp.ones((5, 2)))[0]


def haiku_loss(params, stats, key, fault):
    prediction, stats = haiku_net.apply(params, stats, key, inputs(fault))
    return loss_of(prediction, fault), stats


def start_haiku(tx):
    params, stats = filled(haiku_net.init, jax.random.key(0), X)
    return State(params, stats, tx.init(params), jax.random.key(7))


class Framework(NamedTuple):
    start: Any
    step: Any
    jit: Any = jax.jit


FRAMEWORKS = {
    "linen": Framework(start_linen, linen),
    "nnx": Framework(start_nnx, nnx_optimizer),
    "equinox": Framework(
        start_equinox, functools.partial(explicit, equinox_loss, eqx.filter_value_and_grad), eqx.filter_jit
    ),
    "haiku": Framework(start_haiku, functools.partial(explicit, haiku_loss, jax.value_and_grad)),
}
TX = {"plain": SGD, "functional": SGD, "wrapper": WRAPPED_SGD, "scaled_backward": WRAPPED_SGD}


def jit_and_run(framework, api):
    start, step, jit = FRAMEWORKS[framework]
    step = jit(functools.partial(step, api), **compiling.FAST)
    state, scaler = start(TX[api]), jax.tree.map(jnp.asarray, SCALER)
    for _ in range(2):
        state, scaler = step(state, scaler, NO_FAULT)
    return step, state, scaler


@functools.cache
def run_plain(framework):
    return parts(framework, "plain", jit_and_run(framework, "plain")[1])


def parts(framework, api, state):
    """Returns the parameters, the state that the forward pass changes, and the inner optimizer state."""
    if framework == "nnx":
        model, optimizer = make_nnx(TX[api], state)
        return *nnx.state(model, nnx.Param, ...), getattr(optimizer.opt_state, "inner_state", optimizer.opt_state)
    return state.params, state.stats, getattr(state.opt_state, "inner_state", state.opt_state)


def assert_close(ours, expected):
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
        else:
            assert_equal_bits(other, one)


# The wrapper with value_and_grad is the default row; the guides train with it in the other frameworks.
ROWS = [("nnx", "wrapper"), *itertools.product(FRAMEWORKS, ("functional", "scaled_backward"))]


@pytest.mark.parametrize(
    ("framework", "api"), [ROWS[0], *(pytest.param(*row, marks=pytest.mark.full) for row in ROWS[1:])]
)
def test_framework_step_trains_and_skips(framework, api):
    step, before, scaler = jit_and_run(framework, api)
    assert_close(parts(framework, api, before), run_plain(framework))
    for fault in (BACKWARD, FORWARD):
        with compiling.count_compilations() as compiled:
            after, new = step(before, scaler, fault)
        assert not compiled
        if api == "functional":
            assert_equal_bits(before, after)
        else:
            assert_equal_bits(parts(framework, api, before), parts(framework, api, after))
            opt_state = make_nnx(TX[api], after)[1].opt_state if framework == "nnx" else after.opt_state
            new = jmpscale.get_scaler(opt_state)
        # TrainState.apply_gradients does not pass the loss to the scaler, which then reports non-finite gradients.
        loss_is_known = framework != "linen" or api == "functional"
        expected = (1, 2, 2.0**10) if fault == FORWARD and loss_is_known else (1, 1, 2.0**9)
        assert (new.total_skips, new.last_skip_reason, new.loss_scale) == expected


# Gradients may be computed for a part of the parameters.


def test_value_and_grad_differentiates_only_lora_parameters():
    which = nnx.DiffState(0, nnx.LoRAParam)
    grad_fn = jmpscale.value_and_grad(nnx_loss, which, transform=nnx.value_and_grad)
    grads = nnx.eval_shape(lambda scaler, model: grad_fn(scaler, model, NO_FAULT)[1], SCALER, make_nnx(SGD)[0])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    assert len(paths) == 2
    assert all("['lora']['lora_" in path for path in paths)


@pytest.mark.parametrize("module", ["flax.nnx", "equinox"])
def test_calls_ignore_a_framework_that_is_being_imported(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    assert jmpscale.apply_if(True, lambda w: w + 1, 1.0) == 2
    assert jmpscale.value_and_grad(jnp.square)(SCALER, 3.0) == (9, 6)
    assert jax.grad(jmpscale.scaled_backward(jnp.square, 8.0))(3.0) == 6
