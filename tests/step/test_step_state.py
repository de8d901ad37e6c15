"""match_state finds the state of a training step: what it returns in place of its arguments."""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.extend import core

import jmpscale
from jmpscale._step.call import StepCall
from jmpscale._step.dependence import StepDependence
from jmpscale._step.state import changed_types, match_state

from tables import names

PARAMS = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
AVERAGE = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
ADAM = optax.adam(1e-3)
STATE = ADAM.init(PARAMS)
SCALER = jmpscale.dynamic()
X = jnp.ones((4, 3))
KEY = jax.random.key(0)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def _loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["a"]) + params["b"][None]) ** 2)


def _train(params, state, x):
    """Returns new parameters, a new state, the loss and the gradients."""
    loss, grads = jax.value_and_grad(_loss)(params, x)
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss, grads


def _average(average, params):
    return optax.incremental_update(params, average, 0.1)


def _step(params, state, batch):
    return _train(params, state, batch)[:3]


def _loss_first(params, state, batch):
    params, state, loss, _ = _train(params, state, batch)
    return loss, (params, state)


def _whole(state, batch):
    params, opt_state, loss, _ = _train(*state, batch)
    return (params, opt_state), {"loss": loss}


def _with_average(params, average, batch):
    params = _train(params, STATE, batch)[0]
    return params, _average(average, params)


def _swapped(params, average, batch):
    return _with_average(params, average, batch)[::-1]


def _gradients_first(params, batch):
    params, _, _, grads = _train(params, STATE, batch)
    return grads, params


def _train_scaled(params, scaler, batch):
    """Returns new parameters, a new scaler, the loss and the gradients, which depend on whether the loss is finite."""
    loss, grads = jmpscale.value_and_grad(_loss)(scaler, params, batch)
    finite = jmpscale.all_finite((loss, grads))
    new = jmpscale.apply_if(finite, lambda p: jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), params)
    return new, jmpscale.update(scaler, finite, loss=loss), loss, grads


def _scaled_gradients_first(params, scaler, batch):
    params, scaler, loss, grads = _train_scaled(params, scaler, batch)
    return (loss, grads), (params, scaler)


def _teacher_and_gradients(params, teacher, scaler, batch):
    params, scaler, loss, grads = _train_scaled(params, scaler, batch)
    return params, scaler, {"loss": loss, "grads": grads}


def _previous_gradients(params, previous, scaler, batch):
    params, scaler, loss, grads = _train_scaled(params, scaler, batch)
    return params, grads, scaler, loss


def _gradients_with_penalty_first(params, batch):
    grads = jax.tree.map(lambda g, p: g + 4 * p, jax.grad(_loss)(params, batch), params)
    return grads, jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def _dual_averaging(params, total, batch):
    total = jax.tree.map(jnp.add, total, jax.grad(_loss)(params, batch))
    return jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, total), total


def _running_loss(params, state, mean, batch):
    params, state, loss, _ = _train(params, state, batch)
    return params, state, 0.9 * mean + 0.1 * loss


def _norm_of_the_update(params, rate, batch):
    loss, grads = jax.value_and_grad(_loss)(params, batch)
    updates = jax.tree.map(lambda g: rate * g, grads)
    return jax.tree.map(jnp.subtract, params, updates), optax.tree.norm(updates), loss


def _dict_of_reconstructions(params, batch):
    return _train(params, STATE, batch["x"])[0], {"x": batch["x"] + jnp.mean(params["a"])}


def _carry(is_gated, params, scaler, carry, batch):
    new, scaler, _, _ = _train_scaled(params, scaler, batch + jnp.mean(carry["h"]))
    after = jax.tree.map(jnp.tanh, carry)
    return new, scaler, jmpscale.select_tree(scaler.step_applied, after, carry) if is_gated else after


def _masked_labels(params, batch, labels):
    found = jnp.argmax(batch @ params["a"], 1).astype(labels.dtype)
    params = _train(params, STATE, batch + labels[:, None])[0]
    return params, jnp.where(found == labels, labels, -1)


def _only_gradients(params, batch):
    return _train(params, STATE, batch)[2:]


