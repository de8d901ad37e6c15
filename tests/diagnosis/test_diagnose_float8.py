"""A diagnosis compares float8 programs with float32, and its words are about low precision, not half precision."""

import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen
from flax.linen import fp8_ops

import jmpscale
from jmpscale import FindingKind

from arrays import normal

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion")]  # Flax and optax need it
E4M3, E5M2, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32
X, Y = normal(0, 64, 32), normal(1, 64, 8)
SIZES = (32, 64, 64, 8)
PARAMS = [normal(i, m, n) / jnp.sqrt(m) for i, (m, n) in enumerate(itertools.pairwise(SIZES), 2)]


# Recipes by hand.


def quantized(x, dtype):
    """Returns values that fill the range of a dtype, and their scale."""
    largest = jnp.max(jnp.abs(x)).astype(F32)
    scale = jnp.where(largest > 0, float(jnp.finfo(dtype).max) / largest, 1.0)
    return (x * scale).astype(dtype), scale


def product(x, y, dtype_of_x=E4M3):
    (x, x_scale), (y, y_scale) = quantized(x, dtype_of_x), quantized(y, E4M3)
    return jnp.dot(x, y, preferred_element_type=F32) / (x_scale * y_scale)


@jax.custom_vjp
def current_scaling(x, w):
    return product(x, w)


current_scaling.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda saved, g: (product(g, saved[1].T, E5M2), product(g.T, saved[0], E5M2).T),
)


def plain_cast(x, w):
    return jnp.dot(x.astype(E4M3), w.astype(E4M3), preferred_element_type=F32)


def step_of(matmul, size=1.0, loss_size=1.0):
    """Returns a step whose inputs, and whose loss, have some size."""

    def loss_fn(params, x, y):
        h = jnp.tanh(matmul(size * x, params[0]) / size)
        h = jax.nn.relu(matmul(h, params[1]))
        return jnp.mean((matmul(h, params[2]) - y) ** 2) * loss_size

    tx = optax.adam(1e-3)

    @jax.jit
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (PARAMS, tx.init(PARAMS))


RECIPES = {  # the step, the kind and dtype of its finding, and words of its summary
    "current scaling": (step_of(current_scaling), None, " makes an error of "),
    "current scaling of large inputs": (step_of(current_scaling, size=1e4), None, " makes an error of "),
    "current scaling of a small loss": (step_of(current_scaling, loss_size=2.0**-20), None, " makes an error of "),
    "plain casts": (step_of(plain_cast, loss_size=2.0**6), None, " makes an error of "),
    "overflow": (
        step_of(plain_cast, size=1e3),
        (FindingKind.FORWARD_OVERFLOW, "float8_e4m3fn"),
        " and the largest number of float8_e4m3fn is 448.",
    ),
    "underflow": (
        step_of(plain_cast, loss_size=2.0**-10),
        (FindingKind.UNDERFLOW, None),
        " makes an error of 100%. Scale the loss, ",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_diagnose_step_compares_a_recipe_by_hand(name):
    (step, state), finding, words = RECIPES[name]
    diagnosis = jmpscale.diagnose_step(step)(*state, X, Y)
    assert [(x.kind, x.dtype) for x in diagnosis.findings] == ([finding] if finding else [])
    assert words in diagnosis.summary
    assert "half precision" not in diagnosis.describe()
    assert {row.dtype for row in diagnosis.rows} <= {"float8_e4m3fn", "float8_e5m2"}


# Layers of Flax.


class Network(linen.Module):
    """Layers of which the activations of one are small: they underflow before its first scale is known."""

    matmul: type = fp8_ops.Fp8DirectDotGeneralOp
    small: int | None = None

    @linen.compact
    def __call__(self, x):
        for i in range(4):
            size = 2.0**-14 if i == self.small else 1.0
            x = x + linen.relu(linen.Dense(32, dot_general_cls=self.matmul)(size * x) / size)
        return x


class Projection(linen.Module):
    """A layer whose matmul is an einsum in float8."""

    @linen.compact
    def __call__(self, x):
        w = self.param("w", linen.initializers.lecun_normal(), (32, 32))
        return fp8_ops.Fp8Einsum()("bi,io->bo", x, w)


class Einsums(linen.Module):
    small: int | None = None

    @linen.compact
    def __call__(self, x):
        for i in range(4):
            size = 2.0**-14 if i == self.small else 1.0
            x = x + linen.relu(Projection()(size * x) / size)
        return x


STATISTICS = fp8_ops.OVERWRITE_WITH_GRADIENT


def diagnosed(module, steps=0):
    variables = module.init(jax.random.key(0), X)
    tx = optax.adam(1e-3)

    def loss_fn(params, statistics, x):
        return jnp.mean((module.apply({"params": params, STATISTICS: statistics}, x) - x[:, ::-1]) ** 2)

    @jax.jit
    def step(params, statistics, opt_state, x):
        loss, (grads, statistics) = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, statistics, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), statistics, opt_state, loss

    state = variables["params"], variables[STATISTICS], tx.init(variables["params"])
    for _ in range(steps):
        *state, _ = step(*state, X)
    return jmpscale.diagnose_step(step)(*state, X)


STEPS = [  # the class of the matmul, and the number of steps before the diagnosis
    ("Fp8DirectDotGeneralOp", 0),
    ("Fp8DirectDotGeneralOp", 20),
    ("Fp8DotGeneralOp", 0),
]


@pytest.mark.parametrize(("name", "steps"), STEPS)
def test_diagnose_step_compares_fp8_layers_of_flax(name, steps):
    diagnosis = diagnosed(Network(getattr(fp8_ops, name)), steps)
    assert diagnosis.findings == ()
    assert "half precision" not in diagnosis.describe()
    assert all(re.match(r"test_diagnose_float8.py:\d+ \(Network.__call__\)", row.line) for row in diagnosis.rows)


SMALL = [
    pytest.param(Network(small=2), "Network/Dense_2", id="Fp8DirectDotGeneralOp"),
    pytest.param(Einsums(small=1), "Einsums/Projection_1", id="Fp8Einsum"),
]


@pytest.mark.parametrize(("module", "layer"), SMALL)
def test_diagnose_step_names_the_fp8_layer_that_underflows(module, layer):
    diagnosis = diagnosed(module)
    finding = diagnosis.findings[0]  # others are about the statistics of later layers
    assert (finding.kind, finding.dtype, finding.layers) == (FindingKind.UNDERFLOW, "float8_e4m3fn", (layer,))
    assert finding.lines[0].startswith("test_diagnose_float8.py:")
    assert f" in {layer}, has 100% of its values below " in diagnosis.summary
    assert {row.layers for row in diagnosis.rows if row.pass_ == "forward"} == {(layer,)}
    assert "half precision" not in diagnosis.describe()
