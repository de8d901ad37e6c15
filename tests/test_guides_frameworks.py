"""The guides on frameworks: their examples train as in float32, skip what they say they skip, and compile once."""

import contextlib
import functools
import logging
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jmpscale
from jmpscale.testing import assert_step_is_noop

import pages

# Equinox reads names that JAX 0.7 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:jax.interpreters.batching:DeprecationWarning")


class Example(NamedTuple):
    """One example, and what its page says of it: expressions and a statement in the names that it uses."""

    page: str
    heading: str
    kept: str  # what a skipped step leaves as it was
    moving: tuple[str, ...] = ()  # what moves on
    scaler: str = "scaler"
    set_scaler: str = "scaler = new"
    sees_the_loss: bool = True


LINEN = Example("linen", "Functional step", "state, batch_stats")
LINEN_IN_OPTAX = Example(
    "linen",
    "Inside the optimizer",
    "state.params, state.opt_state.inner_state",
    ("state.step", "batch_stats"),
    "jmpscale.get_scaler(state)",
    "state = jmpscale.replace_scaler(state, new)",
    sees_the_loss=False,
)
NNX = Example("nnx", "In place", "nnx.state((model, optimizer))")
NNX_SPLIT = Example("nnx", "As a function of the state", "state")
NNX_IN_OPTAX = Example(
    "nnx",
    "Inside the optimizer",
    "nnx.state(model, nnx.Param), optimizer.opt_state.inner_state",
    ("optimizer.step", "nnx.state(model, nnx.BatchStat)", "nnx.state(model, nnx.RngState)"),
    "jmpscale.get_scaler(optimizer.opt_state)",
    "optimizer.opt_state = jmpscale.replace_scaler(optimizer.opt_state, new)",
)
EQUINOX = Example("equinox", "Functional step", "model, opt_state")
EQUINOX_NORM = Example("equinox", "Batch normalisation, with eqx.partition", "params, state, opt_state")
EQUINOX_IN_OPTAX = Example(
    "equinox",
    "Inside the optimizer",
    "model, opt_state.inner_state",
    (),
    "jmpscale.get_scaler(opt_state)",
    "opt_state = jmpscale.replace_scaler(opt_state, new)",
)
HAIKU = Example("haiku", "Functional step", "params, state, opt_state, key")
JAX = Example("jax", "One step", "params, momentum")
JAX_SCAN = Example("jax", "Many steps in a scan", "carry[:2]", (), "carry[2]", "carry = (*carry[:2], new)")
ONE_STEP = [
    *(LINEN, LINEN_IN_OPTAX, NNX, NNX_SPLIT, NNX_IN_OPTAX),
    *(EQUINOX, EQUINOX_NORM, EQUINOX_IN_OPTAX, HAIKU, JAX),
]


def _source(example):
    return pages.examples(f"guides/{example.page}")[example.heading]


def _call(example):
    """Returns the statement inside the example's loop, which takes one step."""
    return re.search(r"^for .*:\n +(.*\))$", _source(example), flags=re.MULTILINE)[1]


def _name(example):
    return "train_epoch" if example is JAX_SCAN else "train_step"


class _Compilations(logging.Handler):
    """Counts how often JAX says that it compiles a function of this name."""

    def __init__(self, name):
        super().__init__()
        self.message, self.count = re.compile(rf"Compiling (jit\()?{name}\b"), 0

    def emit(self, record):
        self.count += bool(self.message.match(record.getMessage()))

    @contextlib.contextmanager
    def watch(self):
        logging.getLogger("jax").addHandler(self)
        try:
            with jax.log_compiles():
                yield
        finally:
            logging.getLogger("jax").removeHandler(self)


def _copy(tree):
    """Copies the arrays of a tree, since examples may donate them, or have done so."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) and not x.is_deleted() else x, tree)


class Program:
    """A copy of an example that has run to its end, to go on from there; the compiled functions are shared."""

    def __init__(self, example, names, compilations):
        self.example, self.compilations = example, compilations
        self.names = {name: x if name.startswith("__") else _copy(x) for name, x in names.items()}

    def read(self, expression):
        return eval(expression, self.names)

    def kept(self):
        return _copy(self.read(self.example.kept))

    @property
    def scaler(self):
        return self.read(self.example.scaler)

    def set_loss_scale(self, value):
        self.names["new"] = self.scaler._replace(loss_scale=jnp.float32(value))
        exec(self.example.set_scaler, self.names)

    def step(self):
        with self.compilations.watch():
            exec(_call(self.example), self.names)
        return self.scaler

    def step_that_overflows_forward(self):
        batch = self.names["batch"]
        self.names["batch"] = 1e6 * batch[0], batch[1]
        scaler = self.step()
        self.names["batch"] = batch
        assert not jnp.isfinite(self.names["loss"])
        return scaler


@pytest.fixture(scope="module", autouse=True)
def _silent_promotion():
    """Allows what optax and the frameworks rely on for the whole module, since examples outlive a test."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@functools.cache
