"""diagnose_step runs the steps of other libraries, and of several devices, and leaves their state unchanged."""

import functools

import equinox
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, linen, nnx
from flax.training import train_state

import jmpscale
from jmpscale._base.frameworks import is_nnx_object

import meshes
from arrays import normal
from messages import GRADIENTS_DIFFER
from tables import names

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion_and_ranks")]

B, H, F = jnp.bfloat16, jnp.float16, jnp.float32
X = normal(0, 64, 16)
Y = jnp.sin(X[:, :1])
ADAM, SCALED_ADAM = optax.adam(1e-4), jmpscale.with_loss_scaling(optax.adam(1e-4))
KEY = jax.random.key(0)


def loss_fn(params, x, y):
    hidden = jnp.tanh(x.astype(B) @ params["a"].astype(B))
    return jnp.mean(((hidden @ params["b"].astype(B)).astype(F) - y) ** 2)


def parameters(dtype=F):
    return {"a": normal(1, 16, 32, scale=0.25).astype(dtype), "b": normal(2, 32, 1, scale=0.2).astype(dtype)}


def in_bfloat16(tree):
    return jax.tree.map(lambda x: x.astype(B) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


# --- Steps; those with `dtype` differ in the dtype of their parameters. ---


class Network(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False, dtype=B)(linen.Dense(32, dtype=B)(x))
        return linen.Dense(1, dtype=B)(linen.Dropout(0.1, deterministic=False)(linen.relu(x))).astype(F)


class State(train_state.TrainState):
    batch_stats: dict


def linen_step(dtype, tx=ADAM):
    variables = Network().init({"params": KEY, "dropout": KEY}, X)
    params = jax.tree.map(lambda x: x.astype(dtype), variables["params"])
    state = State.create(apply_fn=Network().apply, params=params, tx=tx, batch_stats=variables["batch_stats"])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x, y, key):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, new = state.apply_fn(variables, x, mutable=["batch_stats"], rngs={"dropout": key})
            return jnp.mean((out - y) ** 2), new["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(batch_stats=batch_stats), {"loss": loss}

    return step, (state, X, Y, KEY), ("state",)


class Model(nnx.Module):
    def __init__(self, dtype, rngs):
        self.inner, self.outer = (nnx.Linear(*n, rngs=rngs, dtype=B, param_dtype=dtype) for n in ((16, 32), (32, 1)))
        self.norm = nnx.BatchNorm(32, rngs=rngs, dtype=B)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(jnp.tanh(self.norm(self.inner(x))))).astype(F)


