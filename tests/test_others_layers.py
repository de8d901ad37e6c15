"""Every layer of Equinox, Flax NNX and Flax Linen, trained by both routes: the same bits as without jmpscale.

All layers of a framework make one model, so that few programs are compiled; what differs is named by its path. The
tables are compared with the frameworks' own modules: what a new version adds shows here as missing.
"""

import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmpscale

pytestmark = [pytest.mark.usefixtures("standard_promotion", "standard_ranks")]

TX = optax.sgd(0.1, momentum=0.9)
# Without LLVM's optimizations: these join a product and a sum into one operation that rounds once, in one program here
# and in another there, and then two programs that do the same arithmetic differ in the last bit.
EXACT = {"compiler_options": {"xla_backend_optimization_level": 0}}


@pytest.fixture
def standard_ranks():
    """Allows silent promotion of ranks: layers rely on it."""
    with jax.numpy_rank_promotion("allow"):
        yield


def _data(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def _squares(tree):
    """A loss of whatever a layer returns."""
    return sum(jnp.mean(jnp.square(x - 1)) for x in jax.tree.leaves(tree))


# Equinox: how a layer is made with a key, and what it is called with: the shape of its input, or a function of the
# layer, a key, and the state of all stateful layers.


def _batch_norm(layer, key, state):
    batched = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return batched(_data(5, 3), state)


def _tied(layer, key, state):
    embedding, linear = layer()
    return linear(embedding(jnp.array(1)))


def _shared(key):
    tied = eqx.nn.Embedding(3, 3, key=key), eqx.nn.Linear(3, 3, key=key)
    return eqx.nn.Shared(tied, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)


EQUINOX = {
    "AdaptiveAvgPool1d": (lambda key: eqx.nn.AdaptiveAvgPool1d(2), (2, 5)),
    "AdaptiveAvgPool2d": (lambda key: eqx.nn.AdaptiveAvgPool2d(2), (2, 5, 4)),
    "AdaptiveAvgPool3d": (lambda key: eqx.nn.AdaptiveAvgPool3d(2), (2, 4, 2, 2)),
    "AdaptiveMaxPool1d": (lambda key: eqx.nn.AdaptiveMaxPool1d(2), (2, 5)),
    "AdaptiveMaxPool2d": (lambda key: eqx.nn.AdaptiveMaxPool2d(2), (2, 5, 4)),
    "AdaptiveMaxPool3d": (lambda key: eqx.nn.AdaptiveMaxPool3d(2), (2, 4, 2, 2)),
    "AdaptivePool": (lambda key: eqx.nn.AdaptivePool(2, 1, jnp.min), (2, 5)),
    "AvgPool1d": (lambda key: eqx.nn.AvgPool1d(2), (2, 5)),
    "AvgPool2d": (lambda key: eqx.nn.AvgPool2d(2, 2), (2, 4, 4)),
    "AvgPool3d": (lambda key: eqx.nn.AvgPool3d(2, padding=1), (1, 2, 2, 2)),
    "BatchNorm": (lambda key: eqx.nn.BatchNorm(3, "batch", mode="batch"), _batch_norm),
    "BatchNorm, ema": (lambda key: eqx.nn.BatchNorm(3, "batch", mode="ema"), _batch_norm),
    "Conv": (lambda key: eqx.nn.Conv(1, 2, 3, 2, key=key), (2, 5)),
    "Conv1d": (lambda key: eqx.nn.Conv1d(2, 2, 2, groups=2, use_bias=False, key=key), (2, 5)),
    "Conv2d": (lambda key: eqx.nn.Conv2d(2, 3, 2, padding="SAME", padding_mode="CIRCULAR", key=key), (2, 4, 4)),
    "Conv3d": (lambda key: eqx.nn.Conv3d(1, 2, 2, key=key), (1, 2, 2, 2)),
    "ConvTranspose": (lambda key: eqx.nn.ConvTranspose(1, 2, 3, 2, key=key), (2, 5)),
    "ConvTranspose1d": (lambda key: eqx.nn.ConvTranspose1d(2, 2, 2, stride=2, key=key), (2, 3)),
    "ConvTranspose2d": (lambda key: eqx.nn.ConvTranspose2d(2, 2, 2, key=key), (2, 3, 3)),
    "ConvTranspose3d": (lambda key: eqx.nn.ConvTranspose3d(1, 2, 2, key=key), (1, 2, 2, 2)),
    "Dropout": (lambda key: eqx.nn.Dropout(0.5), lambda layer, key, state: layer(_data(6), key=key)),
    "Embedding": (lambda key: eqx.nn.Embedding(3, 2, key=key), lambda layer, key, state: layer(jnp.array(1))),
    "GRUCell": (lambda key: eqx.nn.GRUCell(3, 2, key=key), lambda layer, key, state: layer(_data(3), _data(2))),
    "GroupNorm": (lambda key: eqx.nn.GroupNorm(2, 4), (4, 3)),
    "Identity": (lambda key: eqx.nn.Identity(), (3,)),
    "LSTMCell": (
        lambda key: eqx.nn.LSTMCell(3, 2, key=key),
        lambda layer, key, state: layer(_data(3), (_data(2), _data(2))),
    ),
    "Lambda": (lambda key: eqx.nn.Lambda(jnp.tanh), (3,)),
    "LayerNorm": (lambda key: eqx.nn.LayerNorm(3), (3,)),
    "Linear": (lambda key: eqx.nn.Linear(3, 2, key=key), (3,)),
    "MLP": (lambda key: eqx.nn.MLP(3, 2, 4, 2, activation=jax.nn.gelu, key=key), (3,)),
    "MaxPool1d": (lambda key: eqx.nn.MaxPool1d(2), (2, 5)),
    "MaxPool2d": (lambda key: eqx.nn.MaxPool2d(2, use_ceil=True), (2, 3, 3)),
    "MaxPool3d": (lambda key: eqx.nn.MaxPool3d(2), (1, 2, 2, 2)),
    "MultiheadAttention": (
        lambda key: eqx.nn.MultiheadAttention(2, 4, dropout_p=0.5, use_output_bias=True, key=key),
        lambda layer, key, state: layer(_data(3, 4), _data(2, 4), _data(2, 4), key=key),
    ),
    "PReLU": (lambda key: eqx.nn.PReLU(), (3,)),
    "Pool": (lambda key: eqx.nn.Pool(0.0, jax.lax.add, 1, 2), (2, 5)),
    "RMSNorm": (lambda key: eqx.nn.RMSNorm(3), (3,)),
    "RotaryPositionalEmbedding": (lambda key: eqx.nn.RotaryPositionalEmbedding(4), (3, 4)),
    "Sequential": (lambda key: eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=key), eqx.nn.Lambda(jax.nn.relu)]), (3,)),
    "Shared": (_shared, _tied),
    "SpectralNorm": (
        lambda key: eqx.nn.SpectralNorm(eqx.nn.Linear(3, 2, key=key), "weight", key=key),
        lambda layer, key, state: layer(_data(3), state),
    ),
    "WeightNorm": (lambda key: eqx.nn.WeightNorm(eqx.nn.Linear(3, 2, key=key)), (3,)),
}
NO_EQUINOX_LAYER = {"StateIndex": "a place in the state", "StatefulLayer": "what stateful layers inherit from"}


