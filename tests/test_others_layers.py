"""Every layer of Equinox, Flax NNX and Flax Linen trains with both APIs and loss_scaled as it does without jmpscale.

All layers of a framework are parts of one model, so that few programs are compiled; leaves that differ are named by
their paths. The tables are compared with the frameworks' own modules, so a layer that a new version adds is reported as
missing.
"""

import functools
import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jmpscale

pytestmark = [
    pytest.mark.usefixtures("standard_promotion", "standard_ranks"),
    pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated:DeprecationWarning"),
]

TX = optax.sgd(0.1, momentum=0.9)


def _by_value_and_grad(loss, holder, transform, has_aux):
    return functools.partial(jmpscale.value_and_grad(loss, has_aux=has_aux, transform=transform), holder)


def _by_loss_scaled(loss, holder, transform, has_aux):
    return transform(jmpscale.loss_scaled(loss, holder, has_aux=has_aux), has_aux=has_aux)


WRAPPED = {"optax wrapper": _by_value_and_grad, "loss_scaled": _by_loss_scaled}  # how each takes gradients
# Without LLVM's optimizations: they fuse some products and sums into one operation that rounds once, and not the same
# ones in each program, so two programs with the same arithmetic could differ in the last bit.
EXACT = {"compiler_options": {"xla_backend_optimization_level": 0}}


@pytest.fixture
def standard_ranks():
    """Allows silent promotion of ranks, because layers rely on it."""
    with jax.numpy_rank_promotion("allow"):
        yield


