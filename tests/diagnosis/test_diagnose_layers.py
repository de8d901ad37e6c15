"""A diagnosis names the layer at fault, of several that run one line."""

import equinox
import haiku
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import jmpscale
from jmpscale import FindingKind
from jmpscale._diagnosis.trace.layers import find_places
from jmpscale._diagnosis.trace.program import Program, close_over
from jmpscale._programs.interpret import operations

from arrays import normal

pytestmark = pytest.mark.full

H, COUNT, SIZE = jnp.float16, 5, 8
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
        self.layers = getattr(nnx, "List", list)([nnx.Linear(SIZE, SIZE, dtype=H, rngs=rngs) for _ in range(COUNT)])

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


def diagnosed(model, bad, *, checkpoint=False):
    predict, params = model([weight(i, bad) for i in range(COUNT)])
    is_nnx = isinstance(params, nnx.Module)
    if checkpoint:
        predict = (nnx.remat if is_nnx else jax.checkpoint)(predict)

    def loss_fn(params, x):
        return jnp.mean(predict(params, x) ** 2)

    return jmpscale.diagnose(loss_fn, transform=nnx.value_and_grad if is_nnx else jax.value_and_grad)(params, X)


# The layers that overflow, and whether `jax.checkpoint` is around the model.
BAD = [((0,), False), ((0,), True), ((3,), False), ((1, 4), True), ((0, 1, 2, 3), False)]


@pytest.mark.parametrize(("bad", "checkpoint"), BAD)
@pytest.mark.parametrize("model", MODELS)
def test_diagnose_names_the_layers_that_overflow(model, bad, checkpoint):
    """If most layers are wrong, the line is the answer."""
    diagnosis = diagnosed(model, bad, checkpoint=checkpoint)
    layers = tuple(MODELS[model].format(i) for i in bad) if len(bad) < COUNT / 2 else ()
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.layers) == (FindingKind.FORWARD_OVERFLOW, layers)
    assert all(row.line.startswith("test_diagnose_layers.py:") for row in diagnosis.rows)
    words = " and ".join(layers)
    assert not layers or f" in {words}, reaches " in diagnosis.summary or f" of {words}, reaches " in diagnosis.summary
    table = diagnosis.describe().partition("\nline ")[2]
    header = table.partition("\n")[0]
    assert ("layers" in header) == bool(layers) or "casts" in header  # a table of 100 columns may not have both
    assert "casts" in table or max(map(len, table.splitlines()[1:])) <= 100  # names of casts are not shortened


# Other faults than an overflow of a matmul. Each layer of a list has a weight and a number.


def layers_of_lists(block):
    def predict(params, h):
        for layer in params["layers"]:
            h = block(h, layer["w"], layer["s"])
        return h

    return predict


def numbers(bad, number, others=1.0):
    layers = [{"w": weight(i, ()), "s": jnp.float32(number if i in bad else others)} for i in range(COUNT)]
    return {"layers": layers}


@layers_of_lists
def shifted(h, w, s):
    z = (h @ w).astype(jnp.bfloat16)
    z = z + s.astype(jnp.bfloat16)
    return add(h, z.astype(jnp.float32) - s)


@layers_of_lists
def squared(h, w, s):
    z = matmul(h, w) * s.astype(H)
    return add(h, (z * z).astype(jnp.float32) * 1e-6)


@jax.custom_vjp
def with_normalized_cotangent(z, s):
    return z


def normalize(s, g):
    """Returns the cotangent, by way of numbers that no loss scale changes."""
    size = jnp.max(jnp.abs(g))
    large = (g / size * H(3e4)) * s
    return large / (s * H(3e4)) * size, jnp.zeros_like(s)


with_normalized_cotangent.defvjp(lambda z, s: (z, s), normalize)


@layers_of_lists
def with_large_cotangent(h, w, s):
    return add(h, with_normalized_cotangent(matmul(h, w), s.astype(H)))


@layers_of_lists
def with_root(h, w, s):
    z = (h @ w * s).astype(H).astype(jnp.float32)
    return add(h, jnp.sqrt(jnp.sum(z * z, -1, keepdims=True)))


@layers_of_lists
def in_one_scope(h, w, s):
    with jax.named_scope("block"):
        return add(h, matmul(h, w) * s.astype(H))


def encoder_and_decoder(params, h):
    """Returns the activations after scans over stacked layers, of which the parameters alone are known."""
    for side in ("encoder", "decoder"):
        h, _ = jax.lax.scan(lambda h, w: (add(h, matmul(h, w)), None), h, params[side])
    return h


def stacks(bad):
    return {
        side: jnp.stack([weight(i, (1,) if side == bad else ()) for i in range(2)]) for side in ("encoder", "decoder")
    }


