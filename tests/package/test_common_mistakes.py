"""The wrong code of docs/common_mistakes.md gives the message on the page or does harm; the right code does not."""

import functools
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import check_step

import meshes
import pages

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion")]

PAGE = (pages.DOCS / "common_mistakes.md").read_text()
WITH_MESSAGE, WITHOUT_MESSAGE = (
    dict(re.findall(r"^### (.*?)\n(.*?)(?=^###? |\Z)", part, flags=re.MULTILINE | re.DOTALL))
    for part in re.findall(r"^## Mistakes.*?(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
)
LEARNING_RATE = 1e-3


def _blocks(section, language):
    return re.findall(rf"^```{language}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


def _sides(diff):
    """Returns the wrong code and the right code."""
    return ["".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in f" {sign}") for sign in "-+"]


def _joined(message):
    """Returns a message of the page, which has several lines, as one line."""
    return " ".join(message.split())


def _loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2)


def _program():
    params = {"w": jnp.ones((8, 1))}
    tx = jmpscale.with_loss_scaling(optax.adam(LEARNING_RATE))
    return {
        "functools": functools,
        "P": P,
        "mesh": meshes.make_mesh(devices=4),
        "state": TrainState.create(apply_fn=_loss, params=params, tx=tx),
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "jmpscale": jmpscale,
        "params": params,
        "batch": (jnp.ones((4, 8)), jnp.zeros((4, 1))),
        "loss_fn": _loss,
        "loss": jnp.float32(1.0),
        "grads": params,
        "finite": jnp.array(True),
        "scaler": jmpscale.dynamic(),
        "adam": optax.adam(LEARNING_RATE),
        "tx": tx,
        "opt_state": tx.init(params),
    }


def _run(code, program):
    exec(code, program)
    return program


def _run_in_new_program(code, program):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jmpscale._base.marks, "_used", set())
        _run(code, program)


def _call_loss(code, program):
    _run(code, program)
    jmpscale.value_and_grad(program["loss_fn"])(program["scaler"], program["params"], program["batch"])


def _call_wrapped_step(code, program):
    step = _run(code, program)["train_step"]
    step(*(program[name] for name in inspect.signature(step).parameters))


def _run_compiled(code, program):
    state = {name: program[name] for name in ("scaler", "params", "opt_state")}
    jax.eval_shape(lambda state: _run(code, program | state)["grads"], state)


def _run_on_each_device(code, program):
    def run(grads, scaler):
        return _run(code, program | {"grads": grads, "scaler": scaler})["finite"][None]

    mesh = meshes.make_mesh(devices=8)
    specs = {"in_specs": (P("devices"), P()), "out_specs": P("devices"), "check_vma": False}
    jax.eval_shape(jax.shard_map(run, mesh=mesh, **specs), jnp.ones(8), program["scaler"])


RUN = {  # the programs that need more than the names above
    "The gradients come from JAX": _run_in_new_program,
    "The gradients are never unscaled": _run_compiled,
    "The gradients are unscaled by the new scaler": _run_compiled,
    "The loss is float16": _call_loss,
    "The compiled step closes over the optimizer state": _call_wrapped_step,
    "`axis_name` is missing": _run_on_each_device,
}


def _messages(run, code):
    """Returns the error and the warnings of a program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run(code, _program())
            errors = []
        except Exception as error:  # the test compares its class and text
            errors = [error]
    found = [*errors, *(warning.message for warning in caught)]
    return list(dict.fromkeys(f"{type(x).__name__}: {x}" for x in found))  # two lines may have the same warning


@pytest.mark.parametrize("mistake", WITH_MESSAGE)
def test_mistake_has_the_message_on_the_page(mistake):
    section, run = WITH_MESSAGE[mistake], RUN.get(mistake, _run)
    [diff], [message, *_] = _blocks(section, "diff"), _blocks(section, "text")
    wrong, right = _sides(diff)
    [given] = _messages(run, wrong)
    assert given.startswith(_joined(message))
    assert _messages(run, right) == []


# --- mistakes without a message ---

UPDATE = "updates, opt_state = tx.update(grads, opt_state, params)\n"
APPLY = "params = optax.apply_updates(params, updates)\n"
GRADIENTS = "loss, grads = jmpscale.value_and_grad(loss_fn)({}, params, batch)\n"
GATE = """
params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(adam, grads), params, opt_state)
scaler = jmpscale.update(scaler, finite)
"""
SUM_GRADIENTS = """
def sum_gradients(params, micro_batches):
    of_batch = lambda batch: jmpscale.value_and_grad(loss_fn)(scaler, params, batch)[1]
    grads = of_batch(batch), jax.tree.map(jnp.zeros_like, params)
    return jax.tree.map(jnp.add, *grads), jnp.stack([jmpscale.all_finite(g) for g in grads])
