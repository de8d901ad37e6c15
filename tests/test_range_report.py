"""range_report finds what float16 runs at every scale find, by brute force, and gives no alarm for healthy programs."""

import dataclasses
import inspect
import math
import re

import equinox
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.experimental import pallas
from jax.extend import core

import jmpscale
from jmpscale._jaxpr import called_jaxpr, evaluate_equation, split_scan_inputs

import meshes
from compiling import count_compilations

F16 = jnp.float16
# XLA may otherwise keep the precision of float32 between two operations in float16.
EXACT = {"xla_allow_excess_precision": False}
POWERS = range(-24, 60)
RANDOM = np.random.default_rng(0)


def random_array(*shape, factor=1.0):
    return jnp.asarray(RANDOM.standard_normal(shape) * factor / shape[0] ** 0.5, jnp.float32)


def squared_error(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def line_of(fun, text):
    """Returns the name of the line of a function that contains a text, as a report shows it."""
    lines, first = inspect.getsourcelines(fun)
    (number,) = [first + i for i, line in enumerate(lines) if text in line]
    return f"test_range_report.py:{number} ({fun.__name__})"


def first_line(report):
    return report.describe().splitlines()[0]


# --- programs in float16


def mlp(params, x):
    half, x = jmpscale.cast((params, x), F16)
    return squared_error(jnp.tanh(x @ half["first"]) @ half["second"])


def masked_attention(params, x):
    half, x = jmpscale.cast((params, x), F16)
    q, k, v = (x @ half[name] for name in "qkv")
    scores = jnp.where(np.tri(len(x), dtype=bool), q @ k.T, -jnp.inf)
    return squared_error(jax.nn.softmax(scores.astype(jnp.float32)).astype(F16) @ v)


def cross_entropy(params, x):
    logits = x.astype(F16) @ params["first"].astype(F16)
    labels = jnp.arange(len(x), dtype=jnp.int32) % logits.shape[1]
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def recurrent(params, x):
    half, x = jmpscale.cast((params, x), F16)

    def cell(h, x):
        h = jnp.tanh(x @ half["q"] + h @ half["k"])
        return h, h

    h, hidden = jax.lax.scan(cell, jnp.zeros((1, 8), F16), x[:, None])
    return squared_error(hidden @ half["v"]) + squared_error(h)


def convolution(params, x):
    images, kernel = x.reshape(2, 8, 8, 1).astype(F16), params["kernel"].astype(F16)
    layout = ("NHWC", "HWIO", "NHWC")
    hidden = jax.nn.relu(jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout))
    return squared_error(
        jax.lax.reduce_window(hidden, -np.float16(np.inf), jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    )


def checkpointed(params, x):
    half, x = jmpscale.cast((params, x), F16)
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) * jnp.float16(30))
    return squared_error(block(block(x, half["q"]), half["k"]))


def casted_back(params, x):
    """The derivative of a conversion that each layer repeats."""
    for name in "qkv":
        x = jnp.sin((x.astype(F16) @ params[name].astype(F16)).astype(jnp.float32))
    return jnp.sum(x)


def plain_mlp(params, x):
    return jnp.mean((jnp.tanh(x @ params["first"]) @ params["second"]) ** 2)


def sum_of_sums(params, x):
    """A loss that is a sum, whose gradients grow from layer to layer."""
    half, x = jmpscale.cast((params, x), F16)
    for _ in range(3):
        x = (x @ half["q"]) * jnp.float16(5)
    return jnp.sum(x.astype(jnp.float32))


PARAMS = {
    **{name: random_array(8, 8) for name in "qkv"},
    "first": random_array(8, 16),
    "second": random_array(16, 4),
    "kernel": random_array(3, 3, 1, 4),
}
X = random_array(16, 8, factor=4.0)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(16, dtype=F16, name="hidden")(x)
        return linen.Dense(4, dtype=F16, name="readout")(linen.gelu(x))


LINEN = Linen().init(jax.random.key(0), X)


def linen_loss(params, x):
    return squared_error(Linen().apply(params, x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 16, dtype=F16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, dtype=F16, rngs=rngs)
        self.readout = nnx.Linear(16, 4, dtype=F16, rngs=rngs)

    def __call__(self, x):
        return self.readout(nnx.relu(self.norm(self.hidden(x))))


def nnx_loss(model, x):
    return squared_error(model(x))


class Equinox(equinox.Module):
    layers: list
    name: str

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.layers, self.name = [equinox.nn.Linear(8, 16, key=keys[0]), equinox.nn.Linear(16, 4, key=keys[1])], "net"

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def equinox_loss(model, x):
    return squared_error(jax.vmap(jmpscale.cast(model, F16))(x.astype(F16)))


def haiku_network(x):
    return haiku.nets.MLP([16, 4])(x)


HAIKU = haiku.transform(haiku_network)


def haiku_loss(params, x):
    return squared_error(HAIKU.apply(jmpscale.cast(params, F16), None, x.astype(F16)))


def pair(loss):
    return lambda *args: (loss(*args), "auxiliary")


def on_devices(params, x):
    """The loss of a batch that is sharded over a mesh."""
    mesh = meshes.make_mesh(data=4)

    def shard_loss(params, x):
        return jax.lax.pmean(mlp(params, x), "data")

    return jax.shard_map(shard_loss, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())(params, x)


def mapped_to_devices(params, x):
    def device_loss(params, x):
        return jax.lax.pmean(mlp(params, x), "devices")

    losses = jax.pmap(device_loss, axis_name="devices", in_axes=(None, 0))(params, x.reshape(4, 4, 8))
    return jnp.mean(losses)


def nested(params, x):
    """A scan over layers, in each of which a scan over positions computes with the layer's weights."""
    half, x = jmpscale.cast((params, x), F16)

    def layer(x, w):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h + x @ w), h), x[0], x)[1], None

    return squared_error(jax.lax.scan(layer, x, jnp.stack([half[name] for name in "qkv"]))[0])