def _run(example):
    compilations = _Compilations(_name(example))
    with compilations.watch():
        names = pages.run(f"guides/{example.page}", example.heading)
    return names, compilations


@pytest.fixture(scope="module")
def ran(request):
    """For the whole module, so that pytest keeps the tests of one example together, and one process runs it once."""
    return request.param, *_run(request.param)


@pytest.fixture
def program(ran):
    return Program(*ran)


def each(*examples):
    return pytest.mark.parametrize("ran", examples, ids=[f"{x.page}: {x.heading}" for x in examples], indirect=True)


# --- the same in float32, without jmpscale: each framework's own train step ---


def _linen(names):
    @jax.jit
    def step(state, batch_stats):
        key = jax.random.fold_in(names["dropout_key"], state.step)
        loss_and_grads = jax.value_and_grad(names["loss_fn"], has_aux=True)
        (loss, batch_stats), grads = loss_and_grads(state.params, batch_stats, key, names["batch"])
        return state.apply_gradients(grads=grads), batch_stats, loss

    return step, (names["state"], names["batch_stats"])


def _nnx(names):
    model, optimizer = names["model"], names["optimizer"]

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(names["loss_fn"])(model, names["batch"])
        optimizer.update(model, grads)
        return loss

    return lambda: (step(model, optimizer),), ()


def _equinox(names):
    eqx, tx = names["eqx"], names["tx"]

    @eqx.filter_jit
    def step(model, opt_state):
        loss, grads = eqx.filter_value_and_grad(names["loss_fn"])(model, names["batch"])
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    return step, (names["model"], names["opt_state"])


def _equinox_norm(names):
    @jax.jit
    def step(params, state, opt_state):
        loss_and_grads = jax.value_and_grad(names["loss_fn"], has_aux=True)
        (loss, state), grads = loss_and_grads(params, state, names["batch"])
        updates, opt_state = names["tx"].update(grads, opt_state)
        return optax.apply_updates(params, updates), state, opt_state, loss

    return step, (names["params"], names["state"], names["opt_state"])


def _haiku(names):
    @jax.jit
    def step(params, state, opt_state, key):
        now, key = jax.random.split(key)
        loss_and_grads = jax.value_and_grad(names["loss_fn"], has_aux=True)
        (loss, state), grads = loss_and_grads(params, state, now, names["batch"])
        updates, opt_state = names["tx"].update(grads, opt_state)
        return optax.apply_updates(params, updates), state, opt_state, key, loss

    return step, (names["params"], names["state"], names["opt_state"], names["key"])


def _jax(names):
    tx = optax.sgd(0.02, momentum=0.9)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(names["loss_fn"])(params, names["batch"])
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (names["params"], tx.init(names["params"]))


@functools.cache
def _float32_losses(functional, own_step):
    """Returns the losses of 220 steps of the example's model in float32, taken with the framework's own step."""
    names = {"__name__": "float32"}
    exec(_source(functional).split("\nfor ")[0].replace("float16", "float32"), names)
    step, carry = own_step(names)
    losses = []
    for _ in range(220):
        *carry, loss = step(*carry)
        losses.append(float(loss))
    return losses


IN_FLOAT32 = {
    **dict.fromkeys([LINEN, LINEN_IN_OPTAX], (LINEN, _linen)),
    **dict.fromkeys([NNX, NNX_SPLIT, NNX_IN_OPTAX], (NNX, _nnx)),
    **dict.fromkeys([EQUINOX, EQUINOX_IN_OPTAX], (EQUINOX, _equinox)),
    EQUINOX_NORM: (EQUINOX_NORM, _equinox_norm),
    HAIKU: (HAIKU, _haiku),
    JAX: (JAX, _jax),
}


# --- every example ---


@each(*ONE_STEP)
def test_it_trains_to_the_float32_result(program):
    expected = _float32_losses(*IN_FLOAT32[program.example])
    losses = []
    for _ in range(20):
        program.step()
        losses.append(float(program.names["loss"]))
    # The mean, since a step skipped in float16 may shift the dropout masks by one step.
    np.testing.assert_allclose(np.mean(losses), np.mean(expected[-20:]), rtol=0.05)
    assert np.mean(losses) < 0.5 * expected[0]


