"""autocast runs the layers of Flax, Equinox and Haiku in half precision, with gradients close to float32.

The models are the unchanged float32 layers, one for each way in which a library runs or stores something: convolutions,
attention, recurrence, statistics, random streams, rematerialization, shared and derived weights.
"""

import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale

import pages
from compiling import FAST
from layers import LAYERS, VECTORS, mean_square
from precision import assert_close, assert_half, assert_norms_close
from tables import rows

pytestmark = pytest.mark.usefixtures("standard_promotion_and_ranks")  # layers rely on both


@pytest.mark.parametrize("case", rows(LAYERS, default={"NNX: LoRA", "Equinox: blocks that return float16"}))
def test_autocast_runs_layers_in_half_precision(case):
    (step, *args), (expected, *_) = case(jmpscale.autocast), case(lambda fun: fun)
    assert_half(step, expected, *args)
    (value, grads, *state), (expected_value, expected_grads, *expected_state) = (
        jax.jit(fn, **FAST)(*args) for fn in (step, expected)
    )
    # By their common norm, because the gradients of some parameters, such as a bias before a normalization, are zero.
    assert_norms_close(grads, expected_grads, rtol=1e-2)
    assert_close((value, state), (expected_value, expected_state), rtol=1e-2)


@pytest.mark.full
def test_autocast_runs_a_vector_field_in_half_precision():
    """The solver of diffrax has its own derivative rule, so autocast is used on the function that it calls."""
    diffrax = pytest.importorskip("diffrax", reason="only installed by nox")
    random = np.random.default_rng(0)
    weights = [jnp.asarray(random.standard_normal((6, 6)) / 3, jnp.float32) for _ in range(2)]

    def gradients(wrap):
        field = wrap(lambda t, y, weights: jnp.tanh(y @ weights[0]) @ weights[1])

        def loss_fn(weights):
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.25, VECTORS, weights, max_steps=16
            )
            return mean_square(solution.ys)

        return jax.jit(jax.grad(loss_fn), **FAST)(weights)

    assert_norms_close(gradients(jmpscale.autocast), gradients(lambda fun: fun), rtol=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("adjoint", ["RecursiveCheckpointAdjoint", "BacksolveAdjoint"])
def test_vector_field_of_the_page_has_gradients_with_each_adjoint(adjoint):
    """With autocast around the module, Equinox warns that no parameter is trained, and BacksolveAdjoint fails."""
    diffrax = pytest.importorskip("diffrax", reason="only installed by nox")
    (code,) = (code for _, code, _ in pages.blocks("guides/equinox") if "VectorField" in code)

    def loss_fn(field):
        solver, start, method = diffrax.Euler(), jnp.linspace(-1, 1, 8), getattr(diffrax, adjoint)()
        solution = diffrax.diffeqsolve(diffrax.ODETerm(field), solver, 0.0, 1.0, 0.25, start, adjoint=method)
        return mean_square(solution.ys)

    def gradients(autocast):
        names = {"eqx": eqx, "jax": jax, "jmpscale": types.SimpleNamespace(autocast=autocast)}
        pages.run(code, names)
        return jax.tree.leaves(eqx.filter_grad(loss_fn)(names["field"]))

    half, expected = gradients(jmpscale.autocast), gradients(lambda fun: fun)
    assert_norms_close(half, expected, rtol=1e-2)
    assert not all(map(np.array_equal, half, expected))