FAULTS = {  # the model, its parameters, the kind of the finding, the layers, and the words before them
    "rounding": (shifted, numbers((3,), 300.0, 0.0), FindingKind.ROUNDING, ["['layers'][3]['s']"], "in the layer of"),
    "moderate rounding": (shifted, numbers((3,), 60.0, 0.0), None, ["['layers'][3]['s']"], "in the layer of"),
    "no parameter is read": (
        squared,
        numbers((2, 4), 300.0),
        FindingKind.FORWARD_OVERFLOW,
        ["['layers'][2]['s']", "['layers'][4]['s']"],
        "computed from",
    ),
    "backward pass": (
        with_large_cotangent,
        numbers((2,), 4.0),
        FindingKind.BACKWARD_OVERFLOW,
        ["['layers'][2]['s']"],
        "in the layer of",
    ),
    "not finite in float32": (
        with_root,
        numbers((1, 4), 0.0),
        FindingKind.NOT_FINITE,
        ["['layers'][1]['s']", "['layers'][4]['s']"],
        "computed from",
    ),
    "one scope of all layers": (
        in_one_scope,
        numbers((4,), 3e4),
        FindingKind.FORWARD_OVERFLOW,
        ["['layers'][4]['s']"],
        "in the layer of",
    ),
    "scans": (encoder_and_decoder, stacks("decoder"), FindingKind.FORWARD_OVERFLOW, ["['decoder']"], "in the layer of"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_diagnose_names_the_layers_of_other_faults(name):
    predict, params, kind, layers, words = FAULTS[name]
    scaler = (jmpscale.dynamic(2.0**10),) if kind is FindingKind.BACKWARD_OVERFLOW else ()
    diagnosis = jmpscale.diagnose(lambda params, x: jnp.mean(predict(params, x) ** 2))(*scaler, params, X)
    names = tuple(f"params{x}" for x in layers)
    assert [(x.kind, x.layers) for x in diagnosis.findings] == ([(kind, names)] if kind else [])
    assert f"{words} {' and '.join(names)}" in diagnosis.summary
    assert kind is FindingKind.NOT_FINITE or names in {row.layers for row in diagnosis.rows}


def test_diagnose_step_names_the_layers_of_a_whole_step():
    predict, params = flax_linen([weight(i, (2,)) for i in range(COUNT)])

    @jax.jit
    def step(params, x):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean(predict(params, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    finding = jmpscale.diagnose_step(step)(params, X).findings[0]
    assert finding.layers == ("LinenModel/block_2",)


def test_diagnose_names_no_layer_of_a_line_that_runs_once():
    def loss_fn(w, x):
        z = jnp.abs(w[:1].astype(H) * H(0.5)) + jnp.abs(x.astype(H) * H(6e4))  # two products, of which one overflows
        return jnp.mean(z.astype(jnp.float32)) * w[0, 0]

    (finding,) = jmpscale.diagnose(loss_fn)(weight(0, ()), X).findings
    assert (finding.kind, finding.layers) == (FindingKind.FORWARD_OVERFLOW, ())


def test_operations_of_checkpointed_modules_have_the_scopes_of_their_module():
    predict, params = flax_linen_remat([weight(i, ()) for i in range(COUNT)])
    program = jax.make_jaxpr(jax.grad(lambda params: predict(params, X).sum()))(params)
    scopes = {caller.scopes_of(eqn) for eqn, caller in operations(program.jaxpr) if eqn.primitive.name == "dot_general"}
    assert scopes == {("LinenModel", f"block_{i}", "Dense_0") for i in range(COUNT)}


def test_operations_on_cotangents_are_computed_from_the_parameter_of_their_layer():
    def loss(first, second):
        return jnp.sin(jnp.sin(X @ first) @ second).sum()

    closed = jax.make_jaxpr(lambda *args: jax.value_and_grad(loss, (0, 1))(*args))(weight(0, ()), weight(1, ()))
    jaxpr, consts = close_over(closed.jaxpr, closed.consts, [weight(0, ()), weight(1, ())])
    program = Program(jaxpr, consts, ("first", "second", *[""] * len(closed.consts)))
    places = find_places(program, ["first", "second"])
    found = [(eqn.primitive.name, places[caller.key_of(eqn)]) for eqn, caller in operations(jaxpr)]
    assert [set(x.before) for name, x in found if name == "mul"] == [{"second"}, {"first"}]
    matmuls = [set(x.read) for name, x in found if name == "dot_general"]
    assert matmuls == [{"first"}, {"second"}, {"second"}, {"second"}, {"first"}]