def _data(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def _squares(tree):
    """Returns a loss of whatever a layer returns."""
    return sum(jnp.mean(jnp.square(x - 1)) for x in jax.tree.leaves(tree))


# Equinox: how a layer is created from a key, and how it is called: the shape of its input, or a function of the layer,
# a key, and the state of all stateful layers.


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
NO_EQUINOX_LAYER = {"StateIndex": "an index into the state", "StatefulLayer": "the base class of stateful layers"}


class OfUsers(eqx.Module):
    """A model with the leaves that users put into one: Python numbers, strings, functions, None."""

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


EQUINOX_MODELS = {**EQUINOX, "a user's": (lambda key: OfUsers(_data(4), 0.5, 3, True, "own", jnp.tanh), (4,))}


class Equinox:
    """A model of Equinox layers, unpartitioned: with bools, numbers and functions among its leaves."""

    def __init__(self, names):
        self.calls = {name: EQUINOX_MODELS[name][1] for name in names}

        def make():
            return {"gain": jnp.ones(())} | {name: EQUINOX_MODELS[name][0](jax.random.key(0)) for name in names}

        self.model, self.state = eqx.filter_jit(eqx.nn.make_with_state(make), **EXACT)()

    def loss(self, model, state, key, poison):
        loss = poison * model["gain"]
        for name, call in self.calls.items():
            out = model[name](_data(*call)) if isinstance(call, tuple) else call(model[name], key, state)
            if isinstance(out, tuple) and isinstance(out[-1], eqx.nn.State):
                out, state = out
            loss += poison * _squares(out)
        return loss, state

    def start(self, api, scaler):
        tx = jmpscale.with_loss_scaling(TX, scaler) if api in WRAPPED else TX
        return self.model, self.state, tx.init(eqx.filter(self.model, eqx.is_inexact_array)), scaler

    @functools.cached_property
    def steps(self):
        def plain(carry, key, poison):
            model, state, opt_state, scaler = carry
            (_, state), grads = eqx.filter_value_and_grad(self.loss, has_aux=True)(model, state, key, poison)
            updates, opt_state = TX.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
            return eqx.apply_updates(model, updates), state, opt_state, scaler

        def functional(carry, key, poison):
            model, state, opt_state, scaler = carry
            grad_fn = jmpscale.value_and_grad(self.loss, has_aux=True, transform=eqx.filter_value_and_grad)
            (loss, new_state), grads = grad_fn(scaler, model, state, key, poison)
            finite = jmpscale.all_finite(grads)

            def step(model, state, opt_state):
                model, opt_state = jmpscale.optax_step(TX, grads)(model, opt_state)
                return model, new_state, opt_state

            carry = jmpscale.apply_if(finite, step, model, state, opt_state)
            return *carry, jmpscale.update(scaler, finite, loss=loss)

        def wrapper(api, carry, key, poison):
            model, state, opt_state, scaler = carry
            grad_fn = WRAPPED[api](self.loss, opt_state, eqx.filter_value_and_grad, has_aux=True)
            (loss, state), grads = grad_fn(model, state, key, poison)
            updates, opt_state = jmpscale.with_loss_scaling(TX).update(grads, opt_state, model, value=loss)
            return eqx.apply_updates(model, updates), state, opt_state, scaler

        steps = {"plain": plain, "functional API": functional}
        steps |= {api: functools.partial(wrapper, api) for api in WRAPPED}
        return {api: eqx.filter_jit(step, **EXACT) for api, step in steps.items()}

    def parts(self, carry, api):
        """Returns the parameters with their optimizer's state, and what a forward pass changes."""
        model, state, opt_state, _ = carry
        return (model, getattr(opt_state, "inner_state", opt_state)), state

    @staticmethod
    def has(name):
        return name in EQUINOX_MODELS

    @staticmethod
    def changes_in_a_forward_pass(path):
        return False

    def scaler(self, carry, api):
        return carry[3] if api == "functional API" else jmpscale.get_scaler(carry[2])


# NNX: how a layer is created from random streams, and the shape of its input or how it is called.


def _recurrent(cell):
    return lambda rngs: nnx.RNN(cell(3, 2, rngs=rngs)), (2, 4, 3)


NNX = {
    "BatchNorm": (lambda rngs: nnx.BatchNorm(3, rngs=rngs), (5, 3)),
    "Bidirectional": (
        lambda rngs: nnx.Bidirectional(
            nnx.RNN(nnx.LSTMCell(3, 2, rngs=rngs)), nnx.RNN(nnx.GRUCell(3, 2, rngs=rngs)), rngs=rngs
        ),
        (2, 4, 3),
    ),
    "Conv": (lambda rngs: nnx.Conv(3, 2, kernel_size=(2,), rngs=rngs), (2, 5, 3)),
    "ConvTranspose": (lambda rngs: nnx.ConvTranspose(3, 2, kernel_size=(2,), rngs=rngs), (2, 5, 3)),
    "Dict": (
        lambda rngs: nnx.Dict(a=nnx.Linear(3, 2, rngs=rngs), b=nnx.LayerNorm(3, rngs=rngs)),
        lambda layer: [layer.a(_data(2, 3)), layer["b"](_data(2, 3))],
    ),
    "Dropout": (lambda rngs: nnx.Dropout(0.5, rngs=rngs), (4, 3)),
    "Einsum": (lambda rngs: nnx.Einsum("ab,bc->ac", (3, 2), (2,), rngs=rngs), (4, 3)),
    "Embed": (lambda rngs: nnx.Embed(3, 2, rngs=rngs), lambda layer: layer(jnp.array([0, 2]))),
    "GRUCell": _recurrent(nnx.GRUCell),
    "GroupNorm": (lambda rngs: nnx.GroupNorm(4, num_groups=2, rngs=rngs), (2, 3, 4)),
    "InstanceNorm": (lambda rngs: nnx.InstanceNorm(3, rngs=rngs), (2, 4, 3)),
    "LSTMCell": _recurrent(nnx.LSTMCell),
    "LayerNorm": (lambda rngs: nnx.LayerNorm(3, rngs=rngs), (2, 3)),
    "Linear": (lambda rngs: nnx.Linear(3, 2, rngs=rngs), (2, 3)),
    "LinearGeneral": (lambda rngs: nnx.LinearGeneral((2, 3), (2, 2), axis=(-2, -1), rngs=rngs), (4, 2, 3)),
    "List": (
        lambda rngs: nnx.List([nnx.Linear(3, 2, rngs=rngs), nnx.RMSNorm(3, rngs=rngs)]),
        lambda layer: [one(_data(2, 3)) for one in layer],
    ),
    "LoRA": (lambda rngs: nnx.LoRA(3, 2, 4, base_module=nnx.Linear(3, 4, rngs=rngs), rngs=rngs), (2, 3)),
    "LoRALinear": (lambda rngs: nnx.LoRALinear(3, 4, lora_rank=2, rngs=rngs), (2, 3)),
    "MultiHeadAttention": (
        lambda rngs: nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, deterministic=False, decode=False, rngs=rngs),
        (2, 3, 4),
    ),
    "OptimizedLSTMCell": _recurrent(nnx.OptimizedLSTMCell),
    "PReLU": (lambda rngs: nnx.PReLU(), (2, 3)),
    "RMSNorm": (lambda rngs: nnx.RMSNorm(3, rngs=rngs), (2, 3)),
    "RNN": (lambda rngs: nnx.RNN(nnx.SimpleCell(3, 2, rngs=rngs), reverse=True, unroll=2), (2, 4, 3)),
    "RoPE": (lambda rngs: nnx.RoPE(embedding_size=4, max_seq_len=4), (2, 3, 2, 4)),
    "Sequential": (lambda rngs: nnx.Sequential(nnx.Linear(3, 2, rngs=rngs), nnx.relu), (2, 3)),
    "SimpleCell": _recurrent(nnx.SimpleCell),
    "SpectralNorm": (
        lambda rngs: nnx.SpectralNorm(nnx.Linear(3, 2, rngs=rngs), rngs=rngs),
        lambda layer: layer(_data(2, 3), update_stats=True),
    ),
    "WeightNorm": (lambda rngs: nnx.WeightNorm(nnx.Linear(3, 2, rngs=rngs), rngs=rngs), (2, 3)),
}
ADDED_LATER = {"Dict", "InstanceNorm", "List", "PReLU", "RoPE", "SpectralNorm", "WeightNorm"}  # after Flax 0.11
NO_NNX_LAYER = {"Module": "the base class of layers", "RNNCellBase": "the base class of cells"}