def per_example(params, x):
    return jnp.mean(jax.vmap(lambda x: mlp(params, x[None]))(x))


def counted(params, x):
    """A while loop in the part that is not differentiated."""
    w = params["q"].astype(F16)
    x = jax.lax.stop_gradient(jax.lax.fori_loop(0, jnp.int32(3), lambda _, x: jnp.tanh(x @ w), x.astype(F16)))
    return squared_error(x @ w)


@jax.custom_vjp
def doubled_backward(x):
    return x


doubled_backward.defvjp(lambda x: (x, None), lambda _, g: (g * g.dtype.type(2),))


def custom_rule(params, x):
    half, x = jmpscale.cast((params, x), F16)
    return squared_error(doubled_backward(jax.nn.relu(x @ half["first"])) @ half["second"])


# In older versions of JAX, pmap is a primitive, which does not run under jit without a warning.
PMAP_IS_ENTERED = "xla_pmap" not in str(jax.make_jaxpr(jax.pmap(jnp.sin))(jnp.zeros(1)))
PROGRAMS = {  # the loss function, the arguments, the options of value_and_grad
    "mlp": (mlp, (PARAMS, X), {}),
    "attention": (masked_attention, (PARAMS, X), {}),
    "cross-entropy": (cross_entropy, (PARAMS, X), {}),
    "scan": (recurrent, (PARAMS, X), {}),
    "convolution": (convolution, (PARAMS, X), {}),
    "remat": (checkpointed, (PARAMS, X), {}),
    "conversions": (casted_back, (PARAMS, X), {}),
    "sum": (sum_of_sums, (PARAMS, X), {}),
    "linen": (linen_loss, (LINEN, X), {}),
    "nnx": (nnx_loss, (Nnx(nnx.Rngs(0)), X), {"transform": nnx.value_and_grad}),
    "equinox": (equinox_loss, (Equinox(), X), {"transform": equinox.filter_value_and_grad}),
    "autocast": (jmpscale.autocast(plain_mlp), (PARAMS, X), {}),
    "has_aux, argnums": (pair(mlp), (PARAMS, X), {"argnums": (0, 1), "has_aux": True}),
    "jit": (jax.jit(mlp), (PARAMS, X), {}),
    "shard_map": (on_devices, (PARAMS, X), {}),
    "pmap": (mapped_to_devices, (PARAMS, X), {}),
    "nested scan": (nested, (PARAMS, X), {}),
    "haiku": (haiku_loss, (HAIKU.init(jax.random.key(0), X), X), {}),
    "vmap": (per_example, (PARAMS, X), {}),
    "while": (counted, (PARAMS, X), {}),
    "custom rule": (custom_rule, (PARAMS, X), {}),
}
DEFAULT = {"autocast"}


def rows(table, default):
    return [pytest.param(row, id=name, marks=[pytest.mark.full] * (name not in default)) for name, row in table.items()]


def gradients_of(fun, args, options):
    """Returns a function of the scale that returns the gradients, unscaled in float32."""

    def gradients(scale):
        given = nnx.clone(args) if options.get("transform") is nnx.value_and_grad else args
        scaler = jmpscale.static(1.0)._replace(loss_scale=scale)
        return jmpscale.value_and_grad(fun, **options)(scaler, *given)[1]

    return gradients


def largest_finite_power(gradients):
    """Returns the largest power of two at which the gradients of a float16 run are finite."""

    def is_finite(scale):
        return jmpscale.all_finite(gradients(scale))

    compiled = jax.jit(is_finite).lower(jnp.float32(1)).compile(EXACT)
    finite = [power for power in POWERS if compiled(jnp.float32(2.0**power))]
    assert finite == list(range(POWERS[0], finite[-1] + 1))
    return finite[-1]


def first_non_finite(gradients, scale):
    """Runs the equations one by one in float16; returns the first one with a result that is not finite."""

    def run(jaxpr, consts, args):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(x):
            return x.val if isinstance(x, core.Literal) else values[x]

        for eqn in jaxpr.eqns:
            inputs = [jnp.asarray(read(x)) for x in eqn.invars]
            inner = called_jaxpr(eqn)
            if eqn.primitive.name == "scan":
                outputs = run_scan(eqn, inputs)
            elif inner and eqn.primitive.name != "shard_map":
                outputs = run(*inner, inputs)
            else:
                outputs = evaluate_equation(eqn, eqn.params, inputs)
                half = [x for x in outputs if x.dtype == F16]
                is_move = eqn.primitive.name in ("broadcast_in_dim", "select_n")
                if half and not is_move and not jmpscale.all_finite(half):
                    raise FloatingPointError(eqn.primitive.name)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def run_scan(eqn, inputs):
        params = eqn.params
        consts, carry, xs = split_scan_inputs(eqn, inputs)
        order = range(params["length"])
        ys = {}
        for i in reversed(order) if params["reverse"] else order:
            closed = params["jaxpr"]
            outputs = run(closed.jaxpr, closed.consts, [*consts, *carry, *(x[i] for x in xs)])
            carry, ys[i] = outputs[: len(carry)], outputs[len(carry) :]
        return [*carry, *map(jnp.stack, zip(*(ys[i] for i in order), strict=True))]

    closed = jax.make_jaxpr(gradients)(jnp.float32(1))
    with pytest.raises(FloatingPointError) as caught:
        run(closed.jaxpr, closed.consts, [jnp.float32(scale)])
    return str(caught.value)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("program", rows(PROGRAMS, DEFAULT))