"""
SMALL_LOSS = "loss_fn = lambda params, batch, loss_fn=loss_fn: 0.01 * loss_fn(params, batch)  # below the clip\n"
SMALL_GRADIENTS = """
small_loss_fn = lambda params, batch: 1e-9 * loss_fn(params, batch)
loss, grads = jmpscale.value_and_grad(small_loss_fn)(opt_state, params, batch)
all_reduce = lambda grads: grads
"""
CALL = "params, opt_state, {}, loss = train_step(params, opt_state, scaler, batch)\n"
STEPS = {  # for each diff, the code before and after it that makes it a training step
    "The new scaler is not returned": [("", CALL.format("scaler"))],
    "A loop uses the scaler from before the loop": [
        ("batches = jax.tree.map(lambda x: jnp.stack([x] * 4), batch)\n", "")
    ],
    "A step is not gated": [(GRADIENTS.format("scaler") + "finite = jmpscale.all_finite(grads)\n", "")],
    "The old state of the wrapper is put back": [(GRADIENTS.format("opt_state"), APPLY)],
    "A step has two scalers": [("", CALL.format("_"))],
    "The flag is not about all gradients": [("", GATE), (SUM_GRADIENTS, f"grads = summed{GATE}")],
    "Part of the optimizer is outside the wrapper": [("", SMALL_LOSS + GRADIENTS.format("opt_state") + UPDATE + APPLY)],
    "Scaled gradients are clipped": [("", GATE)],
    "The gradients are unscaled twice by hand": [("", UPDATE + APPLY)],
    "The gradients are converted to float16": [(SMALL_GRADIENTS, APPLY)],
    "Other state is not gated": [
        (GRADIENTS.format("opt_state") + "new_batch_stats = 0.9 * batch_stats + 0.1\n", APPLY)
    ],
}


def _half_loss(params, batch):
    half, (x, _) = jmpscale.cast((params, batch), jnp.float16)
    return jnp.sum((x @ half["w"]).astype(jnp.float32))


def _step_and_state(code, names, is_functional):
    """Returns a compiled step that runs the code, and its first state."""
    created = [line for line in code.splitlines() if line.startswith("tx = ")]
    tx = names["adam"] if is_functional else _run("\n".join(created), dict(names))["tx"]
    state = {"params": names["params"], "batch_stats": jnp.zeros(()), "opt_state": tx.init(names["params"])}
    state |= {"scaler": names["scaler"]} if is_functional else {}

    @jax.jit
    def step(state):
        program = _run(code, names | state)
        return {name: program[name] for name in state}

    return step, state


def _check(code, names, is_functional):
    step, state = _step_and_state(code, names, is_functional)
    check_step(step)(state)


@pytest.mark.filterwarnings("ignore:update does not see that the loss")  # not every step on the page passes its loss
@pytest.mark.parametrize("mistake", STEPS)
def test_check_step_finds_a_mistake_without_a_message(mistake):
    names = _program() | {"loss_fn": _half_loss, "clip": optax.clip_by_global_norm(1.0), "micro_batches": ()}
    for diff, (before, after) in zip(_blocks(WITHOUT_MESSAGE[mistake], "diff"), STEPS[mistake], strict=True):
        wrong, right = (before + code + after for code in _sides(diff))
        is_functional = "= jmpscale.update(scaler" in right and "tx.update" not in right
        _check(right, names, is_functional)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a compiled step that closes over a scaler
            with pytest.raises(AssertionError, match=r"the (skipped )?step |the change of |4 steps were"):
                _check(wrong, names, is_functional)


def _has_wrong_gradients(program):
    true = jax.grad(_loss)(program["params"], program["batch"])
    return not jnp.allclose(program["grads"]["w"], true["w"])


def _computes_in_float32(program):
    return "f16" not in str(jax.make_jaxpr(program["loss_fn"])(program["params"], program["batch"]))


def _reduces_the_scale(program):
    return jmpscale.get_scaler(program["opt_state"]).loss_scale < jmpscale.dynamic().loss_scale


def _has_long_updates(program):
    return jnp.linalg.norm(program["updates"]) > 1.1


HARM = {  # the test of the harm, and the names with which the code runs
    "Gradients are averaged again under `shard_map`": (_has_wrong_gradients, {}),
    "Each device clips its own shard": (_has_long_updates, {}),
    "Nothing is computed in float16": (_computes_in_float32, {}),
    "The loss is not passed": (
        _reduces_the_scale,
        {"grads": {"w": jnp.full((8, 1), jnp.nan)}, "loss": jnp.float32(jnp.nan)},
    ),
}


def test_check_step_finds_all_mistakes_without_a_message_but_the_last_four():
    assert list(WITHOUT_MESSAGE) == [*STEPS, *HARM]


def test_check_step_warns_about_the_last_mistake():
    *_, (mistake, section) = WITHOUT_MESSAGE.items()
    assert mistake == "The loss is not passed"
    [diff] = _blocks(section, "diff")
    wrong, right = (GRADIENTS.format("opt_state") + code + APPLY for code in _sides(diff))
    names = _program() | {"loss_fn": _half_loss}
    _check(right, names, is_functional=False)  # warnings are errors
    with pytest.warns(UserWarning, match="update does not see that the loss is not finite"):
        _check(wrong, names, is_functional=False)


@pytest.mark.parametrize("mistake", HARM)
def test_mistake_that_check_step_does_not_find_does_harm(mistake):
    harmed, names = HARM[mistake]
    [diff] = _blocks(WITHOUT_MESSAGE[mistake], "diff")
    wrong, right = _sides(diff)
    assert harmed(_run(wrong, _program() | names))
    assert not harmed(_run(right, _program() | names))