class NNXModel(nnx.Module):
    """All layers as attributes of one module, because old versions of Flax have no container for them."""

    def __init__(self, names):
        self.gain = nnx.Param(jnp.ones(()))
        for name in names:
            setattr(self, name, NNX[name][0](nnx.Rngs(0)))


class FlaxNNX:
    """A model of NNX layers, which change in place: batch statistics, power iterations, counters of random streams."""

    def __init__(self, names):
        self.names, self.graphdefs = names, {}
        graphdef, state = jax.jit(lambda: nnx.split(NNXModel(names)), **EXACT)()
        self.model = nnx.merge(graphdef, state)

    def loss(self, model, poison):
        loss = poison * model.gain[...]
        for name in self.names:
            layer, call = getattr(model, name), NNX[name][1]
            loss += poison * _squares(layer(_data(*call)) if isinstance(call, tuple) else call(layer))
        return loss

    def start(self, api, scaler):
        tx = jmpscale.with_loss_scaling(TX, scaler) if api in WRAPPED else TX
        optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)
        self.graphdefs[api], state = nnx.split((self.model, optimizer))
        return state, scaler

    @functools.cached_property
    def steps(self):
        def plain(carry, key, poison):
            state, scaler = carry
            model, optimizer = nnx.clone(nnx.merge(self.graphdefs["plain"], state))
            _, grads = nnx.value_and_grad(self.loss)(model, poison)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), scaler

        def functional(carry, key, poison):
            state, scaler = carry
            model, optimizer = nnx.clone(nnx.merge(self.graphdefs["functional API"], state))
            grad_fn = jmpscale.value_and_grad(self.loss, transform=nnx.value_and_grad)
            loss, grads = grad_fn(scaler, model, poison)
            finite = jmpscale.all_finite(grads)
            optimizer.update(model, grads)
            state = jmpscale.apply_if(finite, lambda _: nnx.state((model, optimizer)), state)
            return state, jmpscale.update(scaler, finite, loss=loss)

        def wrapper(api, carry, key, poison):
            state, scaler = carry
            model, optimizer = nnx.clone(nnx.merge(self.graphdefs[api], state))
            grad_fn = WRAPPED[api](self.loss, optimizer.opt_state, nnx.value_and_grad, has_aux=False)
            loss, grads = grad_fn(model, poison)
            optimizer.update(model, grads, value=loss)
            return nnx.state((model, optimizer)), scaler

        steps = {"plain": plain, "functional API": functional}
        steps |= {api: functools.partial(wrapper, api) for api in WRAPPED}
        return {api: jax.jit(step, **EXACT) for api, step in steps.items()}

    def parts(self, carry, api):
        model, optimizer = nnx.clone(nnx.merge(self.graphdefs[api], carry[0]))
        opt_state = optimizer.opt_state
        parameters, others = nnx.state(model, nnx.Param, ...)
        return (parameters, getattr(opt_state, "inner_state", opt_state)), others

    @staticmethod
    def has(name):
        return hasattr(nnx, name)

    @staticmethod
    def changes_in_a_forward_pass(path):
        # NNX's wrappers write the weight that they compute to the parameter of the layer inside.
        return "layer_instance" in path and ("SpectralNorm" in path or "WeightNorm" in path)

    def scaler(self, carry, api):
        if api == "functional API":
            return carry[1]
        return jmpscale.get_scaler(nnx.merge(self.graphdefs[api], carry[0])[1].opt_state)