def test_report_finds_the_largest_scale_and_the_first_overflow_of_float16_runs(program):
    fun, args, options = program
    if fun is mapped_to_devices and not PMAP_IS_ENTERED:
        pytest.skip("jax.pmap is not entered")
    gradients = gradients_of(fun, args, options)
    measured = largest_finite_power(gradients)
    report = jmpscale.range_report(fun, **options)(jmpscale.static(2.0 ** (measured + 4)), *args)
    low, high = report.scales()
    assert abs(math.log2(high) - measured) <= 1
    assert low < high
    first = next(row for row in report.rows if row.overflows)
    assert report.describe().splitlines()[-len(report.rows[:20]) :][0].startswith(f"{first.operation}, {first.line}")
    assert first_line(report).startswith("Loss scales from ")
    assert "too large" in first_line(report)
    if fun not in (on_devices, mapped_to_devices):
        assert first.operation == first_non_finite(gradients, 2.0 ** (measured + 4))
    assert not report.not_entered


# --- training at the smallest scale that fits


def sequence_loss(params, tokens):
    """Next-token prediction by a layer of attention; the loss is small, like one divided by a large batch."""
    x, y = tokens[:, :-1], tokens[:, 1:]
    embedded = params["embed"][x]
    q, k, v = (embedded @ params[name] for name in "qkv")
    scores = jnp.where(np.tri(x.shape[1], dtype=bool), jnp.einsum("btd,bsd->bts", q, k) / 4, -jnp.inf)
    hidden = jax.nn.standardize(embedded + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v))
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], y).mean() * 2.0**-12


def regression_loss(params, x):
    hidden = jnp.tanh(jnp.tanh(x @ params["first"]) @ params["second"])
    return jnp.mean((hidden @ params["third"] - jnp.sin(x[:, :4] * 2)) ** 2) * 2.0**-12


def tokens():
    found = RANDOM.integers(0, 16, (64, 2))
    for _ in range(15):
        found = np.concatenate([found, (found[:, -1:] * 3 + found[:, -2:-1]) % 16], 1)
    return jnp.asarray(found, jnp.int32)


TRAINING = {
    "attention": (
        sequence_loss,
        {"embed": random_array(16, 16) * 2, "out": random_array(16, 16)} | {n: random_array(16, 16) for n in "qkv"},
        tokens(),
    ),
    "regression": (
        regression_loss,
        {"first": random_array(16, 32), "second": random_array(32, 32), "third": random_array(32, 4)},
        random_array(256, 16) * 16,
    ),
}


def train(loss_fn, params, batch, scale, steps=200):
    """Returns the parameters and the loss after training with Adam, whose steps do not depend on the loss's size."""
    tx, scaler = optax.adam(3e-3, eps=1e-14), jmpscale.static(scale)

    def step(carry, _):
        params, opt_state = carry
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=steps)).lower((params, tx.init(params)))
    (params, _), losses = run.compile(EXACT)((params, tx.init(params)))
    return params, float(losses[-1])


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.full
@pytest.mark.parametrize("name", ["regression", "attention"])
def test_training_at_the_smallest_scale_reaches_the_loss_of_float32(name):
    loss_fn, params, batch = TRAINING[name]
    trained, expected = train(loss_fn, params, batch, 1.0)
    half_loss_fn = jmpscale.autocast(loss_fn)
    low, high = jmpscale.range_report(half_loss_fn)(jmpscale.dynamic(), trained, batch).scales()
    assert low * 2**12 < high
    assert train(half_loss_fn, params, batch, low)[1] == pytest.approx(expected, rel=0.1)
    assert train(half_loss_fn, params, batch, low * 2.0**-12)[1] > 1.5 * expected


# --- healthy programs


def additive_mask(params, x):
    half, x = jmpscale.cast((params, x), F16)
    mask = jnp.where(np.tri(len(x), dtype=bool), F16(0), jnp.finfo(F16).min)
    scores = F16(8) * ((x @ half["q"]) @ (x @ half["k"]).T)  # below -16, and so the sum is -inf in float16
    return squared_error(jax.nn.softmax(scores + mask) @ x)


def large_mask(params, x):
    """A mask of -1e9, which is -inf in float16."""
    half, x = jmpscale.cast((params, x), F16)
    mask = (1.0 - jnp.asarray(np.tri(len(x)), jnp.float32)) * -1e9
    return squared_error(jax.nn.softmax((x @ half["q"]) @ (x @ half["k"]).T + mask.astype(F16)) @ x)


def mask_of_floats(params, x, valid):
    half, x = jmpscale.cast((params, x), F16)
    mask = ((1.0 - valid) * -1e9).astype(F16)[None, :]
    return squared_error(jax.nn.softmax((x @ half["q"]) @ (x @ half["k"]).T + jnp.tile(mask, (len(x), 1))) @ x)


def where_mask(fill):
    def masked(params, x):
        half, x = jmpscale.cast((params, x), F16)
        scores = jnp.where(np.tri(len(x), dtype=bool), (x @ half["q"]) @ (x @ half["k"]).T, fill)
        return squared_error(jax.nn.softmax(scores) @ x)

    return masked


def confident_softmax(params, x):
    """A trained softmax: almost all probabilities are below 2^-40."""
    logits = (x @ params["q"]).astype(F16)
    labels = jnp.argmax(logits, axis=1)
    sharp = logits * F16(40)
    return optax.softmax_cross_entropy_with_integer_labels(sharp.astype(jnp.float32), labels).mean()


