"""The measured programs: training tasks, and one training step for each way to scale, check and skip.

A method takes a job and returns `(init, step)`: `init(params)` returns the state `(params, optimizer state, its own)`,
and `step(state, batch)` the next state and the loss. Peers are used as their own documentation shows. No norm exceeds
MAX_NORM, so all methods apply the same updates, and their losses must be equal; the work does not depend on the norm.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmpscale

MAX_NORM = 1e4
CONSTANT = 2.0**16  # the loss scale of `constant_scale`
_CHANNELS_LAST = ("NHWC", "HWIO", "NHWC")
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
}


class Job(NamedTuple):
    """A loss of parameters and a batch, with its dtype; gradients are with respect to `cast(params)`."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    cast: Callable[..., Any]
    tx: optax.GradientTransformation  # widens 16-bit gradients, then runs the optimizer
    clipped: optax.GradientTransformation  # the same with clipping in between
    guarded: optax.GradientTransformation  # the same in apply_if_finite, outside which the gradients are widened
    optimizer: str


def make_job(
    task, optimizer="adamw", compute=jnp.float32, grads=jnp.float32, autocast=False, result_dtype=None, precision=None
):
    """Joins a task `(loss_fn, params, batch)` with an optimizer; `grads` is float32 or `compute`.

    The parameters and the batch are cast to `compute`, from which the task's float32 operations are excluded by hand;
    or they remain float32, and `jmpscale.autocast` casts; `result_dtype` is its argument. The `precision` is JAX's
    default for matmuls; their derivatives inherit it.
    """
    loss_fn, params, batch = task
    plain = OPTIMIZERS[optimizer]()
    clip = optax.clip_by_global_norm(MAX_NORM)
    # The master weights are float32 in every job: 16-bit gradients are widened before the optimizer adds them up.
    widen = [] if grads == jnp.float32 else [optax.stateless(lambda updates, _: to_dtype(jnp.float32, updates))]

    def by_hand(params, batch):
        with jax.default_matmul_precision(precision):
            return loss_fn(to_dtype(compute, params), to_dtype(compute, batch))

    loss_of = jmpscale.autocast(loss_fn, dtype=compute, result_dtype=result_dtype) if autocast else by_hand
    cast = functools.partial(to_dtype, grads)
    guarded = optax.apply_if_finite(plain, max_consecutive_errors=5)
    txs = optax.chain(*widen, plain), optax.chain(*widen, clip, plain), optax.chain(*widen, guarded)
    return Job(loss_of, params, batch, cast, *txs, optimizer)