# Linen: a module, its inputs or their shapes, and its keyword arguments.


def _cell(cell):
    return nn.RNN(cell), ((2, 4, 3),)


LINEN = {
    "BatchNorm": (nn.BatchNorm(use_running_average=False), ((5, 3),)),
    "Bidirectional": (nn.Bidirectional(nn.RNN(nn.LSTMCell(2)), nn.RNN(nn.GRUCell(2))), ((2, 4, 3),)),
    "Conv": (nn.Conv(2, (2,)), ((2, 5, 3),)),
    "ConvLSTMCell": (nn.RNN(nn.ConvLSTMCell(2, (2,))), ((2, 3, 4, 1),)),
    "ConvLocal": (nn.ConvLocal(2, (2,)), ((2, 5, 3),)),
    "ConvTranspose": (nn.ConvTranspose(2, (2,)), ((2, 5, 3),)),
    "Dense": (nn.Dense(2), ((2, 3),)),
    "DenseGeneral": (nn.DenseGeneral((2, 2), axis=(-2, -1)), ((4, 2, 3),)),
    "Dropout": (nn.Dropout(0.5, deterministic=False), ((4, 3),)),
    "Einsum": (nn.Einsum((3, 2), "ab,bc->ac"), ((4, 3),)),
    "Embed": (nn.Embed(3, 2), (jnp.array([0, 2]),)),
    "GRUCell": _cell(nn.GRUCell(2)),
    "GroupNorm": (nn.GroupNorm(num_groups=2), ((2, 3, 4),)),
    "InstanceNorm": (nn.InstanceNorm(), ((2, 4, 3),)),
    "LSTMCell": _cell(nn.LSTMCell(2)),
    "LayerNorm": (nn.LayerNorm(), ((2, 3),)),
    "MGUCell": _cell(nn.MGUCell(2)),
    "MultiHeadAttention": (nn.MultiHeadAttention(2, dropout_rate=0.5, deterministic=False), ((2, 3, 4),)),
    "MultiHeadDotProductAttention": (nn.MultiHeadDotProductAttention(2), ((2, 3, 4), (2, 3, 4))),
    "OptimizedLSTMCell": _cell(nn.OptimizedLSTMCell(2)),
    "PReLU": (nn.PReLU(), ((2, 3),)),
    "RMSNorm": (nn.RMSNorm(), ((2, 3),)),
    "RNN": (nn.RNN(nn.SimpleCell(2), reverse=True, return_carry=True), ((2, 4, 3),)),
    "SelfAttention": (nn.SelfAttention(2), ((2, 3, 4),)),
    "Sequential": (nn.Sequential([nn.Dense(2), nn.relu]), ((2, 3),)),
    "SimpleCell": _cell(nn.SimpleCell(2)),
    "SpectralNorm": (nn.SpectralNorm(nn.Dense(2)), ((2, 3), {"update_stats": True})),
    "WeightNorm": (nn.WeightNorm(nn.Dense(2)), ((2, 3),)),
}
# Arithmetic in 8 bits, used by other layers. Its scales and histories have their own collection; their new values are
# returned in place of gradients.
FP8 = {
    **{
        name: (lambda name=name: nn.Dense(4, dot_general_cls=getattr(nn, name)), ((2, 4),))
        for name in ("Fp8DirectDotGeneralOp", "Fp8DotGeneral", "Fp8DotGeneralOp", "NANOOFp8DotGeneralOp")
    },
    "Fp8Einsum": (
        lambda: nn.MultiHeadDotProductAttention(
            2, qk_attn_weights_einsum_cls=nn.Fp8Einsum, attn_weights_value_einsum_cls=nn.Fp8Einsum
        ),
        ((2, 3, 4), (2, 3, 4)),
    ),
}
NO_LINEN_LAYER = {"Module": "the base class of layers", "RNNCellBase": "the base class of cells"}