def dropout(params, x, key):
    half, x = jmpscale.cast((params, x), F16)
    hidden = jnp.tanh(x @ half["first"])
    kept = jax.random.bernoulli(key, 0.5, hidden.shape)
    return squared_error(jnp.where(kept, hidden / F16(0.5), F16(0)) @ half["second"])


def sparse_embedding(table, ids):
    return squared_error(table.astype(F16)[ids])


def bias_before_normalization(params, x):
    """The derivative of the bias is zero, but for rounding errors."""
    hidden = x.astype(F16) @ params["first"].astype(F16) + params["bias"].astype(F16)
    normalized = jax.nn.standardize(hidden.astype(jnp.float32), axis=0)
    return squared_error(normalized.astype(F16) @ params["second"].astype(F16))


def forgetful(params, ids):
    """A recurrent network whose first steps have nearly no influence on the loss, in a scan over layers."""
    half = jmpscale.cast(params, F16)

    def layer(x, w):
        _, x = jax.lax.scan(lambda h, x: (jnp.tanh(x @ w + h * F16(0.1)),) * 2, jnp.zeros_like(x[0]), x)
        return x, None

    x, _ = jax.lax.scan(layer, half["first"].T[ids], jnp.stack([half[name] for name in "qkv"]))
    return squared_error(x[-1])


HEALTHY = {
    "attention masked by -inf": (masked_attention, PARAMS, X),
    "additive mask of the lowest number": (additive_mask, PARAMS, X),
    "additive mask of -1e9": (large_mask, PARAMS, X),
    "additive mask of -1e9 that depends on the batch": (mask_of_floats, PARAMS, X, jnp.asarray([1.0] * 12 + [0.0] * 4)),
    "mask of -1e9": (where_mask(-1e9), PARAMS, X),
    "mask of the lowest number": (where_mask(jnp.finfo(F16).min), PARAMS, X),
    "confident softmax": (confident_softmax, PARAMS, X * 3),
    "dropout": (dropout, PARAMS, X, jax.random.key(0)),
    "sparse embedding": (sparse_embedding, random_array(512, 8), jnp.arange(4)),
    "recurrent network": (forgetful, PARAMS, jnp.arange(16)),
    "bias before normalization": (bias_before_normalization, PARAMS | {"bias": jnp.zeros((1, 16))}, X),
}


SHORT = {"attention masked by -inf"}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("program", rows(HEALTHY, SHORT))
def test_healthy_program_gives_no_alarm(program):
    fun, *args = program
    report = jmpscale.range_report(fun)(jmpscale.static(2.0**10), *args)
    assert re.fullmatch(r"Loss scales from 2\^-?\d+ to 2\^\d+ fit; yours is 2\^10\.", first_line(report))
    low, high = report.scales()
    assert low <= 2.0**4
    assert high / low >= 2.0**14


# --- what a report says


def named(report, **fields):
    """Returns the rows that have these values."""
    return [row for row in report.rows if all(getattr(row, name) == value for name, value in fields.items())]


# Programs whose float16 half people wrote by hand, and wrong: they trained badly or not at all, most of them silently.


def swiglu(params, x):
    half, x = jmpscale.cast((params, x), F16)
    gate, up = x @ half["q"], x @ half["k"]
    hidden = jax.nn.silu(gate) * up  # the product
    return squared_error(hidden @ half["v"])


def autoencoder(params, x):
    """A loss in float16, because only the layers were converted."""
    logits = jax.nn.log_sigmoid(x.astype(F16) @ params["q"].astype(F16))
    labels = (x > 0).astype(jnp.float32)
    losses = labels * logits + (1 - labels) * jnp.log(-jnp.expm1(logits))  # cross-entropy
    return -jnp.mean(losses.sum(axis=1))


def layer_norm(params, x):
    """The derivative of rsqrt overflows, although rsqrt does not."""
    hidden = x.astype(F16) @ params["q"].astype(F16)
    hidden = hidden - hidden.mean(axis=1, keepdims=True)
    variance = (hidden * hidden).mean(axis=1, keepdims=True)
    return squared_error((hidden * jax.lax.rsqrt(variance + F16(1e-6))) @ params["k"].astype(F16))  # normalization


def padded(params, x):
    """A batch with a row that is masked everywhere; the loss is finite, because it is masked, too."""
    half, x = jmpscale.cast((params, x), F16)
    is_valid = jnp.asarray(np.arange(16) < [[16], [0]])
    scores = jnp.where(is_valid[:, None], (x @ half["q"]) @ (x @ half["k"]).T, -1e9)
    hidden = jax.nn.softmax(scores) @ (x @ half["v"])  # not finite
    return jnp.where(is_valid, jnp.mean(hidden.astype(jnp.float32) ** 2, axis=2), 0.0).sum()