def to_dtype(dtype, tree):
    """Casts the floating-point leaves."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


# --- tasks


def mlp(layers, width, batch):
    """Equal layers, each a matrix and a bias."""
    keys = jax.random.split(jax.random.key(0), layers)
    params = [(jax.random.normal(k, (width, width)) * width**-0.5, jnp.zeros((1, width))) for k in keys]

    def loss_fn(params, x):
        for weights, biases in params:
            x = jnp.tanh(x @ weights + biases)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss_fn, params, jax.random.normal(jax.random.key(1), (batch, width))


def transformer(
    layers, width, heads, vocabulary, length, batch, *, scan=False, remat=None, embedded=None, stored=None, rank=None
):
    """A language model in the shape of GPT-2: twelve leaves a layer, and an output that shares the embedding.

    With `scan`, one layer runs in a loop over stacked parameters. The policy `remat` of `jax.checkpoint`, if given,
    selects the values that are kept for the backward pass. If they are given, the embedding is converted to the dtype
    `embedded` before it is used, and the results of blocks are converted to the dtype `stored`. With a `rank`, only
    LoRA adapters of this rank are trained, one for each matrix of a block: the batch also holds the frozen parameters.
    """
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    keys = iter(jax.random.split(jax.random.key(0), (8 if rank else 4) * layers + 4))

    def block():
        weights = {name: jax.random.normal(next(keys), s) * s[0] ** -0.5 for name, s in shapes.items()}
        biases = {f"{name}_bias": jnp.zeros(s[1]) for name, s in shapes.items()}
        norms = {f"norm_{i}": {"scale": jnp.ones(width), "bias": jnp.zeros(width)} for i in (1, 2)}
        return weights | biases | norms

    params = {
        "embed": 0.02 * jax.random.normal(next(keys), (vocabulary, width)),
        "place": 0.02 * jax.random.normal(next(keys), (length, width)),
        "blocks": [block() for _ in range(layers)],
        "norm": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
    }
    if scan:
        params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"])

    def linear(block, name, x):
        y = x @ block[name] + block[f"{name}_bias"]
        return y + (x @ block[f"{name}_a"]) @ block[f"{name}_b"] if rank else y

    def attend(block, x):
        q, k, v = jnp.split(linear(block, "qkv", x), 3, axis=-1)
        q, k, v = (t.reshape(*t.shape[:2], heads, width // heads) for t in (q, k, v))
        logits = jnp.einsum("bqhc,bkhc->bhqk", q, k).astype(jnp.float32) * (width // heads) ** -0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), logits, -1e9)).astype(x.dtype)
        x = jnp.einsum("bhqk,bkhc->bqhc", weights, v).reshape(x.shape)
        return linear(block, "out", x)

    def layer(x, block):
        x = _store(x + attend(block, _norm(block["norm_1"], x)), stored)
        hidden = jax.nn.gelu(linear(block, "up", _norm(block["norm_2"], x)))
        return _store(x + linear(block, "down", hidden), stored), None

    if remat:
        layer = jax.checkpoint(layer, policy=remat)

    def loss_fn(params, tokens):
        embedding = _store(params["embed"], embedded)
        x = embedding[tokens[:, :-1]] + params["place"]
        if scan:
            x, _ = jax.lax.scan(layer, _store(x, stored), params["blocks"])
        else:
            for block in params["blocks"]:
                x, _ = layer(x, block)
        logits = (_norm(params["norm"], x) @ embedding.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = jax.random.randint(next(keys), (batch, length + 1), 0, vocabulary)
    if not rank:
        return loss_fn, params, tokens

    def adapter():
        inner = {f"{name}_a": jax.random.normal(next(keys), (s[0], rank)) for name, s in shapes.items()}
        return inner | {f"{name}_b": jnp.zeros((rank, s[1])) for name, s in shapes.items()}

    def adapted_loss_fn(adapters, frozen_and_tokens):
        frozen, tokens = frozen_and_tokens
        blocks = [block | pair for block, pair in zip(frozen["blocks"], adapters, strict=True)]
        return loss_fn(frozen | {"blocks": blocks}, tokens)

    return adapted_loss_fn, [adapter() for _ in range(layers)], (params, tokens)


def language_model():
    """Returns the language model of docs/costs.md: 12 layers of GPT-2's width, with fewer words and places."""
    return transformer(12, 768, 12, 32_768, 512, 16)


def gpt2(layers, vocabulary=50257, batch=8, **options):
    """Returns GPT-2 small with this number of layers, of which the model has 12."""
    return transformer(layers, 768, 12, vocabulary, 1024, batch, **options)