class FlaxLinen:
    """A model of Linen layers: parameters in one tree, and what a forward pass changes in another."""

    def __init__(self, names):
        self.calls = {}
        for name in names:
            module, args = LINEN[name]
            settings = {key: value for arg in args if isinstance(arg, dict) for key, value in arg.items()}
            inputs = [_data(*arg) if isinstance(arg, tuple) else arg for arg in args if not isinstance(arg, dict)]
            self.calls[name] = module, inputs, settings

        def make():
            streams = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
            variables = {
                name: dict(module.init(streams, *args, **more)) for name, (module, args, more) in self.calls.items()
            }
            return {name: of.pop("params", {}) for name, of in variables.items()} | {"gain": jnp.ones(())}, variables

        self.params, self.state = jax.jit(make, **EXACT)()

    def loss(self, params, state, key, poison):
        loss, new_state = poison * params["gain"], {}
        for name, (module, args, more) in self.calls.items():
            variables, changing = {"params": params[name], **state[name]}, list(state[name])
            out, new_state[name] = module.apply(variables, *args, **more, rngs={"dropout": key}, mutable=changing)
            loss += poison * _squares(out)
        return loss, new_state

    def start(self, api, scaler):
        tx = jmpscale.with_loss_scaling(TX, scaler) if api in WRAPPED else TX
        return self.params, self.state, tx.init(self.params), scaler

    @functools.cached_property
    def steps(self):
        def plain(carry, key, poison):
            params, state, opt_state, scaler = carry
            (_, state), grads = jax.value_and_grad(self.loss, has_aux=True)(params, state, key, poison)
            updates, opt_state = TX.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), state, opt_state, scaler

        def functional(carry, key, poison):
            params, state, opt_state, scaler = carry
            grad_fn = jmpscale.value_and_grad(self.loss, has_aux=True)
            (loss, new_state), grads = grad_fn(scaler, params, state, key, poison)
            finite = jmpscale.all_finite(grads)
            params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(TX, grads), params, opt_state)
            state = jmpscale.apply_if(finite, lambda _: new_state, state)
            return params, state, opt_state, jmpscale.update(scaler, finite, loss=loss)

        def wrapper(api, carry, key, poison):
            params, state, opt_state, scaler = carry
            grad_fn = WRAPPED[api](self.loss, opt_state, jax.value_and_grad, has_aux=True)
            (loss, state), grads = grad_fn(params, state, key, poison)
            updates, opt_state = jmpscale.with_loss_scaling(TX).update(grads, opt_state, params, value=loss)
            return optax.apply_updates(params, updates), state, opt_state, scaler

        steps = {"plain": plain, "functional API": functional}
        steps |= {api: functools.partial(wrapper, api) for api in WRAPPED}
        return {api: jax.jit(step, **EXACT) for api, step in steps.items()}

    @staticmethod
    def has(name):
        return hasattr(nn, name)

    changes_in_a_forward_pass = staticmethod(Equinox.changes_in_a_forward_pass)
    parts, scaler = Equinox.parts, Equinox.scaler


