"""autocast and scaled_backward trace a function once, even if it changes NNX variables, and errors name them."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmpscale

from compiling import FAST
from precision import assert_close, assert_norms_close

pytestmark = pytest.mark.usefixtures("standard_promotion_and_ranks")
full = pytest.mark.full
X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)
NAMES = ("autocast", "scaled_backward")


def transform(name, fun, has_aux=False):
    return jmpscale.autocast(fun) if name == "autocast" else jmpscale.scaled_backward(fun, 2.0**8, has_aux=has_aux)


@pytest.mark.parametrize("name", NAMES)
def test_functions_have_the_signature_of_fun(name):
    def loss(w, x, *, activation=jnp.tanh):
        """Returns the loss."""
        return jnp.sum(activation(x @ w))

    loss_fn = transform(name, loss)
    assert (loss_fn.__name__, loss_fn.__doc__) == ("loss", "Returns the loss.")
    assert inspect.signature(loss_fn) == inspect.signature(loss)
    result = jax.jit(jax.grad(loss_fn), static_argnames="activation")(X.T / 3, X, activation=jnp.sin)
    assert_close(result, jax.grad(loss)(X.T / 3, X, activation=jnp.sin), rtol=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_functions_call_fun_once_per_trace(name):
    traces, runs = [], []
    ref = jax.new_ref(jnp.float32(0)) if hasattr(jax, "new_ref") else None

    def loss(w):
        traces.append(None)
        jax.debug.callback(lambda: runs.append(None))
        if ref is not None:
            ref[...] = ref[...] + 1
        return jnp.sum((X @ w) ** 2)

    step = jax.jit(jax.grad(transform(name, loss)))
    for _ in range(3):
        step(X.T)
    jax.effects_barrier()
    assert (len(traces), len(runs)) == (1, 3)
    assert ref is None or ref[...] == 3


@pytest.mark.parametrize("name", NAMES)
def test_functions_leak_no_tracers(name):
    fun = transform(name, lambda w: (jnp.sum((X @ w) ** 2), {"kept": w, "text": "kept"}), has_aux=True)
    with jax.checking_leaks():
        jax.jit(lambda w: jax.value_and_grad(lambda w: fun(w)[0])(w))(X.T)


# --- Flax NNX


class Net(nnx.Module):
    """Parameters, batch statistics, and a random stream with a count."""

    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def merged_in_gradient(wrap):
    """The loss closes over the state, and merges a copy."""
    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
    copy = {"copy": True} if "copy" in inspect.signature(nnx.merge).parameters else {}  # Flax 0.11 copies always

    def loss_fn(params, x):
        model = nnx.merge(graphdef, params, rest, **copy)
        return jnp.mean((model(x) - 1) ** 2), nnx.to_pure_dict(nnx.state(model, (nnx.BatchStat, nnx.RngCount)))

    def step(params, x):
        (loss, stats), grads = jax.value_and_grad(wrap(loss_fn), has_aux=True)(params, x)
        return loss, stats, nnx.to_pure_dict(grads)

    return jax.jit(step, **FAST)(params, X)


def changed_variable(wrap):
    count = nnx.BatchStat(jnp.zeros(()))

    def fun(count, x):
        count[...] += 1
        return jnp.mean(x @ x.T), count[...]

    wrap(fun)(count, X)
    return *wrap(fun)(count, X), count[...]


requires_flax_0_12 = pytest.mark.skipif(
    not hasattr(nnx.Variable, "set_metadata"), reason="Flax 0.11 does not read objects of an outer trace"
)


def objects_of_an_outer_trace(wrap):
    """The function reads an object and a variable that belong to the trace around the gradient, and changes another."""

    def loss_fn(w, net, scale, x):
        count = nnx.BatchStat(jnp.float32(0))

        def counted_loss(count, net, scale):
            count[...] += scale[...]
            return jnp.mean(net.linear(x @ w) ** 2), net.norm.mean[...]

        loss, mean = wrap(counted_loss)(count, net, scale)
        return loss, (mean, count[...])

    def step(w, net, scale):
        return jax.value_and_grad(loss_fn, has_aux=True)(w, net, scale, X), scale[...]

    return nnx.jit(step)(X.T @ X / 8, Net(nnx.Rngs(0)), nnx.BatchStat(jnp.float32(3)))


@functools.cache
def run_without_transform(run):
    return run(lambda fun: fun)


@full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(objects_of_an_outer_trace, marks=requires_flax_0_12),
        merged_in_gradient,
        changed_variable,
    ],
    ids=lambda run: run.__name__,
)
def test_functions_change_nnx_variables(run, name):
    assert_norms_close(run(lambda fun: transform(name, fun, has_aux=True)), run_without_transform(run), rtol=2e-2)


@full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_argument", [pytest.param(True, marks=requires_flax_0_12), False])
def test_change_of_a_variable_of_an_outer_trace_raises_with_a_remedy(is_argument, name):
    def loss_fn(w, count):
        count[...] += 1
        return jnp.mean(w @ w.T)

    def gradient(count):
        fun = transform(name, loss_fn if is_argument else lambda w: loss_fn(w, count))
        return jax.grad(fun)(X, *[count] * is_argument)

    with pytest.raises(Exception, match="Cannot mutate BatchStat") as caught:
        nnx.jit(gradient)(nnx.BatchStat(jnp.zeros(())))
    remedy = (
        f"jmpscale.{name} is traced, so it cannot change variables of an outer trace, or that it closes over. Pass the "
        "Flax NNX objects as arguments and differentiate with flax.nnx.value_and_grad, or create the variables in the "
        "function: nnx.merge(graphdef, state, copy=True)."
    )
    assert any(remedy in note for note in caught.value.__notes__)


# --- effects on Python objects


class Tensor:
    """An object of another library, which holds an array."""

    def __init__(self, array):
        self.array = array


@full
@pytest.mark.parametrize("name", NAMES)
def test_containers_of_the_caller_are_not_changed(name):
    def loss_fn(batch, cache):
        cache.append(batch.pop("x") @ batch.pop("w"))
        return jnp.mean(cache[-1])

    batch, cache = {"x": X, "w": X.T}, [X]
    for _ in range(2):
        transform(name, loss_fn)(batch, cache)
    assert (list(batch), len(cache)) == (["x", "w"], 1)


@full
@pytest.mark.parametrize("name", NAMES)
def test_objects_that_hold_values_of_an_outer_trace_are_accepted(name):
    def step(x):
        tensor = Tensor(x)
        loss, same = transform(name, lambda tensor, x: (jnp.mean(x @ tensor.array.T), tensor), has_aux=True)(tensor, x)
        assert same is tensor
        return loss

    assert_close(jax.jit(jax.grad(step))(X), jax.grad(lambda x: jnp.mean(x @ x.T))(X), rtol=1e-2)


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.wrap(nn.Dense(4, kernel_init=nn.initializers.zeros))(x)


def parameters_of_linen(wrap):
    Head.wrap = staticmethod(wrap)
    return Head().init(jax.random.key(0), X)


def value_in_a_result(wrap):
    return wrap(lambda tensor: Tensor(tensor.array @ tensor.array.T))(Tensor(X)).array


def value_in_an_argument(wrap):
    def loss_fn(tensor, x):
        tensor.array = x @ x.T
        return jnp.mean(tensor.array)

    tensor = Tensor(X)
    wrap(loss_fn)(tensor, X)
    return tensor.array


@full
@pytest.mark.filterwarnings("ignore:autocast has no effect")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "run",
    [value_in_a_result, value_in_an_argument, parameters_of_linen],
    ids=lambda run: run.__name__,
)
def test_values_that_are_stored_in_objects_raise_with_the_name_when_used(run, name):
    stored = jax.tree.leaves(run(lambda fun: transform(name, fun)))
    with pytest.raises(
        jax.errors.UnexpectedTracerError,
        match=rf" in jmpscale\.{name}, which must not store traced values in Python objects, at ",
    ):
        jnp.sin(stored[0])
