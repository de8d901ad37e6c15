"""Checkpoints: each format restores every bit, and a resumed run equals one that was never interrupted."""

import functools
import pickle

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jmpscale
from jmpscale.testing import assert_replicated

from bits import assert_equal_bits
from compiling import FAST

pytestmark = pytest.mark.usefixtures("standard_promotion")

ADAM = optax.adam(1e-2)
SCALER = jmpscale.dynamic(2.0**10, growth_interval=3)
TX = jmpscale.with_loss_scaling(ADAM, SCALER)
CLIPPING_TX = jmpscale.with_loss_scaling(ADAM, SCALER, max_norm=1.0)
COPYING_TX = jmpscale.with_master_params(TX)
PARAMS = {"w": jnp.full((8, 1), 0.1)}
MIXED = {"w": jnp.full((8, 1), 0.1, jnp.bfloat16), "b": jnp.full(1, 0.1)}  # of which one has a float32 copy
jit = functools.partial(jax.jit, **FAST)
update = jit(jmpscale.update)


# The formats: save a state, and restore it into a template.


def orbax(folder, state, template=None):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", template)


def orbax_abstract(folder, state, template):
    return orbax(folder, state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), template))


def orbax_without_template(folder, state, template):
    return jmpscale.ScalerState(**{**orbax(folder, state), "config": template.config})


def msgpack(folder, state, template):
    return flax.serialization.from_bytes(template, flax.serialization.to_bytes(state))


def state_dict(folder, state, template):
    return flax.serialization.from_state_dict(template, flax.serialization.to_state_dict(state))


def equinox(folder, state, template):
    eqx.tree_serialise_leaves(folder / "state.eqx", state)
    return eqx.tree_deserialise_leaves(folder / "state.eqx", template)


def unpickle(folder, state, template):
    return pickle.loads(pickle.dumps(state))


def used_scaler():
    """Returns a scaler in which each field has been changed by a step, and no two fields are equal."""
    scaler = jmpscale.dynamic(2.0**10, hysteresis=5)
    for finite, loss in [(False, 1.0), (False, 1.0), (False, jnp.nan), *[(True, 1.0)] * 6, (False, jnp.nan)]:
        scaler = update(scaler, jnp.array(finite), loss=jnp.float32(loss))
    return scaler


