"""A function that takes a scaler, or a tree with a scaler, requires exactly one valid scaler, which scales the loss."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jmpscale

from calls import (
    ADAM,
    BATCH,
    GRADS,
    INTS,
    LOSS,
    OPT_STATE,
    SCALE,
    SCALE_STATE,
    STATE,
    TX,
    Mistake,
    check_message,
    loss_of,
    raises,
    traced,
    warnings_of,
)
from messages import NEVER_SCALED, NO_BATCH, ONE_SCALER
from tables import names, rows

pytestmark = pytest.mark.guards


TAKE_SCALER = {  # the call, and the name of the argument
    "update": (lambda s: jmpscale.update(s, True), "scaler"),
    "with_loss_scaling": (lambda s: jmpscale.with_loss_scaling(ADAM, s), "scaler"),
    "tx.update": (lambda s: TX.update(GRADS, OPT_STATE._replace(scaler=s), GRADS), "state.scaler"),
    "replace_scaler": (lambda s: jmpscale.replace_scaler(OPT_STATE, s), "scaler"),
}


@pytest.mark.parametrize("name", TAKE_SCALER)
def test_function_requires_a_scaler(name):
    call, argument = TAKE_SCALER[name]
    with raises(TypeError, f"{argument} must be a ScalerState, got tuple. ... dynamic ... get_scaler"):
        call(tuple(STATE))
    with raises(TypeError, f"{argument}.config must be a ScalerConfig, got NoneType. Restore a checkpoint into"):
        call(STATE._replace(config=None))
    with raises(ValueError, f"{argument} {NO_BATCH} ... shape (2,). Call this under jax.vmap; or, ... tree.map("):
        call(BATCH)
    with raises(TypeError, f"{argument} must ... got float. Pass jmpscale.static(1024.0), a ... dynamic(1024.0), wh"):
        call(1024.0)
    with raises(TypeError, f"{argument} must ... got Array. Pass jmpscale.static(scale), a ... dynamic(scale), which"):
        call(LOSS)


def test_replace_scaler_takes_the_tree_first():
    with raises(TypeError, "the arguments are replace_scaler(tree, scaler), got them in the opposite order."):
        jmpscale.replace_scaler(STATE, OPT_STATE)


READ_SCALER_OF_TREE = {  # the call, and the name of the argument
    "get_scaler": (jmpscale.get_scaler, "tree"),
    "metrics": (jmpscale.metrics, "scaler"),
    "RunMonitor": (lambda tree: jmpscale.RunMonitor(max_consecutive_skips=1).raise_if_stuck(tree), "scaler"),
    "value_and_grad": (lambda tree: jmpscale.value_and_grad(loss_of)(tree, GRADS), "scaler"),
    "scaled_backward": (lambda tree: jmpscale.scaled_backward(loss_of, lambda _: tree)(GRADS), "scale"),
    "all_finite": (lambda tree: jmpscale.all_finite(GRADS, scaler=tree), "scaler"),
    "scale": (lambda tree: jmpscale.scale(tree, LOSS), "scaler"),
    "unscale": (lambda tree: jmpscale.unscale(tree, GRADS), "scaler"),
    "unscale_and_check": (lambda tree: jmpscale.unscale_and_check(tree, GRADS), "scaler"),
    "grad_report": (lambda tree: jmpscale.grad_report(GRADS, scaler=tree), "scaler"),
    "to_torch_state_dict": (jmpscale.to_torch_state_dict, "scaler"),
    "diagnose": (lambda tree: jmpscale.diagnose(loss_of)(tree, GRADS), "scaler"),
}


NEED_NO_SCALER = {"diagnose"}
ACCEPT_BATCH_OF_SCALERS = {"get_scaler", "metrics", "RunMonitor"}


TAKE_TREE_WITH_SCALER = READ_SCALER_OF_TREE | {
    "replace_scaler": (lambda tree: jmpscale.replace_scaler(tree, STATE), "tree"),
}


@pytest.mark.parametrize("name", TAKE_TREE_WITH_SCALER)
def test_function_requires_a_tree_with_one_scaler(name):
    call, argument = TAKE_TREE_WITH_SCALER[name]
    words = rf"{argument} must contain {ONE_SCALER} 0 in a dict\. (Pass a|The scaler)"
    if name not in NEED_NO_SCALER:
        with pytest.raises(ValueError, match=words):
            call(GRADS)
    with raises(ValueError, f"{ONE_SCALER} 2 in a list. A step has one scaler: wrap"):
        call([STATE, {"b": STATE}])


@pytest.mark.parametrize("name", sorted(TAKE_TREE_WITH_SCALER.keys() - NEED_NO_SCALER))
def test_function_says_that_an_optimizer_is_not_wrapped(name):
    call, _ = TAKE_TREE_WITH_SCALER[name]
    state = TrainState.create(apply_fn=None, params=GRADS, tx=optax.sgd(1e-3))
    with raises(ValueError, "found 0 in a TrainState. Its optimizer is not wrapped: create the state with jmpscale."):
        call(state)


@pytest.mark.parametrize("name", names(READ_SCALER_OF_TREE, {"grad_report"}))
def test_function_reads_the_scaler_of_a_tree(name):
    call, _ = READ_SCALER_OF_TREE[name]
    of_scaler, of_tree = call(STATE), call({"step": 3, "opt_state": OPT_STATE._replace(scaler=STATE)})
    assert str(of_tree) == str(of_scaler)


@pytest.mark.parametrize("name", READ_SCALER_OF_TREE)
def test_function_requires_the_arrays_of_one_scaler(name):
    call, argument = READ_SCALER_OF_TREE[name]
    with raises(ValueError, f"{argument} must contain ... all arrays, got 0. Pass the unfiltered tree."):
        call(jax.tree.map(lambda _: None, OPT_STATE))
    if name in ACCEPT_BATCH_OF_SCALERS:
        call((BATCH, 1))
    else:
        with raises(ValueError, f"{argument} {NO_BATCH} ... shape (2,)"):
            call((BATCH, 1))


def _donated(state):
    """Returns a scaler whose arrays are deleted, as a compiled function deletes what is donated to it."""
    state = jax.tree.map(jnp.asarray, state)
    jax.tree.map(lambda x: x.delete(), state)
    return state


def _update(**fields):
    return lambda: jmpscale.update(STATE._replace(**fields), True)


WRONG_FIELDS = {
    "vector field": Mistake(_update(finite_steps=INTS), "scaler.finite_steps must be a scalar ... got int32[2]."),
    "float field": Mistake(
        _update(finite_steps=np.float32(3)), "scaler.finite_steps must ... got float32[]. ... restore"
    ),
    "int16 field": Mistake(_update(total_skips=np.int16(3)), "scaler.total_skips must ... 32 bits, got int16[]."),
    "float16 scale": Mistake(_update(loss_scale=np.float16(8)), "scaler.loss_scale must ... 32 bits, got float16[]."),
    "int32 scale": Mistake(_update(loss_scale=np.int32(8)), "scaler.loss_scale must ... got int32[]. Convert it"),
    "int scale": Mistake(_update(loss_scale=1024), "scaler.loss_scale must ... got 1024. Convert it, or"),
    "complex scale": Mistake(_update(loss_scale=np.complex64(8)), "scaler.loss_scale must ... got complex64[]."),
    "string scale": Mistake(_update(loss_scale="8"), "scaler.loss_scale must ... got '8'."),
    "dict as config": Mistake(_update(config={}), "scaler.config must ... got dict. Restore a checkpoint"),
    "donated scaler": Mistake(
        lambda: jmpscale.metrics(_donated(jmpscale.dynamic())),
        "deleted arrays, ... Use the scaler that",
        raises=ValueError,
    ),
}


@pytest.mark.parametrize("mistake", rows(WRONG_FIELDS))
def test_scaler_has_valid_arrays(mistake):
    check_message(mistake)


# --- a program that has not scaled a loss ---


def _wrapper(take_gradients, scaler):
    state = SCALE_STATE._replace(scaler=scaler)
    loss, grads = take_gradients(state, GRADS)
    return SCALE.update(grads, state, value=loss)


def _functional_api(take_gradients, scaler):
    _, grads = take_gradients(scaler, GRADS)
    return jmpscale.update(scaler, jmpscale.all_finite(grads))


def _not_scaled(_, params):
    return jax.value_and_grad(loss_of)(params)


def _scaled_by_hand(state, params):
    scale = jmpscale.get_scaler(state).loss_scale
    grads = jax.grad(lambda params: scale * loss_of(params))(params)
    return loss_of(params), jmpscale.unscale(state, grads)


def _unscaled_by_hand(state, params):
    grads = jax.grad(lambda params: jmpscale.scale(state, loss_of(params)))(params)
    return loss_of(params), jax.tree.map(lambda x: x / jmpscale.get_scaler(state).loss_scale, grads)


def _scaled_for_a_loop(state, params):
    return jax.value_and_grad(jmpscale.scaled_backward(loss_of, state))(params)


@pytest.mark.usefixtures("nothing_scaled")
@pytest.mark.parametrize("step", [_wrapper, _functional_api])
def test_step_warns_if_no_loss_has_been_scaled(step):
    words = rf"{NEVER_SCALED}.*jmpscale\.value_and_grad"
    with pytest.warns(UserWarning, match=words):
        step(_not_scaled, STATE)
    with pytest.warns(UserWarning, match=words):
        traced(functools.partial(step, _not_scaled), STATE)
    step(_not_scaled, jmpscale.static(1.0))


@pytest.mark.usefixtures("nothing_scaled")
def test_step_without_a_loss_warns_if_it_is_compiled():
    SCALE.update(GRADS, SCALE_STATE)  # does not warn outside jit
    with pytest.warns(UserWarning, match=NEVER_SCALED):
        traced(SCALE.update, GRADS, SCALE_STATE)


@pytest.mark.usefixtures("nothing_scaled")
@pytest.mark.parametrize("step", [_wrapper, _functional_api])
@pytest.mark.parametrize(
    "take_gradients", [jmpscale.value_and_grad(loss_of), _scaled_by_hand, _unscaled_by_hand, _scaled_for_a_loop]
)
def test_step_does_not_warn_if_the_loss_has_been_scaled(step, take_gradients):
    assert warnings_of(lambda: traced(functools.partial(step, take_gradients), STATE)) == []


@pytest.mark.usefixtures("nothing_scaled")
@pytest.mark.parametrize("step", [_wrapper, _functional_api])
def test_step_does_not_warn_about_gradients_from_another_process(step, monkeypatch):
    take_gradients = jax.jit(lambda scaler, params: jmpscale.value_and_grad(loss_of)(scaler, params))
    exported = jax.export.export(take_gradients)(STATE, GRADS).serialize()
    monkeypatch.setattr(jmpscale._base.marks, "_used", set())  # as in another process
    imported = jax.export.deserialize(exported)

    def take_imported_gradients(state, params):
        return imported.call(jmpscale.get_scaler(state), params)

    assert warnings_of(lambda: traced(functools.partial(step, take_imported_gradients), STATE)) == []
