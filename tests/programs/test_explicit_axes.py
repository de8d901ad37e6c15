"""The tools enter functions that `jax.sharding.auto_axes` and `explicit_axes` call, which have a mesh of their own.

The results are those of the same program without a mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale._programs.float32 import evaluate_in_float32
from jmpscale.testing import check_step

import meshes
from arrays import normal
from tables import names

F, B, H = jnp.float32, jnp.bfloat16, jnp.float16
ROWS = P("data", None)
TABLE, WEIGHTS, TOKENS = normal(0, 16, 8, scale=0.5), normal(1, 8, 8), np.arange(8, dtype=np.int32)
FACTORS = jnp.linspace(0.5, 1.5, 8, dtype=B)  # created outside of the mesh, which no type of it shows

pytestmark = pytest.mark.usefixtures("standard_promotion_and_ranks")


def has_mesh():
    return not jax.sharding.get_abstract_mesh().empty


def auto(fun, *args, out=ROWS):
    """Calls a function on Auto axes if there is a mesh, whose axes are Explicit."""
    return jax.sharding.auto_axes(fun, out_sharding=out)(*args) if has_mesh() else fun(*args)


def explicit(fun, x):
    """Calls a function on Explicit axes if there is a mesh, whose axes are Auto."""
    return jax.sharding.explicit_axes(fun, in_sharding=(ROWS,))(x) if has_mesh() else fun(x)


def lookup(table, tokens):
    """Looks up rows as `flax.nnx.Embed` does; JAX calls `auto_axes`."""
    return table.at[tokens].get(out_sharding=ROWS) if has_mesh() else table[tokens]


def in_loop(table, tokens):
    rows = lookup(table, tokens)
    return jax.lax.scan(lambda h, _: (jnp.tanh(h) + auto(jnp.sin, h), None), rows, None, length=3)[0]


def while_loop(x):
    return jax.lax.while_loop(lambda h: jnp.abs(h).max() > 0.5, lambda h: jnp.tanh(h) * 0.75, x)


def many_operations(x):
    """Computes more than one block."""
    for i in range(60):
        x = x * (1 + i / 1000) - 0.125
    return jnp.tanh(x)


def resharded(table, tokens):
    reshard = jax.sharding.reshard if has_mesh() else lambda x, _: x
    return lookup(reshard(jnp.tanh(reshard(table, ROWS)), P(None, None)), tokens)


def einsum(table, tokens):
    rows = lookup(table, tokens)
    return jnp.einsum("bi,ij->bj", rows, table.T @ table, out_sharding=ROWS if has_mesh() else None)


def on_rows(fun):
    """Returns a function that computes on Auto axes after a lookup."""
    return lambda table, tokens: auto(lambda table, tokens: fun(table[tokens]), table, tokens)


PROGRAMS = {
    "lookup": lookup,
    "operations": on_rows(lambda x: jnp.tanh(x * 1.5) + jnp.exp(x).sum(0)),
    "Explicit inside of Auto axes": on_rows(lambda x: jnp.tanh(x) + explicit(lambda x: jnp.sin(x) * 2, x)),
    "inside of a loop": in_loop,
    "around a loop": on_rows(lambda x: jax.lax.scan(lambda h, _: (jnp.tanh(h * 1.5), None), x, None, length=3)[0]),
    "around a while loop": on_rows(lambda x: x + while_loop(jax.lax.stop_gradient(x))),
    "around a branch": on_rows(lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: x * 1.5, x)),
    "around compiled functions": on_rows(lambda x: jax.nn.silu(jax.nn.relu(x))),
    "around jax.checkpoint": on_rows(jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x)))),
    "constant": on_rows(lambda x: jnp.tanh(x * FACTORS.astype(x.dtype))),
    "float8": on_rows(lambda x: x.astype(jnp.float8_e4m3fn if x.dtype != F else F).astype(x.dtype)),
    "blocks": on_rows(many_operations),
    "reshard": resharded,
    "einsum": einsum,
}


def loss_of(program, dtype):
    def loss_fn(params, tokens):
        rows = program(params["table"].astype(dtype), tokens)
        return jnp.square((rows @ params["weights"].astype(dtype)).astype(F)).mean()

    return loss_fn


def params():
    return {"table": TABLE, "weights": WEIGHTS}


def on_mesh(call, params, tokens):
    """Calls a function with its arguments on a mesh with Explicit axes."""
    mesh = meshes.make_mesh(AxisType.Explicit, data=2)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        return call(params, jax.device_put(tokens, NamedSharding(mesh, P("data"))))


@pytest.mark.parametrize("name", names(PROGRAMS, default=()))
def test_evaluate_in_float32_enters_meshes(name):
    def gradients(dtype):
        return jax.grad(loss_of(PROGRAMS[name], dtype))

    def in_float32(params, tokens):
        program = jax.make_jaxpr(gradients(B))(params, tokens)
        return jax.jit(lambda *leaves: evaluate_in_float32(program, leaves))(*jax.tree.leaves(params), tokens)

    found, expected = on_mesh(in_float32, params(), TOKENS), gradients(F)(params(), TOKENS)
    for x, y in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


SGD = jmpscale.with_loss_scaling(optax.sgd(1e-3), jmpscale.dynamic(2.0**8))


def train_step(program, dtype):
    def step(params, opt_state, tokens):
        loss, grads = jmpscale.value_and_grad(loss_of(program, dtype))(opt_state, params, tokens)
        updates, opt_state = SGD.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def gradients_on_auto_axes(params, opt_state, tokens):
    value_and_grad = jmpscale.value_and_grad(loss_of(lambda table, tokens: table[tokens], H))
    loss, grads = auto(value_and_grad, opt_state, params, tokens, out=P())
    updates, opt_state = SGD.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss


def step_on_auto_axes(params, opt_state, tokens):
    return auto(train_step(lambda table, tokens: table[tokens], H), params, opt_state, tokens, out=P())


def two_steps_on_auto_axes(params, opt_state, tokens):
    def body(carry, tokens):
        return step_on_auto_axes(*carry, tokens)[:2], None

    return jax.lax.scan(body, (params, opt_state), jnp.stack([tokens, tokens]))[0]


STEPS = {f"{name}, bfloat16": train_step(fun, B) for name, fun in PROGRAMS.items()}
STEPS |= {
    "lookup, float16": train_step(lookup, H),
    "gradients": gradients_on_auto_axes,
    "the whole step": step_on_auto_axes,
    "a loop of steps": two_steps_on_auto_axes,
}


@pytest.mark.full
@pytest.mark.parametrize("name", names(STEPS, default=()))
def test_diagnose_step_enters_meshes(name):
    def diagnose(params, tokens):
        return jmpscale.diagnose_step(STEPS[name])(params, SGD.init(params), tokens)

    found, expected = on_mesh(diagnose, params(), TOKENS), diagnose(params(), TOKENS)
    assert found.state == expected.state
    assert found.loss == pytest.approx(expected.loss, rel=1e-2)
    assert found.gradient_error == pytest.approx(expected.gradient_error, rel=0.5, abs=1e-3)
    assert found.not_entered == expected.not_entered
    assert {row.line for row in found.rows} == {row.line for row in expected.rows}


@pytest.mark.parametrize("name", names(STEPS, default=()))
def test_check_step_enters_meshes(name):
    on_mesh(lambda params, tokens: check_step(STEPS[name])(params, SGD.init(params), tokens), params(), TOKENS)


@pytest.mark.parametrize("name", names(PROGRAMS, default=()))
def test_autocast_enters_meshes(name):
    def gradients(params, tokens):
        return jax.jit(jax.grad(jmpscale.autocast(loss_of(PROGRAMS[name], F))))(params, tokens)

    found, expected = on_mesh(gradients, params(), TOKENS), gradients(params(), TOKENS)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", names(PROGRAMS, default=()))
def test_scaled_backward_enters_meshes(name):
    def gradients(params, tokens):
        return jax.jit(jax.grad(jmpscale.scaled_backward(loss_of(PROGRAMS[name], H), 2.0**8)))(params, tokens)

    found, expected = on_mesh(gradients, params(), TOKENS), gradients(params(), TOKENS)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-3)