OVERFLOW = (
    r"The forward pass overflows: {} reaches [\d.e+]+, and the largest number of float16 is 65504\. A loss scale "
)
OVERFLOW += (
    r"cannot prevent that: compute this line, and the lines that read its result, in float32, or normalize its input\."
)
OVERFLOW += r"( These lines overflow, too: .*\.)?"
TOO_LARGE = (
    r"First compute .*(?<!\w){line}.* in float32, because .*log.* are inaccurate in half precision\. "
    r"Loss scales from 2\^-?\d+ to 2\^-?\d+ fit; yours is 2\^16, which is too large: {} overflows above 2\^-?\d+\. "
)
TOO_LARGE += r"A dynamic scale backs off; decrease a static scale\."
NOT_FINITE = r"The result of {} is not finite at any loss scale\. Correct this line\. Common .*"
FOOLED = {  # the loss function and the batch; the operation, its line, and the first sentences
    "product of SwiGLU": (swiglu, X * 300, "mul", "# the product", OVERFLOW),
    "cross-entropy": (autoencoder, X.at[0].multiply(8.0), "div", "# cross-entropy", TOO_LARGE),
    "derivative of LayerNorm": (layer_norm, X * 0.002, "div", "# normalization", OVERFLOW),
    "row that is masked everywhere": (padded, X, "sub", "# not finite", NOT_FINITE),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.full
@pytest.mark.parametrize("program", FOOLED.values(), ids=FOOLED)
def test_first_sentences_name_the_line_and_the_remedy(program):
    fun, x, operation, text, sentences = program
    report = jmpscale.range_report(fun)(jmpscale.dynamic(), PARAMS, x)
    name = f"{operation} at {line_of(fun, text)}"
    assert re.fullmatch(sentences.format(re.escape(name), line=re.escape(line_of(fun, text))), first_line(report))
    if sentences != NOT_FINITE:  # the first row is the first result that overflows
        lines = report.describe().splitlines()
        (header,) = [i for i, line in enumerate(lines) if line.startswith("result ")]
        first = next(row for row in report.rows if row.overflows and row.scaled == (sentences == TOO_LARGE))
        assert lines[header + 1].startswith(f"{first.operation}, {first.line}")
    assert (report.scales() is None) == (sentences != TOO_LARGE)


def test_overflow_of_float16_arguments():
    report = jmpscale.range_report(lambda w: squared_error(w * w))(jmpscale.dynamic(), jnp.full(3, 300, F16))
    assert first_line(report).startswith("The forward pass overflows: mul at ")
    assert "reaches 9e+04" in first_line(report)


def small_and_large(w, x):
    small = jnp.sum((w.astype(F16) * F16(2.0**-20)).astype(jnp.float32)) * 2.0**-30  # small
    large = jnp.sum((x.astype(F16) * F16(2.0**10)).astype(jnp.float32)) * 2.0**10  # large
    return small + large


@pytest.mark.full
def test_no_scale_fits_two_results():
    report = jmpscale.range_report(small_and_large, argnums=(0, 1))(jmpscale.dynamic(), PARAMS["q"], PARAMS["k"])
    low, high = report.scales()
    assert low > high
    assert re.fullmatch(
        rf"No loss scale fits: \w+ at {re.escape(line_of(small_and_large, '# small'))} underflows below 2\^25, and \w+ "
        rf"at {re.escape(line_of(small_and_large, '# large'))} overflows above 2\^-5\. Keep one of them in float32\.",
        first_line(report),
    )


def test_long_lists_of_lines_are_shortened():
    report = jmpscale.range_report(lambda w: jnp.sum((w * F16(2)).astype(jnp.float32)))(
        jmpscale.dynamic(), jnp.ones(2, F16)
    )

    def lines_with(count, scale):
        sensitive = tuple((f"model.py:{i} (f)", ("exp", "log")) for i in range(count))
        return dataclasses.replace(report, sensitive=sensitive, scale=scale).describe().splitlines()

    assert lines_with(1, 2.0**60)[0].startswith("First compute model.py:0 (f) in float32, because exp and log are ")
    words = "First compute model.py:0 (f), model.py:1 (f), model.py:2 (f) and "
    assert lines_with(4, 2.0**60)[0].startswith(f"{words}model.py:3 (f) in float32, because exp and log are inaccurate")
    assert lines_with(5, 2.0**60)[0].startswith(f"{words}2 others in float32")
    assert "  model.py:7 (f): exp, log" in lines_with(8, 1.0)
    assert "  and 1 more" not in lines_with(8, 1.0)
    assert "  and 1 more" in lines_with(9, 1.0)
    assert "First compute" not in lines_with(9, 1.0)[0]


@pytest.mark.full
def test_scale_below_the_range():
    report = jmpscale.range_report(lambda p, x: mlp(p, x) * 2.0**-20)(jmpscale.static(1.0), PARAMS, X)
    low, _ = report.scales()
    assert low > 1
    assert re.search(
        rf"which is too small: .* underflows below 2\^{math.log2(low):.0f}\. A dynamic scale grows", first_line(report)
    )
    assert max(row.underflow for row in report.rows if row.scaled) > 0.01


@pytest.mark.full
def test_operand_that_float16_rounds_to_zero_before_a_logarithm():
    def loss(x):
        p = jax.nn.sigmoid(x.astype(F16))
        return -jnp.sum(jnp.log(p).astype(jnp.float32))  # infinite

    report = jmpscale.range_report(loss)(jmpscale.dynamic(), jnp.array([0.0, -20.0]))
    line = line_of(loss, "# infinite")
    assert first_line(report) == (
        f"The forward pass overflows: log at {line} is infinite, because float16 rounds its operand to zero. A loss "
        "scale cannot prevent that: compute this line, and the lines that its operand comes from, in float32."
    )
    assert report.scales() is None


@pytest.mark.full
def test_result_that_underflows_in_the_forward_pass_is_listed():
    def loss(x):
        half = x.astype(F16)
        variance = jnp.mean(half**2)  # underflows
        return (jax.lax.rsqrt(variance.astype(jnp.float32) + 1e-12) * x).sum()

    title = "Most of the result of these lines in the forward pass underflows; compute them in float32:"
    for size, is_listed in ((1e-5, True), (1.0, False)):
        lines = jmpscale.range_report(loss)(jmpscale.dynamic(), size * X).describe().splitlines()
        assert (title in lines) == is_listed
        assert (f"  {line_of(loss, '# underflows')}" in lines) == is_listed


def test_constant_epsilon_that_float16_rounds_to_zero():
    def normalized(x):
        x = x.astype(F16)
        return squared_error(x / (jnp.abs(x) + F16(1e-9)))

    report = jmpscale.range_report(normalized)(jmpscale.dynamic(), jnp.zeros(3))
    assert first_line(report).startswith(f"The result of div at {line_of(normalized, 'return')} is not finite")


def test_program_in_float32():
    report = jmpscale.range_report(plain_mlp)(jmpscale.dynamic(), PARAMS, X)
    assert report.rows == ()
    assert report.scales() == (2.0**-126, 2.0**126)
    assert report.describe() == (
        "The program computes in float32: it holds no result in half precision, and needs no loss scale. "
        "jmpscale.autocast runs its matmuls in half precision."
    )


@pytest.mark.full
def test_program_in_bfloat16():
    report = jmpscale.range_report(jmpscale.autocast(plain_mlp, dtype=jnp.bfloat16))(jmpscale.dynamic(), PARAMS, X)
    assert report.rows
    assert first_line(report) == "The backward pass holds no result in float16, and needs no loss scale."


def layers(params, x):
    """Layers of different size, the third of which has the largest result."""
    w = jnp.stack([params["q"] * factor for factor in (1, 2, 64, 0.5)]).astype(F16)
    return squared_error(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x.astype(F16), w)[0])