STATES = {
    "new_scaler": jmpscale.dynamic,  # consists of NumPy arrays
    "scaler": used_scaler,
    "master_params": lambda: COPYING_TX.init(MIXED)._replace(master_params={"w": jnp.full((8, 1), 0.1), "b": None}),
    "opt_state": lambda: CLIPPING_TX.init(PARAMS)._replace(scaler=used_scaler(), grad_norm=jnp.float32(3)),
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("roundtrip", [orbax, orbax_abstract, msgpack, state_dict, equinox, unpickle])
def test_restore_keeps_every_bit(roundtrip, name, tmp_path):
    state = STATES[name]()
    assert_equal_bits(state, roundtrip(tmp_path, state, jax.tree.map(np.zeros_like, state)))


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_restore_converts_bfloat16_to_the_dtype_of_the_template(tmp_path):
    """So a run in bfloat16 continues with master weights in float32."""
    saved = {"w": jnp.full((8, 1), 0.1, jnp.bfloat16)}
    restored = orbax_abstract(tmp_path, saved, {"w": jnp.zeros((8, 1), jnp.float32)})
    assert_equal_bits({"w": saved["w"].astype(jnp.float32)}, restored)


@pytest.mark.parametrize("roundtrip", [orbax, orbax_without_template, msgpack, equinox])
def test_restore_uses_the_settings_of_the_template(roundtrip, tmp_path):
    template = jmpscale.dynamic(4.0, growth_interval=7, min_scale=0.5)
    restored = roundtrip(tmp_path, used_scaler(), template)
    assert restored.config == template.config
    assert_equal_bits(used_scaler()._replace(config=template.config), restored)


# Checkpoints with another layout, with another optimizer, or with damage restore correctly or raise.

LAYOUT = {
    "loss_scale": np.float32(8.0),
    "total_steps": np.int32(5),
    "finite_steps": np.int32(1),
    "hysteresis_left": np.int32(2),
    "total_skips": np.int32(3),
    "consecutive_skips": np.int32(4),
    "last_skip_reason": np.int32(1),
    "config": {},
}
OTHER_LAYOUTS = {
    "missing_field": (
        {name: value for name, value in LAYOUT.items() if name != "last_skip_reason"},
        "last_skip_reason",
    ),
    "unknown_field": ({**LAYOUT, "grown": np.float32(1)}, "grown"),
    "other_library": ({"fin_steps": np.int32(0), "scale": np.float32(8.0)}, "fin_steps"),
    "empty": ({}, "scaler"),
}


def test_layout_equals_the_layout_of_version_0_1():
    restored = flax.serialization.from_state_dict(jmpscale.dynamic(), LAYOUT)
    assert flax.serialization.to_state_dict(restored) == LAYOUT


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
@pytest.mark.parametrize("roundtrip", [orbax, msgpack])
def test_restore_raises_for_another_layout(roundtrip, name, tmp_path):
    saved, field = OTHER_LAYOUTS[name]
    with pytest.raises(ValueError, match=rf"do not match(.|\n)*{field}"):
        roundtrip(tmp_path, {"scaler": saved, "w": jnp.ones(2)}, {"scaler": jmpscale.dynamic(), "w": jnp.zeros(2)})


@pytest.mark.parametrize(("scale", "recovers"), [(0.0, True), (1e-45, True), (np.inf, False), (np.nan, False)])
def test_corrupted_scale_recovers_or_is_reported(scale, recovers):
    state, finite = SCALER._replace(loss_scale=np.float32(scale)), []
    for _ in range(3):
        _, grad = jmpscale.value_and_grad(jnp.square)(state, 3.0)
        finite.append(bool(jmpscale.all_finite(grad)))
        state = update(state, jnp.array(finite[-1]))
    assert finite == [False, recovers, recovers]
    if not recovers:
        with pytest.raises(FloatingPointError, match=rf"the loss scale is {scale:g}.*corrupted.*[Rr]estore"):
            jmpscale.RunMonitor(max_consecutive_skips=2).raise_if_stuck(state)


@pytest.mark.full
@pytest.mark.guards
@pytest.mark.parametrize("roundtrip", [orbax, msgpack])
@pytest.mark.parametrize(("old", "new"), [(TX, CLIPPING_TX), (CLIPPING_TX, TX)], ids=["added", "removed"])
def test_restore_after_max_norm_is_added_or_removed(old, new, roundtrip, tmp_path):
    saved, template = old.init(PARAMS)._replace(scaler=used_scaler()), new.init(PARAMS)
    restored = roundtrip(tmp_path, saved, template)
    with pytest.raises(ValueError, match=r"grad_norm=tx\.init\(params\)\.grad_norm"):
        new.update(PARAMS, restored._replace(grad_norm=saved.grad_norm), PARAMS)
    restored = restored._replace(grad_norm=template.grad_norm)
    new.update(PARAMS, restored, PARAMS)
    assert jax.tree.structure(restored) == jax.tree.structure(template)
    assert_equal_bits(jax.tree.leaves(saved[:2]), jax.tree.leaves(restored[:2]))


# Resumed training equals uninterrupted training. In some batches the targets are so large that the gradients overflow
# in float16.

STEPS, OVERFLOWS = 14, (4, 5, 9)
X = jnp.asarray(np.random.default_rng(0).standard_normal((STEPS, 4, 8)), jnp.float16)
Y = jnp.array([6e4 if number in OVERFLOWS else 1.0 for number in range(STEPS)])


def loss_fn(w, number):
    return jnp.mean(((X[number] @ w.astype(jnp.float16)).astype(jnp.float32) - Y[number]) ** 2)


def functional(state, number):
    loss, grads = jmpscale.value_and_grad(loss_fn)(state, state["w"], number)
    finite = jmpscale.all_finite(grads)
    w, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(ADAM, grads), state["w"], state["opt_state"])
    return {"w": w, "opt_state": opt_state, "scaler": jmpscale.update(state["scaler"], finite, loss=loss)}