def lstm(width, vocabulary, length, batch):
    """A language model of one LSTM layer in a scan, whose cell state is in float32."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "embed": 0.1 * jax.random.normal(keys[0], (vocabulary, width)),
        "kernel": jax.random.normal(keys[1], (2 * width, 4 * width)) * (2 * width) ** -0.5,
        "bias": jnp.zeros(4 * width),
        "head": jax.random.normal(keys[2], (width, vocabulary)) * width**-0.5,
    }

    def loss_fn(params, tokens):
        def cell(carry, x):
            hidden, state = carry
            gates = jnp.concatenate([x, hidden], axis=-1) @ params["kernel"] + params["bias"]
            enter, forget, leave, new = jnp.split(gates.astype(jnp.float32), 4, axis=-1)
            state = jax.nn.sigmoid(forget + 1) * state + jax.nn.sigmoid(enter) * jnp.tanh(new)
            hidden = (jax.nn.sigmoid(leave) * jnp.tanh(state)).astype(hidden.dtype)
            return (hidden, state), hidden

        x = jnp.moveaxis(params["embed"][tokens[:, :-1]], 1, 0)
        start = jnp.zeros_like(x[0]), jnp.zeros(x.shape[1:], jnp.float32)
        _, hidden = jax.lax.scan(cell, start, x)
        logits = (hidden @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].T).mean()

    return loss_fn, params, jax.random.randint(keys[3], (batch, length + 1), 0, vocabulary)


def _store(x, dtype):
    return x if dtype is None else x.astype(dtype)


def _norm(params, x):
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    normal = centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-5)
    return normal.astype(x.dtype) * params["scale"] + params["bias"]


def resnet(blocks, width, size, batch, *, stored=None):
    """An image classifier with residual blocks of two convolutions and batch normalization, in four stages.

    The results of blocks, and the operand of max pooling, are converted to the dtype `stored`, if given.
    """
    keys = iter(jax.random.split(jax.random.key(0), 16 * sum(blocks)))

    def convolution(kernel, inputs, outputs):
        shape = (kernel, kernel, inputs, outputs)
        weights = jax.random.normal(next(keys), shape) * math.prod(shape[:3]) ** -0.5
        return {"kernel": weights, "scale": jnp.ones(outputs), "bias": jnp.zeros(outputs)}

    def block(inputs, outputs):
        layers = {"first": convolution(3, inputs, outputs), "second": convolution(3, outputs, outputs)}
        return layers if inputs == outputs else layers | {"shortcut": convolution(1, inputs, outputs)}

    params, inputs = {"stem": convolution(7, 3, width), "stages": []}, width
    for stage, count in enumerate(blocks):
        outputs = width * 2**stage
        params["stages"].append([block(inputs if i == 0 else outputs, outputs) for i in range(count)])
        inputs = outputs
    params["head"] = jax.random.normal(next(keys), (inputs, 1000)) * inputs**-0.5

    def convolve(layer, x, stride=1):
        kernel = layer["kernel"]
        x = x.astype(kernel.dtype)  # the operands of a convolution are not promoted
        x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=_CHANNELS_LAST)
        return _batch_norm(layer, x)

    def loss_fn(params, batch):
        images, labels = batch
        x = _store(jax.nn.relu(convolve(params["stem"], images, 2)), stored)
        x = jax.lax.reduce_window(x, np.array(-np.inf, x.dtype), jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage, blocks in enumerate(params["stages"]):
            for i, block in enumerate(blocks):
                stride = 2 if i == 0 and stage > 0 else 1
                y = convolve(block["second"], jax.nn.relu(convolve(block["first"], x, stride)))
                y = y + (convolve(block["shortcut"], x, stride) if "shortcut" in block else x)
                x = _store(jax.nn.relu(y), stored)
        logits = (x.mean((1, 2)) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    images = jax.random.normal(next(keys), (batch, size, size, 3))
    return loss_fn, params, (images, jax.random.randint(next(keys), (batch,), 0, 1000))


def unet(width, size, batch, *, stored=None):
    """A denoiser of images: residual blocks with group normalization, and skip connections between three resolutions.

    The results of blocks are converted to the dtype `stored`, if given.
    """
    keys = iter(jax.random.split(jax.random.key(0), 99))

    def kernel(size, inputs, outputs):
        return jax.random.normal(next(keys), (size, size, inputs, outputs)) * (size**2 * inputs) ** -0.5

    def norm(channels):
        return {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}

    def block(inputs, outputs):
        layers = {"norm_1": norm(inputs), "conv_1": kernel(3, inputs, outputs)}
        layers |= {"norm_2": norm(outputs), "conv_2": kernel(3, outputs, outputs)}
        return layers if inputs == outputs else layers | {"shortcut": kernel(1, inputs, outputs)}

    params = {
        "stem": kernel(3, 3, width),
        "down": [block(width, width), block(width, 2 * width), block(2 * width, 4 * width)],
        "middle": block(4 * width, 4 * width),
        "up": [block(8 * width, 2 * width), block(4 * width, width), block(2 * width, width)],
        "norm": norm(width),
        "head": kernel(3, width, 3),
    }

    def convolve(kernel, x):
        x = x.astype(kernel.dtype)  # the operands of a convolution are not promoted
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=_CHANNELS_LAST)

    def run(block, x):
        y = convolve(block["conv_1"], jax.nn.silu(_group_norm(block["norm_1"], x)))
        y = convolve(block["conv_2"], jax.nn.silu(_group_norm(block["norm_2"], y)))
        return _store(y + (convolve(block["shortcut"], x) if "shortcut" in block else x), stored)

    def loss_fn(params, batch):
        noisy, noise = batch
        x, skips = convolve(params["stem"], noisy), []
        for block in params["down"]:
            x = run(block, x)
            skips.append(x)
            x = x[:, ::2, ::2]
        x = run(params["middle"], x)
        for block in params["up"]:
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = run(block, jnp.concatenate([x, skips.pop()], axis=-1))
        prediction = convolve(params["head"], jax.nn.silu(_group_norm(params["norm"], x)))
        return jnp.mean((prediction.astype(jnp.float32) - noise.astype(jnp.float32)) ** 2)

    images = jax.random.normal(next(keys), (batch, size, size, 3))
    return loss_fn, params, (images, images)


def _group_norm(params, x, groups=8):
    wide = x.astype(jnp.float32).reshape(*x.shape[:3], groups, x.shape[3] // groups)
    centered = wide - wide.mean((1, 2, 4), keepdims=True)
    normal = centered * jax.lax.rsqrt(jnp.mean(centered**2, (1, 2, 4), keepdims=True) + 1e-5)
    return normal.reshape(x.shape).astype(x.dtype) * params["scale"] + params["bias"]


def _batch_norm(params, x):
    wide = x.astype(jnp.float32)
    mean, mean_square = wide.mean((0, 1, 2)), (wide**2).mean((0, 1, 2))
    normal = (wide - mean) * jax.lax.rsqrt(mean_square - mean**2 + 1e-5)
    return normal.astype(x.dtype) * params["scale"] + params["bias"]


def embedding(words, width, length, batch):
    """A table of word vectors, of which each step reads few rows, followed by one matrix."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "table": 0.02 * jax.random.normal(keys[0], (words, width)),
        "matrix": jax.random.normal(keys[1], (width, width)) * width**-0.5,
    }

    def loss_fn(params, words):
        x = jnp.tanh(params["table"][words] @ params["matrix"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss_fn, params, jax.random.randint(keys[2], (batch, length), 0, words)


# --- methods


def bare(job, tx=None):
    tx = tx or job.tx

    def step(state, batch):
        params, opt_state, own = state
        loss, grads = jax.value_and_grad(job.loss_fn)(job.cast(params), batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, own), loss

    return lambda params: (params, tx.init(params), ()), step


def master_params(job):
    """Keeps the parameters in the dtype of the gradients, and their float32 copies in the state of the optimizer."""
    init, step = bare(job, jmpscale.with_master_params(job.tx))
    return lambda params: init(job.cast(params)), step


def constant_scale(job, tx=None):
    """Multiplies the loss by a constant, and divides the gradients by it.

    Its backward pass has the values of a loss-scaled one. Without a scale, many gradients of float16 matmuls are zero,
    and a GPU needs less power to multiply zeros.
    """

    tx = tx or job.tx

    def scaled(params, batch):
        loss = job.loss_fn(params, batch)
        return CONSTANT * loss, loss

    def step(state, batch):
        params, opt_state, own = state
        grads, loss = jax.grad(scaled, has_aux=True)(job.cast(params), batch)
        grads = jax.tree.map(lambda g: g / CONSTANT, to_dtype(jnp.float32, grads))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, own), loss

    return lambda params: (params, tx.init(params), ()), step


def functional(job, tx=None, scaler=None):
    tx, initial = tx or job.tx, scaler or jmpscale.dynamic()

    def step(state, batch):
        params, opt_state, scaler = state
        loss, grads = jmpscale.value_and_grad(job.loss_fn)(scaler, job.cast(params), batch)
        finite = jmpscale.all_finite((loss, grads), scaler=scaler)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)
        return (params, opt_state, jmpscale.update(scaler, finite, loss=loss)), loss

    return lambda params: (params, tx.init(params), jax.tree.map(jnp.array, initial)), step


