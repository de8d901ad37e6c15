"""diagnose computes a program in float32 exactly as the same program that is written in float32 does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import sparse

import jmpscale
from jmpscale._programs.float32 import evaluate_in_float32

import meshes
from tables import names

pytestmark = pytest.mark.full

X = jnp.float16(np.linspace(-1.5, 1.1, 8).reshape(2, 4))


def scan(x):
    def body(carry, row):
        h, count = carry
        return (h * row + 0.125, count + 1), (h, count)

    (h, count), (rows, counts) = jax.lax.scan(body, (x[0], 0), x, reverse=True)
    return [h, count, rows, counts]


def while_loop(x):
    return jax.lax.while_loop(
        lambda c: c[1] < c[0].dtype.type(2.5), lambda c: (c[0] * 1.125, c[1] + 1), (x, x[0, 0] * 0)
    )


def while_loop_that_captures(x):
    limit, factor = x.max() * 2, x[:1] * 0 + 1.5
    return jax.lax.while_loop(lambda h: h.max() < limit, lambda h: h * factor, x)


def cond(x):
    return jax.lax.cond(x[0, 0] < 0, lambda x: (x * 1.125, 1.0), lambda x: (x, 0.0), x)


@jax.custom_jvp
def cube(x):
    return x**3


cube.defjvp(lambda primals, tangents: (primals[0] ** 3, 3 * primals[0] ** 2 * tangents[0]))


def gradient(x):
    loss = jax.checkpoint(lambda x: cube(jnp.sin(x)) * 1.125)
    return jax.grad(lambda x: jax.jit(loss)(x).sum())(x)


def reductions(x):
    product = jax.lax.reduce(x, x.dtype.type(1), lambda a, b: a * b * x.dtype.type(1.125), (0,))
    window = jax.lax.reduce_window(x, x.dtype.type(1), lambda a, b: a * b, (1, 2), (1, 1), "VALID")
    return [product, window, jnp.cumsum(x, 1), x.sum(), jnp.argmax(x), jnp.sort(x, 1), jax.lax.top_k(x, 2)]


def scatters(x):
    index = jnp.array([0, 0, 1])
    return [x.at[index].add(0.125), x.at[index, index].mul(1.125), x[index]]


def matmuls(x):
    preferred = functools.partial(jnp.matmul, preferred_element_type=x.dtype)
    return [x @ x.T, preferred(x, x.T), jnp.einsum("ij,kj->ik", x, x, precision="default")]


def conversions(x):
    return [
        x.astype(jnp.int32),
        (x > 0).astype(x.dtype) * 0.125,
        jnp.arange(3, dtype=x.dtype) * 0.125,
        jnp.zeros(2, x.dtype),
    ]


def sharded(x):
    mesh = meshes.make_mesh(data=2)
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(jnp.sin(x), "data") * 1.125, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
    )
    return mapped(x)


def unchecked(x):
    mesh = meshes.make_mesh(data=2, other=2)
    mapped = jax.shard_map(
        lambda x: jax.lax.all_gather(jnp.sin(x), "data", tiled=True) * 1.125,
        mesh=mesh,
        in_specs=jax.P("data"),
        out_specs=jax.P(),
        axis_names={"data"},
        check_vma=False,
    )
    return jax.jit(mapped)(x)


def collectives(x):
    def shard(x):
        h = jax.lax.all_gather(jnp.sin(x), "data", tiled=True) * 1.125
        parts = jax.lax.psum_scatter(h @ h.T, "data", tiled=True)
        swapped = jax.lax.all_to_all(h, "data", 1, 0, tiled=True)
        moved = jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
        return parts, swapped, moved, jax.lax.pmax(jnp.cos(x), "data"), jax.lax.pmean(x * 1.125, "data")

    mapped = jax.shard_map(shard, mesh=meshes.make_mesh(data=2), in_specs=jax.P("data"), out_specs=jax.P("data"))
    return jax.jit(mapped)(x)


def gradient_of_gathered_weights(x):
    def shard(x):
        return jax.lax.pmean(jnp.sum(jnp.sin(jax.lax.all_gather(x, "data", tiled=True)) ** 2), "data")

    mapped = jax.shard_map(shard, mesh=meshes.make_mesh(data=2), in_specs=jax.P("data"), out_specs=jax.P())
    return jax.jit(jax.grad(mapped))(x)


def gradient_with_policy(policy):
    def block(x):
        return jnp.sum(jnp.sin(checkpoint_name(x @ x.T, "saved") * 1.125) ** 2)

    return lambda x: jax.grad(jax.checkpoint(block, policy=policy))(x)


OFFLOAD = {"offload_src": "device", "offload_dst": "pinned_host"}
POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("saved"),
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots to the host": jax.checkpoint_policies.offload_dot_with_no_batch_dims(**OFFLOAD),
    "names to the host": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["saved"], **OFFLOAD
    ),
}


@functools.partial(jax.lax.composite, name="tests.shifted_sine")
def composite(x):
    return jnp.sin(x) * 1.125 + 0.125


def linear_call(x):
    return jax.custom_derivatives.linear_call(lambda r, v: v * r, lambda r, t: t * r, jnp.sin(x), x * 1.125)


@jax.custom_batching.custom_vmap
def with_own_vmap(x):
    return jnp.sin(x) * 1.125


with_own_vmap.def_vmap(lambda size, batched, x: (jnp.cos(x) * 1.125, batched[0]))


def sparse_matmul(x):
    return sparse.BCOO.fromdense(x * 1.125, nse=8) @ jnp.sin(x.T)


def batched_while_loop(x):
    def halve(x):
        return jax.lax.while_loop(lambda c: jnp.abs(c[0]).sum() > 0.5, lambda c: (c[0] * 0.5625, c[1] + 1), (x, 0))

    return jax.vmap(halve)(x * jnp.arange(1, 3, dtype=x.dtype)[:, None])


def batched_bounds(x):
    return jax.vmap(lambda x, n: jax.lax.fori_loop(0, n, lambda i, h: jnp.tanh(h) + 0.125, x))(x, jnp.arange(2))


PROGRAMS = {
    "arithmetic": lambda x: jnp.tanh(x * 1.125) / (x**2 + 0.125) - jax.nn.softmax(x),
    "constant": lambda x: x * np.float16([[1, 2, 3, 4]]).astype(x.dtype),
    "scan": scan,
    "while": while_loop,
    "while that captures": while_loop_that_captures,
    "cond": cond,
    "gradient": gradient,
    "reductions": reductions,
    "scatters": scatters,
    "matmuls": matmuls,
    "conversions": conversions,
    "integers": lambda x: [jnp.argsort(x, 1) * 2, jnp.sum(x > 0)],
    "shard_map": sharded,
    "shard_map without types": unchecked,
    "collectives": collectives,
    "gradient of gathered weights": gradient_of_gathered_weights,
    "composite": composite,
    "linear_call": linear_call,
    "custom_vmap": lambda x: jax.vmap(jax.jit(with_own_vmap))(x) + with_own_vmap(x),
    "sparse matmul": sparse_matmul,
    "batched while": batched_while_loop,
    "batched bounds": batched_bounds,
} | {f"checkpoint: {name}": gradient_with_policy(policy) for name, policy in POLICIES.items()}


def run(fun, x):
    closed = jax.make_jaxpr(fun)(x)
    return jax.jit(lambda x: evaluate_in_float32(closed, [x]))(x)


@pytest.mark.parametrize("name", names(PROGRAMS))
def test_program_runs_in_float32(name):
    found = run(PROGRAMS[name], X)
    expected = jax.tree.leaves(jax.jit(PROGRAMS[name])(X.astype(jnp.float32)))
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == jnp.asarray(y).dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


FIXED = {  # operations whose results in float16 do not exist in float32
    "bits": (lambda x: jax.lax.bitcast_convert_type(x, jnp.int16), jnp.int16),
    "the next number": (lambda x: jnp.nextafter(x, jnp.float16(9)), jnp.float32),
    "callback": (lambda x: jax.pure_callback(_double, jax.ShapeDtypeStruct(x.shape, x.dtype), x), jnp.float32),
}


def _double(x):
    assert x.dtype == np.float16
    return np.asarray(x) * np.float16(2)


def test_rounding_to_fewer_digits_is_omitted_in_float32():
    x = X.astype(jnp.float32)
    closed = jax.make_jaxpr(lambda x: jax.lax.reduce_precision(x * x, 8, 7))(x)
    [found] = evaluate_in_float32(closed, [x])
    np.testing.assert_array_equal(found, x * x)


@pytest.mark.parametrize("name", FIXED)
def test_operation_with_a_fixed_dtype_runs_as_written(name):
    fun, dtype = FIXED[name]
    (found,) = run(fun, X)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, fun(X))


def test_checks_of_jax_change_no_answer():
    fun = jmpscale.autocast(lambda w, x: jnp.mean(jnp.sin(80 * x @ w) * x))
    args = jnp.float32(np.random.default_rng(0).standard_normal((8, 8))), jnp.ones((4, 8)) * 0.3
    without = jmpscale.diagnose(fun)(jmpscale.dynamic(2.0**10), *args)
    with jax.enable_checks(True):
        checked = jmpscale.diagnose(fun)(jmpscale.dynamic(2.0**10), *args)
    assert checked == without
    assert checked.not_entered == ()