def nnx_step(dtype):
    model = Model(dtype, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    return step, (model, optimizer, X, Y), ("model", "optimizer")


def nnx_step_of_jax(dtype):
    """Returns a step that returns the state of its objects, because `jax.jit` copies them."""
    model = Model(dtype, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    @functools.partial(jax.jit, donate_argnames=("model", "optimizer"))
    def step(model, optimizer, x, y):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        loss, grads = jax.value_and_grad(
            lambda params: jnp.mean((nnx.merge(graphdef, params, rest, copy=True)(x) - y) ** 2)
        )(params)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return step, (model, optimizer, X, Y), ("model", "optimizer")


def equinox_step(dtype):
    model = equinox.nn.MLP(16, 1, 32, 1, key=KEY)
    model = jax.tree.map(lambda x: x.astype(dtype) if equinox.is_inexact_array(x) else x, model)

    @equinox.filter_jit
    def step(model, opt_state, x, y):
        def loss_fn(model):
            model = jax.tree.map(lambda x: x.astype(B) if equinox.is_inexact_array(x) else x, model)
            return jnp.mean((jax.vmap(model)(x.astype(B)).astype(F) - y) ** 2)

        loss, grads = equinox.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = ADAM.update(grads, opt_state, equinox.filter(model, equinox.is_inexact_array))
        return equinox.apply_updates(model, updates), opt_state, loss

    return step, (model, ADAM.init(equinox.filter(model, equinox.is_inexact_array)), X, Y), ("model", "opt_state")


def haiku_step(dtype):
    net = haiku.without_apply_rng(haiku.transform(lambda x: haiku.nets.MLP([32, 1])(x)))
    params = jax.tree.map(lambda x: x.astype(dtype), net.init(KEY, X))

    @jax.jit
    def step(params, opt_state, x, y):
        def loss_fn(params):
            return jnp.mean((net.apply(in_bfloat16(params), x.astype(B)).astype(F) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, ADAM.init(params), X, Y), ("params", "opt_state")


def test_diagnose_step_names_the_leaves_of_a_mapping_that_jax_numbers():
    step, (params, opt_state, *batch), _ = haiku_step(B)
    immutable = haiku.data_structures.to_immutable_dict(params)
    found = jmpscale.diagnose_step(step)(immutable, ADAM.init(immutable), *batch)
    expected = jmpscale.diagnose_step(step)(params, opt_state, *batch)
    assert [x.name for x in found.changes] == [x.name for x in expected.changes]
    assert "params['mlp/~/linear_1']['w']" in [x.name for x in found.changes]
    assert found.summary == expected.summary


def optax_step(tx):
    def make(dtype):
        params = parameters(dtype)

        def step(params, opt_state, x, y):
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        params, opt_state, _ = step(params, tx.init(params), X, Y)  # after which dtypes of optax's states stay
        return jax.jit(step), (params, opt_state, X, Y), ("params", "opt_state")

    return make


def updates_in_a_scan(dtype):
    params = parameters(dtype)

    def step(params, opt_state, x, y, key):
        def body(carry, indices):
            params, opt_state = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, x[indices], y[indices])
            updates, opt_state = ADAM.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        (params, opt_state), losses = jax.lax.scan(
            body, (params, opt_state), jax.random.permutation(key, 64).reshape(4, 16)
        )
        return params, opt_state, losses.mean()

    return jax.jit(step), (params, ADAM.init(params), X, Y, KEY), ("params", "opt_state")


def gan(dtype):
    generator, critic = parameters(dtype), jax.tree.map(lambda x: 1.1 * x, parameters(dtype))

    def generate(params, noise):
        return jnp.tanh(noise.astype(B) @ params["a"].astype(B)).astype(F)[:, :16]

    def score(params, x):
        return ((x.astype(B) @ params["a"].astype(B)) @ params["b"].astype(B)).astype(F)

    def step(generator, critic, states, noise, real):
        def loss_of_critic(critic):
            fake = score(critic, generate(generator, noise))
            return jnp.mean(jax.nn.softplus(-score(critic, real)) + jax.nn.softplus(fake))

        first, grads = jax.value_and_grad(loss_of_critic)(critic)
        updates, of_critic = ADAM.update(grads, states["critic"], critic)
        critic = optax.apply_updates(critic, updates)
        loss_of_generator = lambda generator: jnp.mean(jax.nn.softplus(-score(critic, generate(generator, noise))))  # noqa: E731
        second, grads = jax.value_and_grad(loss_of_generator)(generator)
        updates, of_generator = ADAM.update(grads, states["generator"], generator)
        states = {"critic": of_critic, "generator": of_generator}
        return optax.apply_updates(generator, updates), critic, states, {"critic_loss": first, "loss": second}

    states = {"critic": ADAM.init(critic), "generator": ADAM.init(generator)}
    return jax.jit(step), (generator, critic, states, X, X[::-1]), ("generator", "critic", "states")


def checkpointed(dtype):
    params = parameters(dtype)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def layer(x, w):
        return jnp.tanh(x @ w.astype(B))

    def step(params, opt_state, x, y):
        def loss_fn(params):
            x1 = jax.lax.scan(lambda x, _: (layer(layer(x, params["a"]), params["a"].T), None), x.astype(B), None, 2)[0]
            return jnp.mean((x1.astype(F) - y) ** 2) + jnp.sum(params["b"].astype(F) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step), (params, ADAM.init(params), X, Y), ("params", "opt_state")


def device_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = ADAM.update(jax.lax.pmean(grads, "data"), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")


def in_shard_map(dtype):
    specs = {"in_specs": (jax.P(), jax.P(), jax.P("data"), jax.P("data")), "out_specs": jax.P(), "check_vma": False}
    step = jax.shard_map(device_step, mesh=meshes.make_mesh(data=8), **specs)
    return jax.jit(step), (parameters(dtype), ADAM.init(parameters(dtype)), X, Y), ("params", "opt_state")


def in_shard_map_with_types(dtype):
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(lambda p: jax.lax.pmean(loss_fn(p, x, y), "data"))(params)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    specs = {"in_specs": (jax.P(), jax.P(), jax.P("data"), jax.P("data")), "out_specs": jax.P()}
    mapped = jax.shard_map(step, mesh=meshes.make_mesh(data=8), **specs)
    return jax.jit(mapped), (parameters(dtype), ADAM.init(parameters(dtype)), X, Y), ("params", "opt_state")


class Trainer:
    mapped = functools.partial(jax.pmap, axis_name="data", in_axes=(None, None, None, 0, 0), out_axes=None)

    @functools.partial(mapped, static_broadcasted_argnums=0)
    def update(self, params, opt_state, x, y):
        return device_step(params, opt_state, x, y)


def pmapped_method(dtype):
    meshes.require_devices(8)
    args = parameters(dtype), ADAM.init(parameters(dtype)), X.reshape(8, 8, 16), Y.reshape(8, 8, 1)
    return Trainer().update, args, ("params", "opt_state")


def pmapped_copies(dtype):
    meshes.require_devices(8)
    state = jax_utils.replicate((parameters(dtype), ADAM.init(parameters(dtype))))
    step = jax.pmap(device_step, axis_name="data", out_axes=(0, 0, None))
    return step, (*state, X.reshape(8, 8, 16), Y.reshape(8, 8, 1)), ("params", "opt_state")


def fsdp(dtype):
    mesh = meshes.make_mesh(data=8)
    params = jax.device_put(parameters(dtype), jax.NamedSharding(mesh, jax.P("data")))
    opt_state = jax.jit(ADAM.init)(params)
    batch = jax.device_put((X, Y), jax.NamedSharding(mesh, jax.P("data")))
    return optax_step(ADAM)(dtype)[0], (params, opt_state, *batch), ("params", "opt_state")


STEPS = {
    "Linen": linen_step,
    "NNX": nnx_step,
    "NNX objects in jax.jit": nnx_step_of_jax,
    "Equinox": equinox_step,
    "Haiku": haiku_step,
    "MultiSteps": optax_step(optax.MultiSteps(ADAM, 1)),
    "inject_hyperparams": optax_step(optax.inject_hyperparams(optax.adam, hyperparam_dtype=F)(1e-4)),
    "multi_transform": optax_step(
        optax.multi_transform({"a": optax.adam(1e-4), "b": optax.sgd(1e-4)}, {"a": "a", "b": "b"})
    ),
    "AdEMAMix": optax_step(optax.contrib.ademamix(1e-4, mu_dtype=B)),
    "updates in a scan": updates_in_a_scan,
    "GAN": gan,
    "checkpoint": checkpointed,
    "shard_map": in_shard_map,
    "shard_map with types": in_shard_map_with_types,
    "pmap": pmapped_method,
    "pmap of copies": pmapped_copies,
    "FSDP": fsdp,
}


def values(tree):
    """Returns the values of all arrays, apart from random keys."""
    is_object = is_nnx_object
    leaves = jax.tree.leaves(tree, is_leaf=is_object)
    plain = [nnx.to_pure_dict(nnx.state(x, nnx.Not(nnx.RngKey))) if is_object(x) else x for x in leaves]
    arrays = [x for x in jax.tree.leaves(plain) if isinstance(x, jax.Array)]
    return [np.asarray(x) for x in arrays if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


@pytest.mark.parametrize("name", names(STEPS))
def test_diagnose_step_names_the_parameters_in_bfloat16_that_an_optimizer_hardly_changes(name):
    step, args, state = STEPS[name](B)
    before = values(args)
    diagnosis = jmpscale.diagnose_step(step)(*args)
    assert diagnosis.state == state
    assert diagnosis.loss == pytest.approx(diagnosis.loss_float32, rel=0.1)
    assert diagnosis.summary.startswith("Even with the right gradients, the ")
    assert "in float32, not bfloat16. The change is made at test_diagnose_step_frameworks.py:" in diagnosis.summary
    worst = max((x for x in diagnosis.changes if x.is_state), key=lambda x: x.error)
    assert worst.dtype == "bfloat16"
    assert worst.error > 0.8
    assert len(diagnosis.lines) <= 2
    assert all(np.array_equal(x, y) for x, y in zip(before, values(args), strict=True))


def test_diagnose_step_takes_the_copies_of_a_scaler_on_the_devices_of_pmap():
    meshes.require_devices(8)
    state = parameters(), jmpscale.dynamic(2.0**24)

    def step(params, scaler, x, y):
        loss_in_float16 = jmpscale.autocast(lambda params: jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2))
        _, grads = jmpscale.value_and_grad(loss_in_float16)(scaler, params)
        grads = jax.lax.pmean(grads, "data")
        finite = jmpscale.all_finite(grads, axis_name="data")
        params = jmpscale.apply_if(finite, lambda p: jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), params)
        return params, jmpscale.update(scaler, finite)

    batch = X.reshape(8, 8, 16), Y.reshape(8, 8, 1)
    one = jax.pmap(step, axis_name="data", in_axes=(None, None, 0, 0), out_axes=None)
    expected = jmpscale.diagnose_step(one)(*state, *batch)
    diagnosis = jmpscale.diagnose_step(jax.pmap(step, axis_name="data"))(*jax_utils.replicate(state), *batch)
    assert "too large" in diagnosis.summary
    assert diagnosis.summary == expected.summary
    assert diagnosis.scaler == expected.scaler


def test_diagnose_step_omits_a_state_whose_dtypes_the_first_update_changes():
    """The first update returns the moments, which are created in bfloat16, in float32."""
    tx, params = optax.contrib.ademamix(1e-4, mu_dtype=B), parameters(F)

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    diagnosis = jmpscale.diagnose_step(step)(params, tx.init(params), X, Y)
    assert diagnosis.state == ("params",)
    assert diagnosis.summary.count(". ") == 0
    assert diagnosis.summary.startswith(GRADIENTS_DIFFER)


@pytest.mark.parametrize("dtype", [F, B], ids=["float32", "bfloat16"])
def test_diagnose_step_of_arrays_on_explicit_axes_is_the_same(dtype):
    mesh = meshes.make_mesh(jax.sharding.AxisType.Explicit, data=8)
    step, (params, opt_state, *batch), _ = optax_step(ADAM)(dtype)
    plain = jmpscale.diagnose_step(step)(params, opt_state, *batch)
    with jax.set_mesh(mesh):
        state = jax.device_put((params, opt_state), jax.NamedSharding(mesh, jax.P()))
        batch = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
        diagnosis = jmpscale.diagnose_step(step)(*state, *batch)
    assert diagnosis.state == plain.state
    assert diagnosis.lines == plain.lines
    assert diagnosis.loss == pytest.approx(plain.loss, rel=1e-3)
    assert diagnosis.not_entered == ()
    assert [x.name for x in diagnosis.changes] == [x.name for x in plain.changes]
    errors, expected = ([x.error for x in d.changes] for d in (diagnosis, plain))
    assert errors == pytest.approx(expected, rel=0.05, abs=0.01)  # the sums over devices round differently
    assert (max(errors, default=0) > 0.8) == (dtype == B)


# --- With a scaler in the state. ---


def half_loss(params, x, y):
    hidden = jnp.tanh(x.astype(H) @ params["a"].astype(H))
    return 1e-6 * jnp.mean(((hidden @ params["b"].astype(H)).astype(F) - y) ** 2)


def scaled_nnx():
    class Linear(nnx.Module):
        def __init__(self):
            values = parameters()
            self.a, self.b = nnx.Param(values["a"]), nnx.Param(values["b"])

    model = Linear()
    optimizer = nnx.Optimizer(model, SCALED_ADAM, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss_fn(model):
            return half_loss({"a": model.a[...], "b": model.b[...]}, x, y)

        value_and_grad = jmpscale.value_and_grad(loss_fn, transform=nnx.value_and_grad)
        loss, grads = value_and_grad(optimizer.opt_state, model)
        optimizer.update(model, grads, value=loss)
        return loss

    return step, (model, optimizer, X, Y)


def scaled_in_shard_map():
    tx = jmpscale.with_loss_scaling(optax.adam(1e-4), axis_name="data")

    def device_step(params, opt_state, x, y):
        loss, grads = jmpscale.value_and_grad(half_loss)(opt_state, params, x, y)
        updates, opt_state = tx.update(jax.lax.pmean(grads, "data"), opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    specs = {"in_specs": (jax.P(), jax.P(), jax.P("data"), jax.P("data")), "out_specs": jax.P(), "check_vma": False}
    step = jax.shard_map(device_step, mesh=meshes.make_mesh(data=2), **specs)
    return step, (parameters(), tx.init(parameters()), X, Y)


def two_scalers():
    def step(first, second, x, y):
        new = []
        for params, scaler in (first, second):
            loss, grads = jmpscale.value_and_grad(half_loss)(scaler, params, x, y)
            finite = jmpscale.all_finite((loss, grads))
            params = jmpscale.select_tree(finite, jax.tree.map(lambda p, g: p - g, params, grads), params)
            new.append((params, jmpscale.update(scaler, finite, loss=loss)))
        return *new, loss

    second = jax.tree.map(lambda x: 0.9 * x, parameters()), jmpscale.dynamic(2.0**14)
    return step, ((parameters(), jmpscale.dynamic(2.0**16)), second, X, Y)


def scaled_in_shard_map_without_a_loss():
    step, args = scaled_in_shard_map()
    return (lambda *args: step(*args)[:2]), args


def scaled_by_hand():
    def step(params, scaler, x, y):
        def scaled_loss(params):
            loss = half_loss(params, x, y)
            return loss * scaler.loss_scale, loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g / scaler.loss_scale, grads)
        finite = jmpscale.all_finite(grads)
        params = jmpscale.select_tree(finite, jax.tree.map(lambda p, g: p - g, params, grads), params)
        return params, jmpscale.update(scaler, finite, loss=loss), loss

    return step, (parameters(), jmpscale.dynamic(), X, Y)


SCALED = {
    "NNX": scaled_nnx,
    "shard_map": scaled_in_shard_map,
    "shard_map without a loss": scaled_in_shard_map_without_a_loss,
    "two scalers": two_scalers,
    "by hand": scaled_by_hand,
}


@pytest.mark.parametrize("name", names(SCALED))
def test_diagnose_step_finds_the_scales_of_a_scaler_in_the_state(name):
    step, args = SCALED[name]()
    before = values(args)
    found = jmpscale.diagnose_step(step)(*args)
    expected = jmpscale.diagnose(half_loss)(jmpscale.dynamic(), parameters(), X, Y)
    assert found.loss_scale in (2.0**16, 2.0**14)  # of two scalers, the diagnosis is about the worst one
    low, high = expected.fitting_scales
    assert low / 8 <= found.fitting_scales[0] <= 8 * low
    assert high / 8 <= found.fitting_scales[1] <= 8 * high
    assert found.gradient_error == pytest.approx(expected.gradient_error, rel=1)
    assert all(np.array_equal(x, y) for x, y in zip(before, values(args), strict=True))


def test_diagnose_step_of_a_step_that_binds_nnx_objects_compares_their_state():
    step, (model, optimizer, *batch), state = nnx_step(F)
    diagnosis = jmpscale.diagnose_step(functools.partial(step, model, optimizer))(*batch)
    assert diagnosis.state == state
    assert jmpscale.diagnose_step(functools.partial(step, y=Y))(model, optimizer, X).state == state