def _bits(tree):
    """Returns every leaf by its path: arrays as bytes, everything else unchanged."""

    def one(leaf):
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            return type(leaf), leaf
        data = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return str(leaf.dtype), leaf.shape, np.asarray(data).tobytes()

    return {jax.tree_util.keystr(path): one(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _differing(one, other, rounded=False):
    """Returns the paths of the leaves whose bits differ; with `rounded`, floats may differ in the last bit."""

    def same(one, other):
        if not rounded or one is None or other is None or one[:2] != other[:2] or one[0] != "float32":
            return one == other
        return np.allclose(np.frombuffer(one[2], np.float32), np.frombuffer(other[2], np.float32), 2e-6, 1e-7)

    one, other = _bits(one), _bits(other)
    return sorted(path for path in one.keys() | other.keys() if not same(one.get(path), other.get(path)))


# From JAX 0.11 on the compiler fuses the arithmetic of some layers differently if gradients are unscaled afterwards.
SAME_ARITHMETIC = jax.__version_info__ < (0, 11)


KEYS = jax.random.split(jax.random.key(7))
ONE, INFINITE = np.float32(1), np.float32(np.inf)


CASES = [
    ("functional API", jmpscale.static(1.0)),
    ("functional API", jmpscale.dynamic()),
    ("optax wrapper", jmpscale.static(1.0)),
    ("optax wrapper", jmpscale.dynamic()),
    ("loss_scaled", jmpscale.dynamic()),
]


def _check(framework, cases):
    """Trains without jmpscale, then with each API and scaler: two steps, and one that overflows."""
    carry = framework.start("plain", jmpscale.disabled())
    expected = [framework.parts(carry := framework.steps["plain"](carry, key, ONE), "plain") for key in KEYS]
    assert _differing(*expected), "the layers do not train"
    for api, scaler in cases:
        case, step = f"{api}, {scaler.config.mode}", framework.steps[api]
        carry = framework.start(api, scaler)
        for key, plain in zip(KEYS, expected, strict=True):
            carry = step(carry, key, ONE)
            assert not _differing(framework.parts(carry, api), plain, rounded=not SAME_ARITHMETIC), case
        skipped = step(carry, KEYS[0], INFINITE)
        before, after = framework.parts(carry, api), framework.parts(skipped, api)
        if api in WRAPPED:  # it does not gate what a forward pass changes
            before, after = before[0], after[0]
        changed = _differing(after, before)
        if api in WRAPPED:
            changed = [path for path in changed if not framework.changes_in_a_forward_pass(path)]
        assert not changed, case
        assert int(framework.scaler(skipped, api).skipped) == 1


def _classes(module, base):
    return {name for name in dir(module) if inspect.isclass(found := getattr(module, name)) and issubclass(found, base)}


def _named(*tables):
    return {name.partition(",")[0] for table in tables for name in table}


@pytest.mark.parametrize(
    ("module", "base", "known"),
    [
        (eqx.nn, eqx.Module, _named(EQUINOX, NO_EQUINOX_LAYER)),
        (nnx, nnx.Module, _named(NNX, NO_NNX_LAYER)),
        (nn, nn.Module, _named(LINEN, FP8, NO_LINEN_LAYER)),
    ],
    ids=["Equinox", "NNX", "Linen"],
)
def test_the_tables_contain_all_layers(module, base, known):
    listed = _classes(module, base)
    assert not listed - known
    assert known - listed <= (ADDED_LATER if module is nnx else set())


# The README's command runs these, one layer of each kind, with every kind of leaf. CI runs all layers.
QUICK = ["a user's", "BatchNorm", "Dropout", "MLP", "MultiheadAttention", "Shared", "SpectralNorm"]
ALL = {Equinox: EQUINOX_MODELS, FlaxNNX: NNX, FlaxLinen: LINEN}


@pytest.mark.once
def test_layers_of_each_kind_train_as_without_jmpscale_and_skip():
    names = [name for name in QUICK if Equinox.has(name)]
    cases = [("functional API", jmpscale.dynamic()), ("optax wrapper", jmpscale.static(1.0))]
    _check(Equinox(names), [*cases, ("loss_scaled", jmpscale.dynamic())])


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("framework", ALL)
def test_all_layers_train_as_without_jmpscale_and_skip(framework):
    _check(framework([name for name in ALL[framework] if framework.has(name)]), CASES)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("name", FP8)
def test_arithmetic_in_8_bits_trains_as_without_jmpscale_and_skips(name):
    module, shapes = FP8[name][0](), FP8[name][1]
    args = [_data(*shape) for shape in shapes]
    variables = jax.jit(module.init, **EXACT)(jax.random.key(0), *args)

    def loss(params, poison):
        return poison * _squares(module.apply(params, *args))

    @functools.partial(jax.jit, **EXACT)
    def plain(state):
        return state.apply_gradients(grads=jax.grad(loss)(state.params, ONE))

    @functools.partial(jax.jit, **EXACT)
    def functional(state, scaler, poison):
        _, grads = jmpscale.value_and_grad(loss)(scaler, state.params, poison)
        return jmpscale.apply_if(jmpscale.all_finite(grads), lambda state: state.apply_gradients(grads=grads), state)

    state = expected = TrainState.create(apply_fn=None, params=variables, tx=TX)
    for _ in KEYS:
        expected, state = plain(expected), functional(state, jmpscale.static(1.0), ONE)
    assert not _differing(state, expected)
    assert not _differing(functional(state, jmpscale.static(1.0), INFINITE), state)