def test_scan_has_one_row_for_all_steps_with_the_worst_one():
    report = jmpscale.range_report(layers)(jmpscale.dynamic(), PARAMS, X)
    (row,) = named(report, operation="dot_general", backward=False)
    assert row.steps == (2,)
    assert row.line == line_of(layers, "lax.scan")
    sizes = [row.size for row in named(report, operation="dot_general", backward=True)]
    assert sorted(sizes) == [64, 128]
    assert "step" in report.describe().splitlines()[1].split()


def one_large_layer(params, x):
    """A scan over layers, of which only the third overflows, in a scan over two halves of the batch."""
    w = jnp.stack([params["q"] * factor for factor in (1, 1, 2.0**12, 1)]).astype(F16)

    def half_batch(x):
        return squared_error(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w * F16(64)), None), x.astype(F16), w)[0])  # layer

    return jax.lax.map(half_batch, x.reshape(2, 8, 8)).sum()


@pytest.mark.full
def test_sentence_names_the_layer_of_a_nested_scan_that_overflows():
    report = jmpscale.range_report(one_large_layer)(jmpscale.dynamic(), PARAMS, X)
    (row,) = named(report, overflows=True, backward=False)
    line = line_of(one_large_layer, "# layer").replace("(one_large_layer)", "(half_batch)")
    assert re.search(rf"mul at {re.escape(line)} in step [01]/2 reaches", first_line(report))
    assert f"{row.steps[0]}/2" in report.describe().splitlines()[2].split()


def vanishing_layers(w, x, run):
    for layer in range(4) if run == "unrolled" else ():
        x = jnp.tanh(x @ w[layer])
    if run == "scan":
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]
    return jnp.mean(x**2)


@pytest.mark.full
def test_scan_over_layers_hides_no_layer_whose_gradients_underflow():
    w = jnp.stack([PARAMS["q"] * factor for factor in (1, 2.0**-12, 1, 1)])
    make_report = jmpscale.range_report(jmpscale.autocast(vanishing_layers))
    scan, unrolled = (make_report(jmpscale.static(1.0), w, X, run) for run in ("scan", "unrolled"))
    assert scan.scales() == unrolled.scales()
    assert re.search(r"too small: \w+ at .* in step 0 underflows below", first_line(scan))


@pytest.mark.full
def test_line_of_a_library_function_that_was_compiled_for_another_line():
    def loss(params, x):
        hidden = x.astype(F16) @ params["q"].astype(F16)
        small = jax.nn.silu(hidden)
        return squared_error(small + jax.nn.silu(hidden * F16(60000)) / F16(60000))  # large

    report = jmpscale.range_report(loss)(jmpscale.dynamic(), PARAMS, X * 4)
    assert {row.line for row in report.rows if row.overflows and not row.scaled} == {line_of(loss, "# large")}


def test_while_loop_has_one_row_for_all_steps():
    def loss(w):
        def body(i, total):
            return total + jnp.sum((w.astype(F16) * jnp.where(i == 2, F16(4), F16(1))).astype(jnp.float32))

        return jax.lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, body(*c)), (0, jnp.float32(0)))[1]

    report = jmpscale.range_report(lambda w: loss(jax.lax.stop_gradient(w)) + w.sum())(jmpscale.dynamic(), jnp.ones(2))
    (row,) = named(report, operation="mul")
    assert (row.steps, row.max_abs, row.backward) == ((2,), 4.0, False)


def branches(params, x, flag):
    half, x = jmpscale.cast((params, x), F16)

    def large(x):
        return x @ half["q"] * F16(60000)

    def small(x):
        return x @ half["k"]

    return squared_error(jax.lax.cond(flag, large, small, x))


@pytest.mark.full
@pytest.mark.parametrize("flag", [True, False])
def test_cond_reports_the_branch_taken(flag):
    report = jmpscale.range_report(branches)(jmpscale.dynamic(), PARAMS, X, jnp.asarray(flag))
    large = line_of(branches, 'half["q"]').replace("branches", "large")
    small = line_of(branches, 'half["k"]').replace("branches", "small")
    line, other = (large, small) if flag else (small, large)
    assert any(row.line == line for row in report.rows)
    assert not any(row.line == other for row in report.rows)
    assert (report.scales() is None) == flag


