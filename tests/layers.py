"""Layers of Flax, Equinox and Haiku, one for each way in which a library runs or stores something.

Each row takes `wrap`, such as autocast, and returns a step and its arguments.
"""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import precision

RANDOM = np.random.default_rng(0)
VECTORS = jnp.asarray(RANDOM.standard_normal((4, 6)), jnp.float32)
SEQUENCES = jnp.asarray(RANDOM.standard_normal((2, 5, 6)), jnp.float32)
IMAGES = jnp.asarray(RANDOM.standard_normal((2, 6, 6, 3)), jnp.float32)
TOKENS = jnp.asarray(RANDOM.integers(0, 7, (2, 5)))
KEY = jax.random.key(0)
filled = functools.partial(precision.filled, low=-0.5, high=0.6)


def mean_square(prediction):
    return jnp.mean((prediction - 1) ** 2)


# --- each framework makes a function of `wrap` that returns a step and its arguments


def linen(layer, x, call=lambda layer, *args: layer(*args)):
    """A Linen layer; the step returns the loss, the gradients and the new statistics."""

    def case(wrap):
        rngs = {"params": KEY, "dropout": KEY, "carry": KEY}
        variables = filled(functools.partial(layer.init, method=call), rngs, x)
        params = variables.pop("params")

        def loss_fn(params, stats, x):
            out, stats = layer.apply({"params": params, **stats}, x, method=call, rngs=rngs, mutable=list(stats))
            return sum(mean_square(leaf) for leaf in jax.tree.leaves(out)), stats

        return jax.value_and_grad(wrap(loss_fn), has_aux=True), params, variables, x

    return case


def stateful(create, x, call=lambda model, x: model(x)):
    """An NNX model; the step returns the loss, the gradients and the new state of the model."""

    def case(wrap):
        graphdef, state = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0))))
        state = filled(lambda: state)

        def loss_fn(model, x):
            out = call(model, x)
            return sum(mean_square(leaf) for leaf in jax.tree.leaves(out))

        def step(state, x):
            model = nnx.merge(graphdef, state)
            loss, grads = nnx.value_and_grad(wrap(loss_fn))(model, x)
            return loss, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))

        return step, state, x

    return case


def equinox(create, x, call=lambda model, x: jax.vmap(model)(x)):
    def case(wrap):
        arrays, rest = eqx.partition(filled(create), eqx.is_array)

        def loss_fn(model, x):
            return sum(mean_square(leaf) for leaf in jax.tree.leaves(call(model, x)))

        def step(arrays, x):
            return eqx.filter_value_and_grad(wrap(loss_fn))(eqx.combine(arrays, rest), x)

        return step, arrays, x

    return case


def haiku(forward, x):
    def case(wrap):
        transformed = hk.transform_with_state(forward)
        params, state = filled(transformed.init, KEY, x)

        def loss_fn(params, state, x):
            out, state = transformed.apply(params, state, KEY, x)
            return sum(mean_square(leaf) for leaf in jax.tree.leaves(out)), state

        return jax.value_and_grad(wrap(loss_fn), has_aux=True), params, state, x

    return case


class LinenBlock(nn.Module):
    """Statistics, dropout and rematerialization in a scan over layers, after an embedding that is used twice."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, 6)
        x = embed(tokens)

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                y = nn.Dropout(0.5, deterministic=False)(nn.LayerNorm()(x))
                return x + nn.MultiHeadDotProductAttention(2, qkv_features=12)(y), None

        layers = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=2
        )
        return embed.attend(nn.BatchNorm(use_running_average=False)(layers()(x, None)[0]))


class NNXBlock(nnx.Module):
    """The same in NNX, with LoRA."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 6, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 6, qkv_features=12, decode=False, rngs=rngs)
        self.lora = nnx.LoRALinear(6, 6, lora_rank=5, rngs=rngs)

        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return nnx.Linear(6, 6, rngs=rngs)

        self.layers = create(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return jnp.tanh(layer(x))

        x = self.lora(self.dropout(self.norm(self.embed(tokens))))
        return self.embed.attend(run(self.layers, x + self.attention(x)))


class NNXStored(nnx.Module):
    """A residual block whose input and result are converted to float16."""

    def __init__(self, rngs):
        self.stem, self.conv = nnx.Conv(3, 5, (3, 3), rngs=rngs), nnx.Conv(5, 5, (3, 3), rngs=rngs)
        self.norm, self.head = nnx.BatchNorm(5, rngs=rngs), nnx.Linear(5, 5, rngs=rngs)

    def __call__(self, images):
        x = nnx.max_pool(nnx.relu(self.stem(images)).astype(jnp.float16), (2, 2))
        x = nnx.relu(x + self.norm(self.conv(x))).astype(jnp.float16)
        return self.head(x)


def equinox_with_state(model_and_state, x):
    model, state = model_and_state
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)[0]


