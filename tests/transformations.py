"""A loss under each transformation of JAX: a row takes `wrap`, such as autocast, and returns a function of w and x."""

import functools
import inspect

import jax
import jax.custom_batching
import jax.custom_derivatives
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import compute_on, xla_metadata

import jmpscale

import meshes

SCALER = jmpscale.static(2.0**8)
RANDOM = np.random.default_rng(0)
N = 16


def random_array(shape, random=RANDOM):
    return jnp.asarray(random.standard_normal(shape) / shape[0] ** 0.5, jnp.float32)


W, X = random_array((N, N)), random_array((N, N))


def loss(w, x):
    """Two matmuls, both with gradients for w and x."""
    return jnp.mean((jnp.tanh(x @ w) @ w.T - x) ** 2)


def gradients(fun):
    return jax.value_and_grad(fun, (0, 1))


def devices(count):
    meshes.require_devices(count)
    return jax.devices()[:count]


def layers_in_scan(w, x):
    return jnp.mean(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0] ** 2)


def in_while_loop(w, x):
    """Returns h, which can be differentiated in forward mode."""
    return jax.lax.while_loop(
        lambda state: (state[0] < 3) & (jnp.sum(state[1] @ w) < 1e9),
        lambda state: (state[0] + 1, jnp.tanh(state[1] @ w)),
        (0, x),
    )[1]


def in_switch(w, x):
    branches = [lambda x: x, lambda x: x @ w, lambda x: jnp.tanh(x @ w) @ w.T]
    return jnp.mean(jax.lax.switch(jnp.int32(2), branches, x) ** 2)


def on_platform(w, x):
    return jnp.mean(jax.lax.platform_dependent(x, cpu=lambda x: x @ w, default=lambda x: x @ w) ** 2)


def in_nested_jit(w, x):
    layer = jax.jit(lambda x: jnp.tanh(x @ w))
    return jnp.mean(jax.jit(lambda x: layer(layer(x)))(x) ** 2)


def checkpointed(policy):
    @functools.partial(jax.checkpoint, policy=policy)
    def block(w, x):
        return jnp.tanh(checkpoint_name(x @ w, "hidden")) @ w.T

    return lambda w, x: jnp.mean(block(w, block(w, x)) ** 2)


@jax.custom_jvp
def softsign(x):
    return x / (1 + jnp.abs(x))


softsign.defjvp(lambda primals, tangents: (softsign(*primals), tangents[0] / (1 + jnp.abs(primals[0])) ** 2))


@jax.custom_vjp
def with_clipped_gradient(x):
    return x


with_clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


@jax.custom_vjp
def custom_matmul(x, w):
    return x @ w


custom_matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@jax.custom_jvp
def custom_product(x, w):
    return x @ w


custom_product.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))


def autocast_inside_custom_vjp(wrap):
    """A derivative rule whose author has chosen where to use autocast."""
    matmul = wrap(jnp.matmul)

    @jax.custom_vjp
    def layer(w, x):
        return matmul(x, w)

    layer.defvjp(lambda w, x: (matmul(x, w), (w, x)), lambda saved, g: (matmul(saved[1].T, g), matmul(g, saved[0].T)))
    return lambda w, x: jnp.mean(jnp.tanh(layer(w, x)) ** 2)


def between_custom_rules(w, x):
    return jnp.mean(with_clipped_gradient(softsign(x @ w) @ w.T) ** 2)


@jax.custom_batching.custom_vmap
def with_vmap_rule(w, x):
    return jnp.tanh(x @ w)


@with_vmap_rule.def_vmap
def _(size, is_batched, w, x):
    return jnp.tanh(jnp.einsum("bi,ij->bj", x, w)), True


def linear_layer(w, x):
    return jax.custom_derivatives.linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, w, x)


def on_host(w, x):
    if hasattr(compute_on, "compute_on2"):
        place = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}
        return jnp.tanh(compute_on.compute_on2(lambda w, x: x @ w, **place)(w, x))
    if "out_memory_spaces" in inspect.signature(compute_on.compute_on).parameters:
        place = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}
        return jnp.tanh(compute_on.compute_on(lambda w, x: x @ w, **place)(w, x))
    with compute_on.compute_on("device_host"):
        return jnp.tanh(x @ w)


def ragged(w, x):
    return jnp.mean(jax.lax.ragged_dot(x, jnp.stack([w, w.T]), jnp.array([3, N - 3], jnp.int32)) ** 2)


def shard_map(fun):
    def step(w, x):
        value, grads = gradients(fun)(w, x)
        return jax.lax.pmean(value, "data"), (grads[0], jax.lax.psum(grads[1], "data"))

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": (jax.P(), jax.P())}
    return jax.shard_map(step, mesh=meshes.make_mesh(data=4), **specs)