class OfUsers(eqx.Module):
    """What Equinox users keep in a model: settings that are Python numbers, texts, functions, nothing."""

    weight: jax.Array
    slope: float
    power: int
    training: bool
    name: str
    activation: object
    bias: None = None

    def __call__(self, x):
        x = self.activation(self.weight * x) if self.training else x
        return self.slope * x**self.power


EQUINOX_MODELS = {**EQUINOX, "a user's": (lambda key: OfUsers(_data(3), 0.5, 2, True, "own", jnp.tanh), (3,))}


class Equinox:
    """A model of Equinox layers, as it is: with bools, numbers and functions among its leaves."""

    transform = staticmethod(eqx.filter_value_and_grad)

    def __init__(self, names):
        self.calls = {name: EQUINOX_MODELS[name][1] for name in names}

        def make():
            return {"gain": jnp.ones(())} | {name: EQUINOX_MODELS[name][0](jax.random.key(0)) for name in names}

        self.model, self.state = eqx.nn.make_with_state(make)()
        self.filtered = eqx.filter(self.model, eqx.is_inexact_array)

    def loss(self, model, state, key, poison):
        loss = poison * model["gain"]
        for name, call in self.calls.items():
            out = model[name](_data(*call)) if isinstance(call, tuple) else call(model[name], key, state)
            if isinstance(out, tuple) and isinstance(out[-1], eqx.nn.State):
                out, state = out
            loss += poison * _squares(out)
        return loss, state

    def start(self, scaler, route):
        if route == "optax":
            tx = jmpscale.with_loss_scaling(TX, scaler)
            return self.model, self.state, tx.init(self.filtered)
        return self.model, self.state, TX.init(self.filtered), scaler

    @property
    def steps(self):
        def plain(carry, key, poison):
            model, state, opt_state, scaler = carry
            (_, state), grads = eqx.filter_value_and_grad(self.loss, has_aux=True)(model, state, key, poison)
            updates, opt_state = TX.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
            return eqx.apply_updates(model, updates), state, opt_state, scaler

        def functional(carry, key, poison):
            model, state, opt_state, scaler = carry
            take = jmpscale.value_and_grad(self.loss, has_aux=True, transform=eqx.filter_value_and_grad)
            (loss, moved), grads, finite = take(scaler, model, state, key, poison)

            def step(model, state, opt_state):
                model, opt_state = jmpscale.optax_step(TX, grads)(model, opt_state)
                return model, moved, opt_state

            model, state, opt_state = jmpscale.apply_if(finite, step, model, state, opt_state)
            return model, state, opt_state, jmpscale.update(scaler, finite, loss=loss)

        def in_optax(carry, key, poison):
            model, state, opt_state = carry
            take = jmpscale.scaled_value_and_grad(self.loss, has_aux=True, transform=eqx.filter_value_and_grad)
            (loss, state), grads = take(opt_state, model, state, key, poison)
            tx = jmpscale.with_loss_scaling(TX)
            updates, opt_state = tx.update(grads, opt_state, model, value=loss)
            return eqx.apply_updates(model, updates), state, opt_state

        jit = {"plain": plain, "functional": functional, "optax": in_optax}
        return {name: eqx.filter_jit(fn, **EXACT) for name, fn in jit.items()}

    def gated(self, carry, route):
        """What a skipped step must not move."""
        model, state, opt_state = carry[:3]
        return (model, opt_state.inner_state) if route == "optax" else (model, opt_state, state)