class EquinoxNet(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm

    def __init__(self, key):
        self.dense = eqx.nn.Linear(6, 6, key=key)
        self.norm = eqx.nn.BatchNorm(6, axis_name="batch", mode="batch")
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(6, 5, key=key), "weight", key=key)

    def __call__(self, x, state):
        x, state = self.norm(self.dense(x), state)
        return self.spectral(x, state)


def stored_in_half(x, key=None):
    return jnp.tanh(x).astype(jnp.float16)


def haiku_unroll(core, x):
    return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))


LINEN = {
    "Conv, grouped": linen(nn.Conv(6, (3, 3), feature_group_count=3, strides=2), IMAGES),
    "ConvTranspose": linen(nn.ConvTranspose(4, (3, 3), (2, 2)), IMAGES),
    "GRUCell": linen(nn.Bidirectional(nn.RNN(nn.GRUCell(5)), nn.RNN(nn.GRUCell(5))), SEQUENCES),
    "SpectralNorm": linen(nn.SpectralNorm(nn.Dense(5)), VECTORS, lambda layer, x: layer(x, update_stats=True)),
    "scan, remat, BatchNorm, Dropout": linen(LinenBlock(), TOKENS),
}
NNX = {
    "SimpleCell": stateful(lambda rngs: nnx.RNN(nnx.SimpleCell(6, 5, rngs=rngs)), SEQUENCES),
    "LoRA": stateful(lambda rngs: nnx.LoRA(6, 5, 5, rngs=rngs), VECTORS),
    "blocks that return float16": stateful(NNXStored, IMAGES),
    "scan, remat, BatchNorm, Dropout, LoRALinear": stateful(NNXBlock, TOKENS),
}
EQUINOX = {
    "Conv2d": equinox(lambda: eqx.nn.Conv2d(6, 4, 3, groups=2, key=KEY), IMAGES),
    "MultiheadAttention": equinox(
        lambda: eqx.nn.MultiheadAttention(2, 6, qk_size=6, vo_size=6, key=KEY),
        SEQUENCES,
        lambda model, x: jax.vmap(model)(x, x, x),
    ),
    "blocks that return float16": equinox(
        lambda: eqx.nn.Sequential(
            [eqx.nn.Linear(6, 5, key=KEY), eqx.nn.Lambda(stored_in_half), eqx.nn.Linear(5, 4, key=KEY)]
        ),
        VECTORS,
    ),
    "WeightNorm": equinox(lambda: eqx.nn.WeightNorm(eqx.nn.Linear(6, 5, key=KEY)), VECTORS),
    "BatchNorm, SpectralNorm": equinox(lambda: eqx.nn.make_with_state(EquinoxNet)(KEY), VECTORS, equinox_with_state),
}
HAIKU = {
    "SeparableDepthwiseConv2D": haiku(lambda x: hk.SeparableDepthwiseConv2D(2, 5)(x), IMAGES),
    "MultiHeadAttention": haiku(lambda x: hk.MultiHeadAttention(2, 6, w_init=jnp.zeros)(x, x, x), SEQUENCES),
    "GRU": haiku(lambda x: haiku_unroll(hk.GRU(5), x), SEQUENCES),
    "BatchNorm, dropout": haiku(
        lambda x: hk.dropout(hk.next_rng_key(), 0.5, hk.BatchNorm(True, True, 0.9)(hk.Linear(5)(x), True)), VECTORS
    ),
    "remat": haiku(lambda x: hk.remat(hk.Linear(5))(x), VECTORS),
}
LAYERS = {
    f"{framework}: {name}": case
    for framework, table in {"Linen": LINEN, "NNX": NNX, "Equinox": EQUINOX, "Haiku": HAIKU}.items()
    for name, case in table.items()
}