def shard_map_inside(check_vma):
    """The loss of a model that is parallel over its hidden units, by hand; it is summed over the devices."""

    def sharded_loss(w, x):
        hidden = jnp.tanh(x @ w)
        return jax.lax.psum(jnp.mean((hidden @ w.T) ** 2), "data")

    def fun(w, x):
        mesh = meshes.make_mesh(data=2)
        specs = {"in_specs": (jax.P(None, "data"), jax.P()), "out_specs": jax.P()}
        return jax.shard_map(sharded_loss, mesh=mesh, check_vma=check_vma, **specs)(w, x)

    return fun


TRANSFORMATIONS = {
    "grad inside": lambda wrap: wrap(gradients(loss)),
    "value_and_grad of jmpscale inside": lambda wrap: wrap(
        functools.partial(jmpscale.value_and_grad(loss, (0, 1)), SCALER)
    ),
    "scaled_backward outside": lambda wrap: gradients(jmpscale.scaled_backward(wrap(loss), 2.0**8)),
    "scaled_backward inside": lambda wrap: gradients(wrap(jmpscale.scaled_backward(loss, 2.0**8))),
    "nested": lambda wrap: gradients(wrap(lambda w, x: wrap(loss)(w, x) + jnp.mean(x @ w))),
    "ensemble": lambda wrap: lambda w, x: jax.vmap(gradients(wrap(loss)), (0, None))(jnp.stack([w, w.T]), x),
    "pmap inside": lambda wrap: wrap(
        lambda w, x: jax.pmap(gradients(loss), in_axes=(None, 0), devices=devices(2))(w, x.reshape(2, N // 2, N))
    ),
    "shard_map": lambda wrap: shard_map(wrap(loss)),
    "shard_map inside": lambda wrap: gradients(wrap(shard_map_inside(True))),
    "shard_map inside, without types": lambda wrap: gradients(wrap(shard_map_inside(False))),
    "scan over layers": lambda wrap: gradients(wrap(layers_in_scan)),
    "while": lambda wrap: lambda w, x: jax.jvp(lambda w: wrap(in_while_loop)(w, x), (w,), (x,)),
    "switch": lambda wrap: gradients(wrap(in_switch)),
    "platform_dependent": lambda wrap: gradients(wrap(on_platform)),
    "nested jit": lambda wrap: gradients(wrap(in_nested_jit)),
    "checkpoint, dots saved": lambda wrap: gradients(wrap(checkpointed(jax.checkpoint_policies.dots_saveable))),
    "checkpoint, names saved": lambda wrap: gradients(
        wrap(checkpointed(jax.checkpoint_policies.save_only_these_names("hidden")))
    ),
    "custom derivatives": lambda wrap: gradients(wrap(between_custom_rules)),
    "custom_vjp, differentiated before": lambda wrap: wrap(
        gradients(lambda w, x: jnp.mean(jnp.tanh(custom_matmul(x, w)) ** 2))
    ),
    "custom_jvp, differentiated before": lambda wrap: wrap(
        gradients(lambda w, x: jnp.mean(jnp.tanh(custom_product(x, w)) ** 2))
    ),
    "custom_vjp, autocast inside": lambda wrap: gradients(autocast_inside_custom_vjp(wrap)),
    "ragged_dot": lambda wrap: gradients(wrap(ragged)),
    "matrix and vector": lambda wrap: gradients(wrap(lambda w, x: jnp.mean(jnp.tanh(w @ x[0]) ** 2))),
    "composite": lambda wrap: wrap(jax.lax.composite(lambda w, x: jnp.tanh(x @ w), name="my.layer")),
    "custom_vmap": lambda wrap: wrap(with_vmap_rule),
    "custom_vmap, forward mode": lambda wrap: lambda w, x: jax.jvp(wrap(with_vmap_rule), (w, x), (x, w)),
    "linear_call": lambda wrap: wrap(linear_layer),
    "linear_call, differentiated before": lambda wrap: wrap(
        jax.grad(lambda w, x: jnp.mean(linear_layer(w, x) ** 2), 1)
    ),
    "compute_on": lambda wrap: wrap(on_host),
}
if hasattr(xla_metadata, "xla_metadata_call"):  # JAX 0.12
    TRANSFORMATIONS["xla_metadata_call"] = lambda wrap: wrap(
        jax.grad(lambda w, x: jnp.mean(xla_metadata.xla_metadata_call(jnp.matmul, tag="layer")(x, w) ** 2))
    )