def _bits(tree):
    """Every leaf by its path: arrays as bytes, everything else as it is."""

    def one(leaf):
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            return type(leaf), leaf
        data = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return str(leaf.dtype), leaf.shape, np.asarray(data).tobytes()

    return {jax.tree_util.keystr(path): one(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _differing(one, other):
    one, other = _bits(one), _bits(other)
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


KEYS = jax.random.split(jax.random.key(7))
ONE, INFINITE = jnp.float32(1), jnp.float32(jnp.inf)


def _check(framework, scalers):
    """Trains without jmpscale, and by each route with each scaler: two steps, then one that overflows."""
    start = framework.start(jmpscale.disabled(), "plain")
    expected = []
    for key in KEYS:
        start = framework.steps["plain"](start, key, ONE)
        expected.append(start[:3])
    for route, scaler in scalers:
        carry, step = framework.start(scaler, route), framework.steps[route]
        for key, plain in zip(KEYS, expected, strict=True):
            carry = step(carry, key, ONE)
            got = (*carry[:2], carry[2].inner_state if route == "optax" else carry[2])
            assert not _differing(got, plain), (route, scaler.config.mode)
        after = step(carry, KEYS[0], INFINITE)
        assert not _differing(framework.gated(after, route), framework.gated(carry, route)), (route, scaler.config.mode)
        assert int(jmpscale.get_scaler(after).skipped) == 1


def test_eqx():
    _check(Equinox(EQUINOX_MODELS), [("functional", jmpscale.dynamic()), ("optax", jmpscale.static(1.0))])
