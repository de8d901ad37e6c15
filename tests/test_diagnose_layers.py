"""A diagnosis names the layer at fault, of several that run one line."""

import equinox
import haiku
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import jmpscale

from arrays import normal

H, COUNT, SIZE = jnp.float16, 6, 8
X = normal(0, 16, SIZE)


def add(h, z):
    """Returns the activations after a residual layer, which are right for any finite result of its matmul."""
    z = z.astype(jnp.float32)
    return h + z / (1 + jnp.abs(z))


def weight(i, bad):
    """Returns a matrix; the matmul of one of the `bad` layers overflows in float16, but its cast does not."""
    return jnp.clip(normal(i + 1, SIZE, SIZE) * (4e4 if i in bad else 0.3), -6e4, 6e4)


def matmul(h, w):
    return h.astype(H) @ w.astype(H)


# Each function returns a function of parameters and inputs, and the parameters, whose weights are given.


def lists(ws):
    def predict(params, h):
        for layer in params["layers"]:
            h = add(h, matmul(h, layer["w"]))
        return h

    return predict, {"layers": [{"w": w} for w in ws]}


def scopes(ws):
    def predict(params, h):
        for i, w in enumerate(params):
            with jax.named_scope(f"block_{i}"):
                h = add(h, matmul(h, w))
        return h

    return predict, ws


def functions(ws):
    block = jax.jit(lambda h, w: add(h, matmul(h, w)))

    def predict(params, h):
        for w in params:
            h = block(h, w)
        return h

    return predict, ws


def stacked(ws):
    def predict(params, h):
        for i in range(COUNT):
            h = add(h, matmul(h, params[i]))
        return h

    return predict, jnp.stack(ws)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, h):
        return add(h, linen.Dense(SIZE, dtype=H)(h))


class LinenModel(linen.Module):
    block: type = LinenBlock

    @linen.compact
    def __call__(self, h):
        for i in range(COUNT):
            h = self.block(name=f"block_{i}")(h)
        return h


def with_weights(params, ws, path):
    """Returns the parameters of a model with other weights; `path` has the keys of a weight."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: next((w for i, w in enumerate(ws) if path(i) == jax.tree_util.keystr(keys)), x), params
    )


def flax_linen(ws, block=LinenBlock):
    model = LinenModel(block)
    params = model.init(jax.random.key(0), X)
    return model.apply, with_weights(params, ws, lambda i: f"['params']['block_{i}']['Dense_0']['kernel']")


def flax_linen_remat(ws):
    return flax_linen(ws, linen.remat(LinenBlock))


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(SIZE, SIZE, dtype=H, rngs=rngs) for _ in range(COUNT)])

    def __call__(self, h):
        for layer in self.layers:
            h = add(h, layer(h))
        return h


def flax_nnx(ws):
    model = NNXModel(nnx.Rngs(0))
    for layer, w in zip(model.layers, ws, strict=True):
        layer.kernel[...] = w
    return lambda model, h: model(h), model


class EquinoxModel(equinox.Module):
    layers: list[equinox.nn.Linear]

    def __call__(self, h):
        for layer in self.layers:
            h = add(h, jmpscale.cast(layer, H)(h.astype(H)))
        return h


def equinox_list(ws):
    model = EquinoxModel([equinox.nn.Linear(SIZE, SIZE, key=jax.random.key(0)) for _ in ws])
    model = equinox.tree_at(lambda model: [x.weight for x in model.layers], model, [w.T for w in ws])
    return lambda model, h: jax.vmap(model)(h), model


def haiku_linear(ws):
    def network(h):
        for i in range(COUNT):
            h = add(h, haiku.Linear(SIZE, name=f"block_{i}")(h.astype(H)))
        return h

    model = haiku.transform(network)
    params = with_weights(model.init(jax.random.key(0), X), ws, lambda i: f"['block_{i}']['w']")
    return lambda params, h: model.apply(jmpscale.cast(params, H), None, h), params


MODELS = {  # with the name of a layer
    lists: "params['layers'][{}]['w']",
    scopes: "block_{}",
    functions: "params[{}]",
    stacked: "params[{}]",
    flax_linen: "LinenModel/block_{}",
    flax_linen_remat: "LinenModel/block_{}",
    flax_nnx: "params.layers[{}].kernel.value",
    equinox_list: "params.layers[{}].weight",
    haiku_linear: "block_{}",
}


def diagnosed(model, bad, *, checkpoint=False, **options):
    predict, params = model([weight(i, bad) for i in range(COUNT)])
    is_nnx = isinstance(params, nnx.Module)
    if checkpoint:
        predict = (nnx.remat if is_nnx else jax.checkpoint)(predict)
    transform = nnx.value_and_grad if is_nnx else jax.value_and_grad
    loss_fn = lambda params, x: jnp.mean(predict(params, x) ** 2)  # noqa: E731
    return jmpscale.diagnose(loss_fn, transform=transform, **options)(params, X)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("bad", [(3,), (1, 4), (0, 1, 2, 3, 4)], ids=str)
def test_diagnose_names_the_layers_that_overflow(model, bad, checkpoint):
    diagnosis = diagnosed(model, bad, checkpoint=checkpoint)
    expected = tuple(MODELS[model].format(i) for i in bad) if len(bad) < 3 else ()
    (finding,) = diagnosis.findings
    print(diagnosis.describe())
    assert finding.kind == jmpscale.FindingKind.FORWARD_OVERFLOW
    assert finding.layers == expected