@each(*ONE_STEP)
def test_an_overflow_on_the_way_back_moves_only_what_the_page_says(program):
    program.set_loss_scale(2.0**32)
    before, skipped = program.kept(), int(program.scaler.skipped)
    moving = [_copy(program.read(part)) for part in program.example.moving]
    scaler = program.step()
    assert (int(scaler.skipped), float(scaler.loss_scale), int(scaler.last_skip)) == (skipped + 1, 2.0**31, 1)
    assert jnp.isfinite(program.names["loss"])
    assert_step_is_noop(before, program.kept())
    for part, was in zip(program.example.moving, moving, strict=True):
        assert jmpscale.all_finite(program.read(part))
        with pytest.raises(AssertionError, match="the step changed"):
            assert_step_is_noop(was, program.read(part))


@each(*ONE_STEP)
def test_an_overflow_in_the_forward_pass_moves_only_what_the_page_says(program):
    before, scaler = program.kept(), _copy(program.scaler)
    after = program.step_that_overflows_forward()
    assert_step_is_noop(before, program.kept())
    assert int(after.skipped) == int(scaler.skipped) + 1
    backoff = float(after.loss_scale) / float(scaler.loss_scale)
    assert (int(after.last_skip), backoff) == ((2, 1.0) if program.example.sees_the_loss else (1, 0.5))


@each(*ONE_STEP)
def test_after_an_overflow_the_scale_recovers_and_training_goes_on(program):
    program.set_loss_scale(2.0**32)
    before, skips = program.kept(), 0
    while program.step().skipped_in_a_row:
        skips += 1
        assert skips < 32
        assert_step_is_noop(before, program.kept())
    assert skips >= 5
    assert float(program.scaler.loss_scale) == 2.0 ** (32 - skips)
    assert jmpscale.all_finite(program.kept())
    with pytest.raises(AssertionError, match="the step changed"):
        assert_step_is_noop(before, program.kept())


@each(*ONE_STEP, JAX_SCAN)
def test_it_compiles_once_whether_or_not_steps_are_skipped(program):
    program.step()
    program.set_loss_scale(2.0**32)
    program.step()
    program.step()
    assert program.compilations.count == 1


def test_the_count_of_compilations_sees_a_second_one():
    compilations = _Compilations("train_step")

    @jax.jit
    def train_step(x):
        return x + 1

    with compilations.watch():
        for size in (1, 1, 2):
            train_step(np.ones(size, np.float32))
    assert compilations.count == 2


@each(*ONE_STEP, JAX_SCAN)
def test_it_multiplies_in_float16_and_keeps_float32(program):
    lower = _call(program.example).split(" = ")[1].replace("(", ".lower(", 1)
    products = re.findall(r"stablehlo\.dot_general.*: \((.*)\) ->", program.read(lower).as_text())
    assert len(products) >= 4  # two on the way forward, two or more on the way back
    for operands in products:
        assert re.fullmatch(r"tensor<[0-9x]+xf16>, tensor<[0-9x]+xf16>", operands)
    kept = [x.dtype for x in jax.tree.leaves(program.kept()) if isinstance(x, jax.Array)]
    assert {dtype.name for dtype in kept if jnp.issubdtype(dtype, jnp.inexact)} == {"float32"}


# --- what single pages say ---


@each(LINEN, NNX, NNX_SPLIT, EQUINOX, EQUINOX_NORM, EQUINOX_IN_OPTAX, HAIKU, JAX)
def test_after_a_skip_all_goes_on_as_if_it_had_not_been_random_masks_too(ran):
    skipping, straight = Program(*ran), Program(*ran)
    skipping.step_that_overflows_forward()
    for program in (skipping, straight, skipping, straight):
        program.step()
    assert_step_is_noop(straight.kept(), skipping.kept())


@each(LINEN_IN_OPTAX, NNX_IN_OPTAX)
def test_in_the_optimizer_a_forward_overflow_spoils_batch_statistics_for_good(program):
    program.step_that_overflows_forward()
    for _ in range(2):
        scaler = program.step()
    statistics = program.read("batch_stats" if program.example is LINEN_IN_OPTAX else "nnx.state(model, nnx.BatchStat)")
    assert scaler.skipped_in_a_row == 0
    assert not jmpscale.all_finite(statistics)