def master_params(state, number):
    loss, grads = jmpscale.value_and_grad(lambda params: loss_fn(params["w"], number) + params["b"][0])(
        state["opt_state"], state["params"]
    )
    updates, opt_state = COPYING_TX.update(grads, state["opt_state"], state["params"], value=loss)
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def train_state(state, number):
    _, grads = jmpscale.value_and_grad(lambda params: loss_fn(params["w"], number))(state, state.params)
    return state.apply_gradients(grads=grads)


def make_nnx(state=None):
    model = nnx.Linear(8, 1, dtype=jnp.float16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    if state is not None:
        nnx.update((model, optimizer), state)
    return model, optimizer


def nnx_optimizer(state, number):
    model, optimizer = make_nnx(state)
    grad_fn = jmpscale.value_and_grad(lambda model: loss_fn(model.kernel[...], number), transform=nnx.value_and_grad)
    loss, grads = grad_fn(optimizer.opt_state, model)
    optimizer.update(model, grads, value=loss)
    return nnx.state((model, optimizer))


START = {
    functional: lambda: {"w": PARAMS["w"], "opt_state": ADAM.init(PARAMS["w"]), "scaler": SCALER},
    master_params: lambda: {"params": MIXED, "opt_state": COPYING_TX.init(MIXED)},
    train_state: lambda: TrainState.create(apply_fn=None, params=PARAMS, tx=CLIPPING_TX),
    nnx_optimizer: lambda: nnx.state(make_nnx()),
}


def scaler_of(state):
    return jmpscale.get_scaler(make_nnx(state)[1].opt_state if isinstance(state, nnx.State) else state)


@functools.cache
def uninterrupted(program):
    """Returns the jitted step, and the state before each step and after the last."""
    step, states = jit(program), [START[program]()]
    for number in range(STEPS):
        states.append(step(states[-1], number))
    return step, states


@pytest.mark.parametrize(
    ("program", "roundtrip", "stops"),
    [
        (functional, orbax, [5]),
        pytest.param(functional, msgpack, range(STEPS), marks=pytest.mark.full),
        pytest.param(master_params, msgpack, [5], marks=pytest.mark.full),
        pytest.param(master_params, orbax, range(STEPS), marks=pytest.mark.full),
        pytest.param(train_state, msgpack, range(STEPS), marks=pytest.mark.full),
        pytest.param(nnx_optimizer, orbax, range(STEPS), marks=pytest.mark.full),
    ],
    ids=lambda value: getattr(value, "__name__", "every step" if value == range(STEPS) else f"steps {value}"),
)
def test_resumed_training_equals_uninterrupted_training(program, roundtrip, stops, tmp_path):
    step, states = uninterrupted(program)
    scales = np.asarray([scaler_of(state).loss_scale for state in states])
    assert set(np.sign(np.diff(scales))) == {-1, 0, 1}
    for stop in stops:
        (folder := tmp_path / str(stop)).mkdir()
        state = roundtrip(folder, states[stop], START[program]())
        for number in range(stop, STEPS):
            state = step(state, number)
        assert_equal_bits(states[-1], state)


@pytest.mark.parametrize("devices", [4, 2])
def test_restore_follows_the_sharding_of_the_template(devices, tmp_path):
    def start(devices):
        mesh = jax.make_mesh((len(devices),), ("model",), devices=devices)
        w = jax.device_put(np.full((16, 8), 0.1, np.float32), NamedSharding(mesh, PartitionSpec(None, "model")))
        with jax.set_mesh(mesh):
            return {"w": w, "opt_state": TX.init({"w": w})}

    state, template = start(jax.devices()[:4]), start(jax.devices()[-devices:])
    state["opt_state"] = jmpscale.replace_scaler(state["opt_state"], used_scaler())
    restored = orbax(tmp_path, state, template)
    assert_replicated(restored)
    assert_equal_bits(jax.tree.leaves(state), jax.tree.leaves(restored))
    assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(template)]