@pytest.mark.full
def test_values_computed_again_in_the_backward_pass_do_not_scale():
    def loss(params, x):
        half, x = jmpscale.cast((params, x), F16)
        block = jax.checkpoint(lambda x: jnp.tanh(x @ half["q"]) * F16(30))
        return squared_error(block(block(x)))

    report = jmpscale.range_report(loss)(jmpscale.static(2.0**10), PARAMS, X)
    first, again = (named(report, operation="tanh", backward=backward) for backward in (False, True))
    assert [row.max_abs for row in again] == pytest.approx([row.max_abs for row in reversed(first)])
    assert not any(row.scaled for row in again)
    assert all(row.scaled for row in named(report, operation="add_any"))


@jax.custom_vjp
def normalized_backward(x):
    return x


def _normalize(_, g):
    inverse = F16(1) / jnp.max(jnp.abs(g))
    return (g * inverse,)


normalized_backward.defvjp(lambda x: (x, None), _normalize)


@pytest.mark.full
def test_quotient_of_scaled_values_does_not_scale():
    def loss(w, x):
        return squared_error(normalized_backward(x.astype(F16) @ w.astype(F16)))

    report = jmpscale.range_report(loss)(jmpscale.dynamic(), PARAMS["q"], X)
    (row,) = named(report, operation="mul", backward=True)
    assert not row.scaled
    assert row.max_abs == pytest.approx(1.0)
    (gradient,) = named(report, operation="dot_general", backward=True)
    assert not gradient.scaled


@pytest.mark.full
def test_scale_of_loss_scaled_is_a_constant_factor():
    report = jmpscale.range_report(jmpscale.loss_scaled(mlp, 2.0**8))(jmpscale.static(1.0), PARAMS, X)
    plain = jmpscale.range_report(mlp)(jmpscale.static(2.0**8), PARAMS, X)
    assert report.scales() == tuple(scale / 2**8 for scale in plain.scales())


@pytest.mark.full
def test_lines_and_modules_of_frameworks():
    report = jmpscale.range_report(linen_loss)(jmpscale.dynamic(), LINEN, X)
    rows = named(report, operation="dot_general")
    assert {row.module for row in rows} == {"Linen/hidden", "Linen/readout"}
    hidden = {row.line for row in rows if row.module == "Linen/hidden"}
    assert hidden == {line_of(Linen.__call__, "hidden").replace("(", "(Linen.")}
    assert {(row.backward, row.scaled) for row in rows} == {(False, False), (True, True)}


@pytest.mark.full
def test_named_scopes_are_modules():
    def loss(params, x):
        with jax.named_scope("outer"):
            return jax.jit(inner)(params, x)

    def inner(params, x):
        with jax.named_scope("inner"):
            return squared_error(x.astype(F16) @ params["q"].astype(F16))

    report = jmpscale.range_report(loss)(jmpscale.dynamic(), PARAMS, X)
    assert {row.module for row in named(report, operation="dot_general")} == {"outer/inner"}


def careless(params, x):
    logits = x.astype(F16) @ params["first"].astype(F16)
    weights = jnp.exp(logits)  # exponential
    total = jax.lax.reduce_sum(jnp.ones((64, 64), F16), axes=(0, 1))  # long sum
    rest = jnp.mean(x @ params["q"]) + jnp.mean(jnp.dot(x, params["k"], precision="highest"))  # matmul
    return jnp.mean((jnp.log(weights) / F16(3)).astype(jnp.float32)) + total.astype(jnp.float32) + rest


@pytest.mark.full
def test_sensitive_operations_and_wide_matmuls_are_listed_by_line():
    report = jmpscale.range_report(careless)(jmpscale.dynamic(), PARAMS, X)
    assert dict(report.sensitive) == {
        line_of(careless, "# exponential"): ("exp",),
        line_of(careless, "# long sum"): ("reduce_sum",),
        line_of(careless, "jnp.log"): ("log",),
    }
    assert report.float32_matmuls == (line_of(careless, "# matmul"),)
    text = report.describe()
    assert f"compute them in float32:\n  {line_of(careless, '# exponential')}: exp\n" in text
    assert f"These lines have matmuls in float32:\n  {line_of(careless, '# matmul')}\n" in text


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The function jit.* includes a pmap:UserWarning")
def test_pmap_is_entered_or_named():
    report = jmpscale.range_report(mapped_to_devices)(jmpscale.dynamic(), PARAMS, X)
    assert bool(report.not_entered) != PMAP_IS_ENTERED
    assert all("pmap" in text for text in report.not_entered)
    assert (line_of(squared_error, "return") in {row.line for row in report.rows if row.scaled}) == PMAP_IS_ENTERED
    assert report.scales() is not None


@pytest.mark.full
def test_matmul_with_an_algorithm_of_other_hardware():
    def loss(params, x):
        algorithm = jax.lax.DotAlgorithmPreset.F16_F16_F32
        return jnp.sum(jax.lax.dot(x.astype(F16), params["q"].astype(F16), precision=algorithm).astype(jnp.float32))

    report = jmpscale.range_report(loss)(jmpscale.dynamic(), PARAMS, X)
    (row,) = named(report, operation="dot_general", backward=False)
    assert row.max_abs == pytest.approx(float(jnp.abs(X @ PARAMS["q"]).max()), rel=1e-2)


@pytest.mark.full
def test_random_numbers_in_float16_are_entered():
    def loss(params, x, key):
        noise = jax.random.normal(key, x.shape, F16)
        return squared_error((x.astype(F16) + noise) @ params["q"].astype(F16))

    assert jmpscale.range_report(loss)(jmpscale.dynamic(), PARAMS, X, jax.random.key(0)).not_entered == ()