def test_linen_calling_the_optimizer_gates_the_rest_too(monkeypatch):
    """The page's edit: the loss tells a failed forward pass from an overflow; step and statistics stay."""
    edit = re.search(r"^```diff\n(.*?)^```", (pages.DOCS / "guides/linen.md").read_text(), flags=re.M | re.S)[1]
    old, new = ("".join(x[1:] for x in edit.splitlines(keepends=True) if x[0] == sign) for sign in "-+")
    source = _source(LINEN_IN_OPTAX)
    assert source.count(old) == 1
    monkeypatch.setattr(pages, "examples", lambda _: {LINEN_IN_OPTAX.heading: source.replace(old, new)})
    gated = LINEN_IN_OPTAX._replace(
        kept="state.params, state.opt_state.inner_state, state.step, batch_stats", moving=(), sees_the_loss=True
    )
    program = Program(gated, *_run(gated))
    assert int(program.names["state"].step) == 200 - int(program.scaler.skipped)
    before = program.kept()
    assert program.step_that_overflows_forward().last_skip == 2
    assert_step_is_noop(before, program.kept())
    program.set_loss_scale(2.0**32)
    assert program.step().last_skip == 1
    assert_step_is_noop(before, program.kept())
    program.set_loss_scale(2.0**10)
    assert program.step().skipped_in_a_row == 0
    assert int(program.names["state"].step) == int(before[2]) + 1
    for was, now in zip(before, program.kept(), strict=True):
        with pytest.raises(AssertionError, match="the step changed"):
            assert_step_is_noop(was, now)
    assert program.compilations.count == 1


def test_linen_a_train_state_with_batch_statistics_is_one_carry():
    class TrainState(train_state.TrainState):
        batch_stats: dict

    weights, old, moved = {"w": jnp.ones(2)}, {"mean": jnp.zeros(2)}, {"mean": jnp.array([jnp.nan, 1.0])}
    state = TrainState.create(apply_fn=lambda x: x, params=weights, tx=optax.adam(0.1), batch_stats=old)

    @jax.jit
    def train_step(state, finite):
        return jmpscale.apply_if(finite, lambda s: s.apply_gradients(grads=weights, batch_stats=moved), state)

    state = train_step(state, True)
    assert state.step == 1
    np.testing.assert_array_equal(state.batch_stats["mean"], moved["mean"])
    assert_step_is_noop(state, train_step(state, False))


@each(NNX_SPLIT)
def test_nnx_split_into_a_state_runs_in_a_scan(program):
    train_step, batch = program.names["train_step"], program.names["batch"]

    def body(carry, x):
        state, scaler, loss = train_step(*carry, (x, batch[1]))
        return (state, scaler), loss

    bad = jnp.full_like(batch[0], 1e6)
    start = program.names["state"], program.scaler
    (_, scaler), losses = jax.jit(functools.partial(jax.lax.scan, body))(start, jnp.stack([batch[0], bad, batch[0]]))
    assert int(scaler.skipped) == int(program.scaler.skipped) + 1
    assert not jnp.isfinite(losses[1])
    for loss in (losses[0], losses[2]):
        program.step()
        np.testing.assert_allclose(program.names["loss"], loss, rtol=1e-2)


@each(EQUINOX, EQUINOX_IN_OPTAX)
def test_equinox_activation_functions_go_around_the_branch(program):
    functions = [x for x in jax.tree.leaves(program.names["model"]) if callable(x)]
    assert functions
    program.step()
    assert functions == [x for x in jax.tree.leaves(program.names["model"]) if callable(x)]


@each(JAX_SCAN)
def test_in_a_scan_an_overflow_in_the_middle_might_as_well_not_have_been(ran):
    middle, end = Program(*ran), Program(*ran)
    (x, y), bad = middle.names["batches"], jnp.full((1, 64, 8), 1e6)
    middle.names["batches"] = jnp.concatenate([x[:4], bad, x[4:9]]), jnp.concatenate([y[:4], y[:1], y[4:9]])
    end.names["batches"] = jnp.concatenate([x[:9], bad]), jnp.concatenate([y[:9], y[:1]])
    middle.step()
    end.step()
    np.testing.assert_array_equal(jnp.isfinite(middle.names["log"]["loss"]), np.arange(10) != 4)
    np.testing.assert_array_equal(middle.names["log"]["skipped_in_a_row"], np.arange(10) == 4)
    assert_step_is_noop(end.kept(), middle.kept())


@each(JAX_SCAN)
def test_a_scan_trains_like_single_steps_in_float32(program):
    names = {"__name__": "float32"}
    exec(_source(JAX_SCAN).split("\nfor ")[0].replace("float16", "float32"), names)
    params, tx = names["params"], optax.sgd(0.02, momentum=0.9)
    opt_state, (x, y) = tx.init(params), names["batches"]

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(names["loss_fn"])(params, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(21):
        losses = []
        for i in range(10):
            params, opt_state, loss = step(params, opt_state, (x[i], y[i]))
            losses.append(loss)
    program.step()
    np.testing.assert_allclose(program.names["log"]["loss"].mean(), np.mean(losses), rtol=0.05)