def norm_as_check(job):
    """The norm that clipping needs is also the check of the gradients: it is finite only if every gradient is."""

    def step(state, batch):
        params, opt_state, scaler = state
        loss, grads = jmpscale.value_and_grad(job.loss_fn)(scaler, job.cast(params), batch)
        grads = to_dtype(jnp.float32, grads)
        norm = optax.tree.norm(grads)
        finite = jmpscale.all_finite((loss, norm))
        clipped = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / norm), grads)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(job.tx, clipped), params, opt_state)
        return (params, opt_state, jmpscale.update(scaler, finite, loss=loss)), loss

    return lambda params: (params, job.tx.init(params), jax.tree.map(jnp.array, jmpscale.dynamic())), step


def optax_wrapper(job, tx=None, **options):
    tx = jmpscale.with_loss_scaling(tx or job.tx, **options)

    def step(state, batch):
        params, opt_state, own = state
        loss, grads = jmpscale.value_and_grad(job.loss_fn)(opt_state, job.cast(params), batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state, own), loss

    return lambda params: (params, tx.init(params), ()), step


def scaled_backward(job):
    """Returns the step of a training loop that takes a loss function and differentiates it by itself."""
    tx = jmpscale.with_loss_scaling(job.tx, jmpscale.static(1.0))
    loss_fn = jmpscale.scaled_backward(job.loss_fn, 2.0**16)

    def step(state, batch):
        params, opt_state, own = state
        loss, grads = jax.value_and_grad(loss_fn)(job.cast(params), batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, own), loss

    return lambda params: (params, tx.init(params), ()), step