@pytest.mark.full
@pytest.mark.usefixtures("x64", "standard_promotion")
def test_program_with_64_bit_types():
    def loss(params, x, count):
        hidden = (x @ params["first"]).astype(F16)
        hidden = jax.lax.scan(lambda h, i: (jnp.tanh(h) + i.astype(F16), None), hidden, jnp.arange(3))[0]
        fixed = jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h), jax.lax.stop_gradient(hidden))
        hidden = jax.lax.cond(count > 3, lambda h: h * F16(2), lambda h: h, hidden + fixed)
        return jnp.mean(jnp.asarray(hidden @ params["second"].astype(F16), jnp.float64) ** 2)

    params, x = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (PARAMS, X))
    report = jmpscale.range_report(loss)(jmpscale.dynamic(), params, x, 5)
    assert {row.dtype for row in report.rows} == {"float16"}
    low, high = report.scales()
    assert low < 2.0**10 < high


@pytest.mark.full
def test_step_written_with_scale_and_unscale():
    def gradients(scale):
        scaler = jmpscale.static(1.0)._replace(loss_scale=scale)
        return jmpscale.unscale(scaler, jax.grad(lambda params: jmpscale.scale(scaler, mlp(params, X)))(PARAMS))

    _, high = jmpscale.range_report(mlp)(jmpscale.dynamic(), PARAMS, X).scales()
    assert abs(math.log2(high) - largest_finite_power(gradients)) <= 1


@pytest.mark.full
def test_kernels_run_in_their_own_dtype_and_are_named():
    def kernel(x, y):
        y[...] = x[...] * 2

    def loss(w):
        double = pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 8), F16), interpret=True)
        return squared_error(w.astype(F16)) + squared_error(double(jax.lax.stop_gradient(w.astype(F16))))

    report = jmpscale.range_report(loss)(jmpscale.dynamic(), PARAMS["q"])
    (entry,) = report.not_entered
    assert entry == f"{line_of(loss, 'double(')}: pallas_call"
    assert report.describe().splitlines()[-1] == f"  {entry}"
    assert report.scales() is not None


def test_callback_receives_its_own_dtype():
    received = []

    def loss(w):
        jax.debug.callback(lambda x: received.append(x.dtype), w.astype(F16))
        return squared_error(w.astype(F16))

    jmpscale.range_report(loss)(jmpscale.dynamic(), PARAMS["q"])
    jax.effects_barrier()
    assert received == [F16]


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
def test_report_changes_no_nnx_object_and_compiles_one_program():
    model = Nnx(nnx.Rngs(0))
    mean = model.norm.mean[...]
    report = jmpscale.range_report(nnx_loss, transform=nnx.value_and_grad)
    with count_compilations() as compilations:
        report(jmpscale.dynamic(), model, X)
    assert model.norm.mean[...] is mean
    assert len(compilations) == 1


def test_report_takes_any_tree_with_a_scaler():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic(2.0**12))
    assert jmpscale.range_report(jnp.sum)(tx.init(PARAMS), X).scale == 2.0**12
    assert jmpscale.range_report(jnp.sum)(jmpscale.disabled(), X).scale == 1.0


@pytest.mark.full
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_sharded_arrays(axis_type):
    mesh = meshes.make_mesh(getattr(jax.sharding.AxisType, axis_type), data=4)
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        sharded = jmpscale.range_report(mlp)(jmpscale.dynamic(), params, x)
    plain = jmpscale.range_report(mlp)(jmpscale.dynamic(), PARAMS, X)
    assert sharded.scales() == plain.scales()
    found, expected = ([row.max_abs for row in report.rows] for report in (sharded, plain))
    assert found == pytest.approx(expected, rel=1e-3)


# --- wrong calls


def donated():
    w = jnp.ones(3)
    jax.jit(lambda w: w + 1, donate_argnums=0)(w)
    return w


WRONG = {
    "fun is not callable": (
        lambda: jmpscale.range_report(3.0),
        TypeError,
        "fun must be the loss function, got 3.0. The scaler",
    ),
    "no scaler": (
        lambda: jmpscale.range_report(mlp)(PARAMS, X),
        ValueError,
        "scaler must contain exactly one ScalerState, found 0 in a dict. Call range_report(loss_fn)(scaler, params",
    ),
    "batch of scalers": (
        lambda: jmpscale.range_report(mlp)(jax.tree.map(lambda x: jnp.stack([x] * 3), jmpscale.dynamic()), PARAMS, X),
        ValueError,
        "scaler must hold one scaler, got a batch with loss_scale of shape (3,).",
    ),
    "abstract argument": (
        lambda: jmpscale.range_report(mlp)(jmpscale.dynamic(), PARAMS, jax.ShapeDtypeStruct((2, 8), F16)),
        TypeError,
        "args must hold arrays with values, got float16[2, 8] without values at args[1]. Call range_report outside of",
    ),
    "traced argument": (
        lambda: jax.jit(lambda x: jmpscale.range_report(mlp)(jmpscale.dynamic(), PARAMS, x).scale)(X),
        TypeError,
        "args must hold arrays with values, got float32[16, 8] without values at args[1]. Call range_report outside of",
    ),
    "donated argument": (
        lambda: jmpscale.range_report(jnp.sum)(jmpscale.dynamic(), {"w": donated()}),
        ValueError,
        "args must hold arrays with values, got a deleted float32[3] at args[0]['w']. It was donated to a compiled",
    ),
    "limit": (
        lambda: jmpscale.range_report(jnp.sum)(jmpscale.dynamic(), jnp.ones(3)).describe(0),
        ValueError,
        "limit must be between 1 and",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_call_raises(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