def _rate(params, rate, batch):
    loss, grads = jax.value_and_grad(_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss + 0 * rate


def _reconstruction(params, x):
    return _train(params, STATE, x)[0], x + jnp.mean(params["a"])


def _wider(params, batch):
    return jax.tree.map(lambda p: p.astype(jnp.float32), _train(params, STATE, batch)[0])


def _part(state, batch):
    params, opt_state, _, _ = _train(state["params"], state["opt"], batch)
    return {"params": params, "opt": opt_state}, 1.0


def _fixed_target(params, target, state, batch):
    params, state, loss, _ = _train(params, state, batch)
    return params, state, loss


def _fixed_target_first(target, params, state, batch):
    return _fixed_target(params, target, state, batch)


def _state_first(params, state, batch):
    return _train(params, state, batch)[1::-1]


def _previous(params, previous, batch):
    return _train(params, STATE, batch)[0], params


def _key_and_count(params, key, count, rate, labels, batch):
    key, _ = jax.random.split(key)
    return _train(params, STATE, batch)[0], key, count + 1, rate, jnp.argmax(batch @ params["a"], 1)


def _array(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.float32(0)


class _Result(NamedTuple):
    metrics: dict[str, jax.Array]
    params: Any
    state: Any


def _named_tuple(params, state, batch):
    params, state, loss, _ = _train(params, state, batch)
    return _Result({"loss": loss}, params, state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Record:
    grads: Any
    params: Any
    state: Any


def _dataclass(params, state, batch):
    params, state, _, grads = _train(params, state, batch)
    return _Record(grads, params, state)


def _dataclass_of_average(params, average, batch):
    params, average = _with_average(params, average, batch)[:2]
    return _Record({"average": average}, params, {})


class _Carry(NamedTuple):
    params: Any
    state: Any
    epoch: Any


def _part_of_a_named_tuple(carry, batch):
    return _train(carry.params, carry.state, batch)[:2]


def _scan(params, state, batches):
    def body(carry, batch):
        params, state, loss, grads = _train(*carry, batch)
        return (params, state), (loss, grads)

    return jax.lax.scan(body, (params, state), batches)


def _while(params, count, batch):
    def body(carry):
        params, count = carry
        return _train(params, STATE, batch)[0], count + 1

    return jax.lax.while_loop(lambda carry: carry[1] < 3, body, (params, count))


def _gated(params, state, batch):
    new, new_state, loss, grads = _train(params, state, batch)
    finite = jmpscale.all_finite(grads)
    pairs = jax.lax.cond(finite, lambda: (new, new_state), lambda: (params, state))
    return grads, loss, *pairs


HALF = jmpscale.cast(PARAMS, jnp.bfloat16)
ROWS: dict[str, tuple[Any, tuple[Any, ...], dict[str, str]]] = {  # step, arguments, and matches: names and results
    "step": (_step, (PARAMS, STATE, X), {"params": "[0][0]", "state": "[0][1]"}),
    "loss first": (_loss_first, (PARAMS, STATE, X), {"params": "[0][1][0]", "state": "[0][1][1]"}),
    "one state": (_whole, ((PARAMS, STATE), X), {"state": "[0][0]"}),
    "average": (_with_average, (PARAMS, AVERAGE, X), {"params": "[0][0]", "average": "[0][1]"}),
    "average first": (_swapped, (PARAMS, AVERAGE, X), {"params": "[0][1]", "average": "[0][0]"}),
    "gradients first": (_gradients_first, (PARAMS, X), {"params": "[0][1]"}),
    "only gradients": (_only_gradients, (PARAMS, X), {}),
    "gradients of a scaled loss first": (
        _scaled_gradients_first,
        (PARAMS, SCALER, X),
        {"params": "[0][1][0]", "scaler": "[0][1][1]"},
    ),
    "frozen teacher and gradients": (
        _teacher_and_gradients,
        (PARAMS, AVERAGE, SCALER, X),
        {"params": "[0][0]", "scaler": "[0][1]"},
    ),
    "previous gradients": (
        _previous_gradients,
        (PARAMS, AVERAGE, SCALER, X),
        {"params": "[0][0]", "previous": "[0][1]", "scaler": "[0][2]"},
    ),
    "gradients with a penalty first": (_gradients_with_penalty_first, (PARAMS, X), {"params": "[0][1]"}),
    "dual averaging": (_dual_averaging, (PARAMS, AVERAGE, X), {"params": "[0][0]", "total": "[0][1]"}),
    "running loss": (
        _running_loss,
        (PARAMS, STATE, jnp.float32(0.1), X),
        {"params": "[0][0]", "state": "[0][1]", "mean": "[0][2]"},
    ),
    "norm of the update": (_norm_of_the_update, (PARAMS, jnp.float32(0.1), X), {"params": "[0][0]"}),
    "dict of reconstructions": (_dict_of_reconstructions, (PARAMS, {"x": X}), {"params": "[0][0]"}),
    "carry": (
        partial(_carry, False),
        (PARAMS, SCALER, {"h": jnp.ones(3)}, X),
        {"params": "[0][0]", "scaler": "[0][1]", "carry": "[0][2]"},
    ),
    "carry without other data": (
        partial(_carry, False, batch=X),
        (PARAMS, SCALER, {"h": jnp.ones(3)}),
        {"params": "[0][0]", "scaler": "[0][1]"},
    ),
    "gated carry": (
        partial(_carry, True),
        (PARAMS, SCALER, {"h": jnp.ones(3)}, X),
        {"params": "[0][0]", "scaler": "[0][1]", "carry": "[0][2]"},
    ),
    "masked labels": (_masked_labels, (PARAMS, X, jnp.zeros(4, jnp.int32)), {"params": "[0][0]"}),
    "learning rate and loss": (_rate, (PARAMS, jnp.float32(0.1), X), {"params": "[0][0]"}),
    "reconstruction": (_reconstruction, (PARAMS, X), {"params": "[0][0]"}),
    "other dtype": (_wider, (HALF, X), {}),
    "part of a dict": (
        _part,
        ({"params": PARAMS, "opt": STATE, "key": KEY}, X),
        {"state['opt']": "[0][0]['opt']", "state['params']": "[0][0]['params']"},
    ),
    "fixed target": (_fixed_target, (PARAMS, AVERAGE, STATE, X), {"params": "[0][0]", "state": "[0][1]"}),
    "fixed target first": (_fixed_target_first, (AVERAGE, PARAMS, STATE, X), {"params": "[0][0]", "state": "[0][1]"}),
    "other order": (_state_first, (PARAMS, STATE, X), {"params": "[0][1]", "state": "[0][0]"}),
    "previous parameters": (_previous, (PARAMS, AVERAGE, X), {"params": "[0][0]", "previous": "[0][1]"}),
    "key and count": (
        _key_and_count,
        (PARAMS, KEY, jnp.int32(0), jnp.float32(0.1), jnp.zeros(4, jnp.int32), X),
        {"params": "[0][0]", "key": "[0][1]", "count": "[0][2]", "rate": "[0][3]"},
    ),
    "lone array": (_array, (jnp.ones((3, 2)), X), {"w": "[0][0]"}),
    "named tuple": (_named_tuple, (PARAMS, STATE, X), {"params": "[0].params", "state": "[0].state"}),
    "dataclass": (_dataclass, (PARAMS, STATE, X), {"params": "[0].params", "state": "[0].state"}),
    "in a field of a dataclass": (
        _dataclass_of_average,
        (PARAMS, AVERAGE, X),
        {"params": "[0].params", "average": "[0].grads['average']"},
    ),
    "part of a named tuple": (
        _part_of_a_named_tuple,
        (_Carry(PARAMS, STATE, 3), X),
        {"carry.params": "[0][0]", "carry.state": "[0][1]"},
    ),
    "scan": (_scan, (PARAMS, STATE, X[None]), {"params": "[0][0][0]", "state": "[0][0][1]"}),
    "while": (_while, (PARAMS, jnp.int32(0), X), {"params": "[0][0]", "count": "[0][1]"}),
    "cond": (_gated, (PARAMS, STATE, X), {"params": "[0][2]", "state": "[0][3]"}),
}
DATA = {  # what looks like state, but may be data
    "dict of reconstructions": ["batch"],
    "carry without other data": ["carry"],
    "masked labels": ["labels"],
    "learning rate and loss": ["rate"],
    "norm of the update": ["rate"],
    "reconstruction": ["x"],
}
ONLY_WITH_FLOW = {
    "gradients of a scaled loss first",
    "frozen teacher and gradients",
    "previous gradients",
    "gradients with a penalty first",
    "dual averaging",
    "running loss",
    "dict of reconstructions",
    "carry without other data",
    "average first",
    "dataclass",
    "gradients first",
    "in a field of a dataclass",
    "only gradients",
    "fixed target first",
    "key and count",
    "while",
    "cond",
}


def _matches(call, out, program):
    """Returns the paths of the results, by the names of the arguments."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(out)]
    found = {}
    for match in filter(lambda match: match.is_certain, match_state(call, out, StepDependence(call, out, program))):
        old = jax.tree.leaves(call.arguments)[slice(match.old[0], match.old[-1] + 1)]
        assert [*map(id, old)] == [*map(id, jax.tree.leaves(match.tree))]
        inside = jax.tree_util.tree_leaves_with_path(match.tree)[0][0]
        path = paths[match.new[0]]
        found[match.name] = jax.tree_util.keystr(path[: len(path) - len(inside)])
    return found


@pytest.mark.parametrize(
    "compiled", [jax.jit, pytest.param(lambda step: step, marks=pytest.mark.full)], ids=["jit", "eager"]
)
@pytest.mark.parametrize("name", ROWS)
def test_match_state_finds_what_a_step_returns_of_its_arguments(name, compiled):
    step, args, expected = ROWS[name]
    call = StepCall(compiled(step), args, {})
    out, program = call.trace()
    assert _matches(call, out, program) == expected
    assert [
        match.name for match in match_state(call, out, StepDependence(call, out, program)) if not match.is_certain
    ] == DATA.get(name, [])


WITHOUT_FLOW = [name for name in ROWS if name not in ONLY_WITH_FLOW]


@pytest.mark.parametrize("name", names(WITHOUT_FLOW, only_full={"step", "other dtype"}))
def test_match_state_needs_no_program_where_the_structure_tells(name):
    step, args, expected = ROWS[name]
    call = StepCall(step, args, {})
    assert _matches(call, call.run(call.arguments), None) == expected


def test_match_state_enters_the_pmap_of_jax_before_0_8():
    """Otherwise the gradients, which come first, would be the new parameters."""
    step, args, expected = ROWS["gradients first"]
    call = StepCall(jax.jit(step), args, {})
    out, program = call.trace()
    [eqn] = program.jaxpr.eqns
    eqn = eqn.replace(primitive=core.Primitive("xla_pmap"), params={"call_jaxpr": eqn.params["jaxpr"].jaxpr})
    assert _matches(call, out, program.replace(jaxpr=program.jaxpr.replace(eqns=[eqn]))) == expected


def test_changed_types_omits_an_argument_if_the_result_of_its_structure_belongs_to_another_one():
    other = jax.tree.map(
        lambda p: p.astype(jnp.float16), PARAMS
    )  # a generator, as a step of the discriminator receives it

    def step(params, other, batch):
        loss = _loss(params, batch) + sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(other))
        return jax.tree.map(lambda p: p / (2 + loss), params), loss

    call = StepCall(step, (PARAMS, other, X), {})
    out, program = call.trace()
    matches = match_state(call, out, StepDependence(call, out, program))
    assert [match.name for match in matches] == ["params"]
    assert not list(changed_types(call, out, matches, StepDependence(call, out, program)))
    assert [name for name, _, _ in changed_types(call, out, [], StepDependence(call, out, program))] == [
        "params",
        "other",
    ]


@pytest.mark.full
def test_changed_types_omits_a_batch_beside_results_with_other_shapes():
    def step(params, batch):
        x, y = batch
        loss = _loss(params, x) + jnp.mean(y)
        return jax.tree.map(lambda p: p / (2 + loss), params), (loss, jnp.sqrt(loss))

    call = StepCall(step, (PARAMS, (X, X)), {})
    out, program = call.trace()
    dependence = StepDependence(call, out, program)
    matches = match_state(call, out, dependence)
    assert [match.name for match in matches] == ["params"]
    assert not list(changed_types(call, out, matches, dependence))


def test_match_state_counts_python_numbers_as_arrays():
    @jax.jit
    def step(state, batch):
        return state.apply_gradients(grads=jax.grad(_loss)(state.params, batch)), 0.0

    state = TrainState.create(apply_fn=_loss, params=PARAMS, tx=ADAM)
    assert state.step == 0
    call = StepCall(step, (state, X), {})
    assert _matches(call, *call.trace()) == {"state": "[0][0]"}


@pytest.mark.full
def test_match_state_finds_an_equinox_module_with_functions_as_leaves():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 2, 4, 1, key=KEY)
    state = ADAM.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, batch):
        grads = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(batch) ** 2))(model)
        updates, state = ADAM.update(grads, state)
        return grads, eqx.apply_updates(model, updates), state

    call = StepCall(step, (model, state, X), {})
    assert _matches(call, *call.trace()) == {"model": "[0][1]", "state": "[0][2]"}


class _Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.calls = 0

    def __call__(self, x):
        return self.dropout(self.norm(self.layer(x)))


def _nnx_step(model, optimizer, ema, batch):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2) / model.loss_scale[...])(model)
    optimizer.update(model, grads)
    return loss, optax.incremental_update(nnx.state(model, nnx.Param), ema, 0.1)


def _nnx_arguments():
    model = _Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jmpscale.with_loss_scaling(ADAM), wrt=nnx.Param)
    model.loss_scale = optimizer.opt_state.scaler.loss_scale
    return model, optimizer, nnx.clone(nnx.state(model, nnx.Param))


@pytest.mark.full
@pytest.mark.parametrize(
    "compiled", [nnx.jit, pytest.param(lambda step: step, marks=pytest.mark.full)], ids=["jit", "eager"]
)
def test_step_call_runs_on_copies_of_nnx_objects_and_keeps_their_links(compiled):
    model, optimizer, ema = _nnx_arguments()
    before = nnx.to_pure_dict(nnx.state((model, optimizer)))
    call = StepCall(compiled(_nnx_step), (model, optimizer, ema, X), {})
    assert call.arguments[0].loss_scale is None  # it belongs to the scaler
    scaler = jmpscale.get_scaler(call.arguments[1])
    arguments = [call.arguments[0], jmpscale.replace_scaler(call.arguments[1], scaler._replace(loss_scale=2.0)), ema]
    (loss, _), after = call.run([*arguments, X])
    (other, _), _ = call.run(call.arguments)
    assert loss == other * 2.0**15  # the model has read the other scale, by its link
    assert not jnp.array_equal(after[0].norm.mean, model.norm.mean)
    assert int(after[1].step[...]) == 1
    now = jax.tree.leaves(nnx.to_pure_dict(nnx.state((model, optimizer))))
    assert [*map(id, now)] == [*map(id, jax.tree.leaves(before))]
    out, program = call.trace()
    matches = match_state(call, out, StepDependence(call, out, program))
    assert [match.name for match in matches] == ["model", "optimizer", "ema"]
    leaves = jax.tree.leaves(out)
    for match in matches:
        types = [(leaves[i].shape, leaves[i].dtype) for i in match.new]
        assert types == [(x.shape, x.dtype) for x in jax.tree.leaves(match.tree)]


def _nnx_step_with_returned_state(returned, model, optimizer, batch):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    grads = jax.grad(lambda params: jnp.mean(nnx.merge(graphdef, params, rest)(batch) ** 2))(params)
    optimizer.update(model, grads)
    return returned(model, optimizer, grads)


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (lambda model, optimizer, grads: (nnx.state((model, optimizer)), 0.0), ["model", "optimizer"]),
        (lambda model, optimizer, grads: (grads, nnx.state(optimizer), nnx.state(model)), ["model", "optimizer"]),
        (lambda model, optimizer, grads: nnx.to_pure_dict(nnx.state((model, optimizer))), ["model", "optimizer"]),
        (lambda model, optimizer, grads: {"params": nnx.state(model, nnx.Param)}, ["model"]),
        (lambda model, optimizer, grads: grads, []),
    ],
)
def test_match_state_finds_the_returned_state_of_nnx_objects_that_jax_jit_copies(returned, names):
    """Under `jax.jit`, objects are copied, so the objects of the caller come back unchanged."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    call = StepCall(jax.jit(partial(_nnx_step_with_returned_state, returned)), (model, optimizer, X), {})
    out, program = call.trace()
    matches = match_state(call, out, StepDependence(call, out, program))
    assert [match.name for match in matches] == names
    after = jax.tree.leaves(out)
    for match in matches:
        assert [x.shape for x in jax.tree.leaves(match.tree)] == [after[i].shape for i in match.new]
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(match.tree)]
        assert len(paths) == (6 if match.name == "optimizer" else 2)


@pytest.mark.parametrize(
    ("step", "args", "kwargs", "names"),
    [
        (_step, (1, 2), {"batch": 3}, ["params", "state", "batch"]),
        (jax.jit(_step), (1, 2, 3), {}, ["params", "state", "batch"]),
        (SimpleNamespace(method=_step).method, (1, 2, 3), {}, ["params", "state", "batch"]),
        (
            lambda state, *batch, **options: None,
            (1, 2, 3),
            {"rate": 4},
            ["state", "batch[0]", "batch[1]", "rate"],
        ),
        (partial(_step, batch=X), (1, 2), {}, ["params", "state"]),
        (max, (1, 2), {}, ["args[0]", "args[1]"]),
    ],
)
def test_step_call_names_the_arguments_as_the_step_does(step, args, kwargs, names):
    assert StepCall(step, args, kwargs).names == names