def jmp_steps(job):
    import jmp

    def step(state, batch):
        params, opt_state, own = state
        loss_scale = jmp.DynamicLossScale(*own)  # created here: as a part of the state it could not be lowered

        def scaled(half):
            loss = job.loss_fn(half, batch)
            return loss_scale.scale(loss), loss

        grads, loss = jax.grad(scaled, has_aux=True)(job.cast(params))
        grads = loss_scale.unscale(grads)
        updates, new_opt_state = job.tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        params, opt_state = jmp.select_tree(finite, new, (params, opt_state))
        return (params, opt_state, (loss_scale.loss_scale, loss_scale.counter)), loss

    return lambda params: (params, job.tx.init(params), (jnp.float32(2.0**15), jnp.int32(0))), step


def flax_steps(job):
    from flax.training.dynamic_scale import DynamicScale

    def step(state, batch):
        params, opt_state, scale = state
        scale, finite, loss, grads = scale.value_and_grad(job.loss_fn)(job.cast(params), batch)
        updates, new_opt_state = job.tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        keep = functools.partial(jnp.where, finite)
        params, opt_state = jax.tree.map(keep, new_params, params), jax.tree.map(keep, new_opt_state, opt_state)
        return (params, opt_state, scale), loss

    return lambda params: (params, job.tx.init(params), DynamicScale()), step


def mpx_steps(job):
    """Follows `mpx.filter_value_and_grad`, with mpx's own functions, except its cast, because the job casts."""
    import equinox as eqx
    import mpx

    start = mpx.DynamicLossScaling(jnp.float32(2.0**15), jnp.float32(1.0))
    arrays, rest = eqx.partition(start, eqx.is_array)  # as eqx.filter_jit would

    def step(state, batch):
        params, opt_state, scaling = state
        scaling = eqx.combine(scaling, rest)
        loss, grads = eqx.filter_value_and_grad(mpx.scaled(job.loss_fn, scaling))(job.cast(params), batch)
        finite = mpx.all_finite(grads)
        scaling = scaling.adjust(finite)
        grads, loss = scaling.unscale(grads), scaling.unscale(loss)
        params, opt_state = mpx.optimizer_update(params, job.tx, opt_state, grads, finite)
        return (params, opt_state, eqx.filter(scaling, eqx.is_array)), loss

    return lambda params: (params, job.tx.init(params), arrays), step


METHODS = {
    "bare": bare,
    "clipped": lambda job: bare(job, job.clipped),
    "with_master_params": master_params,
    "constant scale": constant_scale,
    "clipped, constant scale": lambda job: constant_scale(job, job.clipped),
    "functional": functional,
    "functional, clip in chain": lambda job: functional(job, job.clipped),
    "functional, norm as check": norm_as_check,
    "optax wrapper": optax_wrapper,
    "optax wrapper, clip in chain": lambda job: optax_wrapper(job, job.clipped),
    "optax wrapper, max_norm": lambda job: optax_wrapper(job, max_norm=MAX_NORM),
    "scaled_backward": scaled_backward,
    "jmp": jmp_steps,
    "Flax DynamicScale": flax_steps,
    "mpx": mpx_steps,
    "optax apply_if_finite": lambda job: bare(job, job.guarded),
}
BASELINE = "clipped"  # clipping, like skipping, needs all gradients first
PEERS = ("jmp", "Flax DynamicScale", "mpx", "optax apply_if_finite")
PEER_MODULES = ("jmp", "flax", "mpx", "equinox")
# These do not skip an overflow.
UNGUARDED = ("bare", "with_master_params", "clipped", "constant scale", "clipped, constant scale")


def count(tree):
    """Counts the elements of a tree."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
