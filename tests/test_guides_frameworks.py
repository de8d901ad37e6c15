"""The guides on frameworks: their examples train as in float32, skip exactly what the page says, and compile once."""

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

import jmpscale
from jmpscale.testing import assert_step_is_noop

import pages

# Equinox reads names that JAX 0.7 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:jax.interpreters.batching:DeprecationWarning")


class Example(NamedTuple):
    """One example, and what its page says about it: expressions and a statement in the names that it uses."""

    page: str
    heading: str
    kept: str  # unchanged by a skipped step
    moving: tuple[str, ...] = ()  # changed by a skipped step
    scaler: str = "scaler"
    set_scaler: str = "scaler = new"
    sees_the_loss: bool = True


LINEN = Example(
    "linen", "Two changed lines",
    "state.params, state.opt_state.inner_state",
    ("state.step",),
    "jmpscale.get_scaler(state)",
    "state = jmpscale.replace_scaler(state, new)",
    sees_the_loss=False,
)  # fmt: skip
LINEN_TOLD = Example(
    "linen", "Telling the optimizer the loss",
    "state.params, state.opt_state.inner_state, state.step",
    (),
    "jmpscale.get_scaler(state)",
    "state = jmpscale.replace_scaler(state, new)",
)  # fmt: skip
LINEN_STATISTICS = Example(
    "linen", "Batch normalisation with the optax wrapper",
    "state.params, state.opt_state.inner_state, state.batch_stats",
    ("state.step",),
    "jmpscale.get_scaler(state)",
    "state = jmpscale.replace_scaler(state, new)",
    sees_the_loss=False,
)  # fmt: skip
LINEN_GATED = Example(
    "linen", "Batch normalisation: a TrainState that holds the scaler",
    "state.params, state.opt_state, state.step, state.batch_stats",
    (),
    "state.scaler",
    "state = state.replace(scaler=new)",
)  # fmt: skip
IN_NNX = "jmpscale.get_scaler(optimizer.opt_state)"
SET_IN_NNX = "optimizer.opt_state = jmpscale.replace_scaler(optimizer.opt_state, new)"
NNX = Example(
    "nnx", "Three changed lines",
    "nnx.state(model, nnx.Param), optimizer.opt_state.inner_state",
    ("optimizer.step", "nnx.state(model, nnx.RngState)"),
    IN_NNX,
    SET_IN_NNX,
)  # fmt: skip
NNX_STATISTICS = Example(
    "nnx", "Batch normalisation with the optax wrapper",
    "nnx.state(model, (nnx.Param, nnx.BatchStat)), optimizer.opt_state.inner_state",
    ("optimizer.step", "nnx.state(model, nnx.RngState)"),
    IN_NNX,
    SET_IN_NNX,
)  # fmt: skip
NNX_GATED = Example("nnx", "Batch normalisation: everything gated", "nnx.state((model, optimizer))")
NNX_STATE = Example(
    "nnx", "nnx.split, jax.jit, and a TrainState that holds the scaler",
    "train_state.state",
    (),
    "train_state.scaler",
    "train_state = train_state.replace(scaler=new)",
)  # fmt: skip
NNX_LORA = Example(
    "nnx", "LoRA and other parts of the parameters",
    "nnx.state(model), optimizer.opt_state.inner_state",
    ("optimizer.step",),
    IN_NNX,
    SET_IN_NNX,
)  # fmt: skip
EQUINOX = Example(
    "equinox", "Three changed lines",
    "model, opt_state.inner_state",
    (),
    "jmpscale.get_scaler(opt_state)",
    "opt_state = jmpscale.replace_scaler(opt_state, new)",
)  # fmt: skip
EQUINOX_GATED = Example("equinox", "Batch normalisation: everything gated", "model, state, opt_state")
HAIKU = Example("haiku", "One step", "params, state, opt_state, key")
JAX = Example("jax", "One step", "params, momentum")
JAX_SCAN = Example("jax", "Many steps in a scan", "params, momentum")
SHORT = [LINEN, NNX, EQUINOX]
GATED = [LINEN_GATED, NNX_GATED, NNX_STATE, EQUINOX_GATED, HAIKU, JAX]
STATISTICS = [LINEN_STATISTICS, NNX_STATISTICS]
ONE_STEP = [*SHORT, *GATED, *STATISTICS, LINEN_TOLD, NNX_LORA]
# Variants: by default one of each kind runs.
IN_CI = [LINEN, LINEN_TOLD, LINEN_STATISTICS, NNX_STATISTICS, NNX_STATE, NNX_LORA, EQUINOX, HAIKU, JAX_SCAN]


def _source(example):
    return pages.examples(f"guides/{example.page}")[example.heading]


def _call(example):
    """Returns the statement inside the example's loop, which runs one step."""
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
    """A copy of an example that has run to its end, to continue from there; the compiled functions are shared."""

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
    cases = [pytest.param(x, marks=[pytest.mark.full] * (x in IN_CI)) for x in examples]
    return pytest.mark.parametrize("ran", cases, ids=[f"{x.page}: {x.heading}" for x in examples], indirect=True)


# --- the diff on a page, and the same in float32, without jmpscale: each framework's own train step ---


def _diff(page, number=0):
    """Returns the lines that a page's diff removes, those that it adds, and how many it adds before the step."""
    text = (pages.DOCS / f"guides/{page}.md").read_text()
    lines = re.findall(r"^```diff\n(.*?)^```", text, flags=re.M | re.S)[number].splitlines()
    step = next((at for at, line in enumerate(lines) if line.startswith(" def ")), 0)
    added = [line[1:] for line in lines if line[0] == "+"]
    return [line[1:] for line in lines if line[0] == "-"], added, sum(line[0] == "+" for line in lines[:step])


def _without_jmpscale(example, heading=None):
    """Returns the program with the lines that its page's diff removes, instead of those that it adds."""
    source = pages.examples(f"guides/{example.page}")[heading or example.heading]
    for old, new in zip(*_diff(example.page)[:2], strict=True):
        assert source.count("\n" + new) == 1, f"{example.page}: the program lacks {new!r}"
        source = re.sub(re.escape("\n" + new) + ".*", lambda _, old=old: "\n" + old, source)
    return source


@pytest.mark.parametrize("example", [*SHORT, Example("optax", "Clipping", "")], ids=lambda x: x.page)
def test_at_most_three_lines_of_the_step_change_and_none_is_added(example):
    """Each added line is a line of the program; with the removed ones instead it is a program without jmpscale."""
    old, new, before_the_step = _diff(example.page)
    assert len(old) == len(new)
    assert 1 <= len(new) - before_the_step <= 3
    assert before_the_step == 1, "where the optimizer is created"
    step = re.search(r"^def train_step.*?\n\n", _without_jmpscale(example), flags=re.M | re.S)[0]
    assert "jmpscale" not in step


def _short(example, clipped=True):
    def own_step(names):
        del names
        source = _without_jmpscale(example).split("\nfor ")[0].replace("float16", "float32")
        if clipped:  # as `max_norm` does
            tx = "optax.adamw(1e-2)"
            source = source.replace(tx, f"optax.chain(optax.clip_by_global_norm(1.0), {tx})")
        exec(source, mine := {"__name__": "float32"})
        call = compile(_call(example), "the step", "exec")

        def step():
            exec(call, mine)
            return (mine["loss"],)

        return step, ()

    return own_step


def _linen(names):
    @jax.jit
    def step(state):
        key = jax.random.fold_in(names["dropout_key"], state.step)
        loss_and_grads = jax.value_and_grad(names["loss_fn"], has_aux=True)
        (loss, batch_stats), grads = loss_and_grads(state.params, state.batch_stats, key, names["batch"])
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    return step, (names["state"],)


def _nnx(names):
    model, optimizer = names["model"], names["optimizer"]

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(names["loss_fn"])(model, names["batch"])
        optimizer.update(model, grads)
        return loss

    return lambda: (step(model, optimizer),), ()


def _equinox_norm(names):
    eqx, tx = names["eqx"], names["tx"]

    @eqx.filter_jit
    def step(model, state, opt_state):
        loss_and_grads = eqx.filter_value_and_grad(names["loss_fn"], has_aux=True)
        (loss, state), grads = loss_and_grads(model, state, names["batch"])
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, opt_state, loss

    return step, (names["model"], names["state"], names["opt_state"])


def _haiku(names):
    @jax.jit
    def step(params, state, opt_state, key):
        now, key = jax.random.split(key)
        loss_and_grads = jax.value_and_grad(names["loss_fn"], has_aux=True)
        (loss, state), grads = loss_and_grads(params, state, now, names["batch"])
        updates, opt_state = names["tx"].update(grads, opt_state, params)
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
    """Returns the losses of 220 steps of the example's model in float32, with the framework's own step."""
    names = {"__name__": "float32"}
    exec(_source(functional).split("\nfor ")[0].replace("float16", "float32"), names)
    step, carry = own_step(names)
    losses = []
    for _ in range(220):
        *carry, loss = step(*carry)
        losses.append(float(loss))
    return losses


IN_FLOAT32 = {
    **{example: (example, _short(example)) for example in SHORT},
    LINEN_TOLD: (LINEN, _short(LINEN)),
    LINEN_STATISTICS: (LINEN_GATED, _linen),
    LINEN_GATED: (LINEN_GATED, _linen),
    NNX_STATISTICS: (NNX_GATED, _nnx),
    NNX_GATED: (NNX_GATED, _nnx),
    NNX_STATE: (NNX, _short(NNX, clipped=False)),
    EQUINOX_GATED: (EQUINOX_GATED, _equinox_norm),
    HAIKU: (HAIKU, _haiku),
    JAX: (JAX, _jax),
}


# --- every example ---


@pytest.mark.full
@each(*IN_FLOAT32)
def test_it_trains_to_the_float32_result(program):
    expected = _float32_losses(*IN_FLOAT32[program.example])
    losses = []
    for _ in range(20):
        program.step()
        losses.append(float(program.names["loss"]))
    # The mean, since a step skipped in float16 may shift the dropout masks by one step.
    np.testing.assert_allclose(np.mean(losses), np.mean(expected[-20:]), rtol=0.05, atol=0.02 * expected[0])
    assert np.mean(losses) < 0.5 * expected[0]


@each(*ONE_STEP)
def test_an_overflow_in_the_backward_pass_changes_only_what_the_page_says(program):
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
def test_an_overflow_in_the_forward_pass_changes_only_what_the_page_says(program):
    before, scaler = program.kept(), _copy(program.scaler)
    after = program.step_that_overflows_forward()
    assert_step_is_noop(before, program.kept())
    assert int(after.skipped) == int(scaler.skipped) + 1
    backoff = float(after.loss_scale) / float(scaler.loss_scale)
    assert (int(after.last_skip), backoff) == ((2, 1.0) if program.example.sees_the_loss else (1, 0.5))


@each(*ONE_STEP)
def test_after_an_overflow_the_scale_recovers_and_training_continues(program):
    program.set_loss_scale(2.0**32)
    before, skips = program.kept(), 0
    while program.step().consecutive_skips:
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
    assert len(products) >= 4  # two in the forward pass, two or more in the backward pass
    for operands in products:
        assert re.fullmatch(r"tensor<[0-9x]+xf16>, tensor<[0-9x]+xf16>", operands)
    kept = [x.dtype for x in jax.tree.leaves(program.kept()) if isinstance(x, jax.Array)]
    assert {dtype.name for dtype in kept if jnp.issubdtype(dtype, jnp.inexact)} == {"float32"}


# --- what single pages say ---


@each(*GATED, EQUINOX)
def test_after_a_skip_training_continues_as_without_it_random_masks_too(ran):
    skipping, straight = Program(*ran), Program(*ran)
    skipping.step_that_overflows_forward()
    for program in (skipping, straight, skipping, straight):
        program.step()
    assert_step_is_noop(straight.kept(), skipping.kept())


@pytest.mark.full
def test_linen_the_count_of_calls_is_one_line(monkeypatch):
    """The page's second diff: `state.step` counts calls, and everything else is gated as before."""
    (old,), (new,), _ = _diff("linen", 1)
    assert pages.shown("guides/linen")[LINEN_GATED.heading].count(old) == 1
    old, new = (line.strip().removeprefix("return ").removesuffix(", loss") for line in (old, new))
    claims = {"kept": "state.params, state.opt_state, state.batch_stats", "moving": ("state.step",)}
    program = _run_variant(LINEN_GATED, old, new, monkeypatch, **claims)
    assert int(program.names["state"].step) == 200
    before = program.kept()
    program.step_that_overflows_forward()
    assert_step_is_noop(before, program.kept())
    assert int(program.names["state"].step) == 201
    assert program.compilations.count == 1


@each(LINEN_TOLD)
def test_linen_the_step_count_is_that_of_the_applied_steps(program):
    assert int(program.names["state"].step) == 200 - int(program.scaler.skipped)


def _run_variant(example, old, new, monkeypatch, **claims):
    """Runs an example with one expression replaced, as the page suggests or warns against."""
    source = _source(example)
    assert old in source
    with monkeypatch.context() as patch:
        patch.setattr(pages, "examples", lambda _: {example.heading: source.replace(old, new)})
        variant = example._replace(**claims)
        return Program(variant, *_run.__wrapped__(variant))


@pytest.mark.full
@pytest.mark.parametrize(
    ("example", "gated", "ungated", "statistics"),
    [
        (
            LINEN_STATISTICS,
            "jmpscale.apply_if(applied, lambda _: new_stats, state.batch_stats)",
            "new_stats",
            "state.batch_stats",
        ),
        (
            NNX_STATISTICS,
            "jmpscale.apply_if(applied, lambda _: nnx.state(model, nnx.BatchStat), old_stats)",
            "nnx.state(model, nnx.BatchStat)",
            "nnx.state(model, nnx.BatchStat)",
        ),
    ],
    ids=["linen", "nnx"],
)
def test_without_the_gate_batch_statistics_stay_nan_and_the_loss_does_not_show_it(
    example, gated, ungated, statistics, monkeypatch
):
    program = _run_variant(example, gated, ungated, monkeypatch)
    program.step_that_overflows_forward()
    for _ in range(3):
        assert not program.step().consecutive_skips
    assert not jmpscale.all_finite(program.read(statistics))
    assert jnp.isfinite(program.names["loss"])
    assert jmpscale.all_finite(
        program.read("state.params" if example is LINEN_STATISTICS else "nnx.state(model, nnx.Param)")
    )


@pytest.mark.full
def test_nnx_the_gate_of_the_statistics_can_gate_random_streams_too(monkeypatch):
    gated = "nnx.state(model), optimizer.opt_state.inner_state"
    names = {"kept": gated, "moving": ("optimizer.step",)}
    program = _run_variant(NNX_STATISTICS, "nnx.BatchStat", "nnx.Not(nnx.Param)", monkeypatch, **names)
    before = program.kept()
    program.step_that_overflows_forward()
    assert_step_is_noop(before, program.kept())


@pytest.mark.full
@pytest.mark.once
def test_a_bias_before_a_batch_normalisation_gets_nothing_but_rounding_noise():
    """The reason that the pages give for `use_bias=False`."""

    class Net(nnx.Module):
        def __init__(self, dtype):
            rngs = nnx.Rngs(0)
            self.inner = nnx.Linear(8, 64, dtype=dtype, rngs=rngs)
            self.norm, self.outer = nnx.BatchNorm(64, dtype=dtype, rngs=rngs), nnx.Linear(64, 1, dtype=dtype, rngs=rngs)

        def __call__(self, x):
            return self.outer(nnx.relu(self.norm(self.inner(x)))).astype(jnp.float32)

    @nnx.jit
    def share_of_the_bias(model, x):
        grad_fn = jmpscale.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2), transform=nnx.value_and_grad)
        _, grads = grad_fn(jmpscale.static(2.0**10), model)
        share = optax.tree.norm(grads.inner.bias[...]) / optax.tree.norm(grads.inner.kernel[...])
        return share, jmpscale.all_finite(grads)

    x = jax.random.normal(jax.random.key(0), (256, 8))
    (exact, _), (half, finite) = (share_of_the_bias(Net(dtype), x) for dtype in (jnp.float32, jnp.float16))
    assert finite
    assert exact < 1e-5
    assert half > 100 * exact


@each(NNX_STATE)
def test_nnx_a_train_state_runs_in_a_scan(program):
    train_step, batch = program.names["train_step"], program.names["batch"]
    bad = jnp.full_like(batch[0], 1e6)
    xs = jnp.stack([batch[0], bad, batch[0]])
    scan = jax.jit(lambda start, xs: jax.lax.scan(lambda state, x: train_step(state, (x, batch[1])), start, xs))
    train_state, losses = scan(program.names["train_state"], xs)
    assert int(train_state.scaler.skipped) == int(program.scaler.skipped) + 1
    assert not jnp.isfinite(losses[1])
    for loss in (losses[0], losses[2]):
        program.step()
        np.testing.assert_allclose(program.names["loss"], loss, rtol=1e-2)


@each(NNX_LORA)
def test_nnx_lora_changes_nothing_but_its_own_parameters(program):
    before = _copy(nnx.split(program.names["model"], nnx.LoRAParam, ...)[1:])
    program.step()
    after = nnx.split(program.names["model"], nnx.LoRAParam, ...)[1:]
    assert_step_is_noop(before[1], after[1])
    with pytest.raises(AssertionError, match="the step changed"):
        assert_step_is_noop(before[0], after[0])


@pytest.mark.once
@pytest.mark.full
@each(NNX)
def test_nnx_a_model_that_exists_computes_in_float16_and_attention_on_cpu_in_float32(program):
    title = next(title for title in pages.examples("guides/nnx") if title.startswith("Attention: "))
    names = {"Net": program.names["Net"], "nnx": nnx, "jnp": jnp}
    for heading in ("A model that exists already", title):
        exec(pages.shown("guides/nnx")[heading], names)
    model = names["model"]
    assert {model.inner.dtype, model.norm.dtype, model.outer.dtype} == {jnp.float16}
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"float32"}

    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    attention.set_attributes(dtype=jnp.float16)
    x, apply = jnp.ones((1, 4, 8)), nnx.jit(lambda model, x: model(x))
    with pytest.raises(Exception, match=re.escape(re.search('"(.*)"', title)[1])):
        apply(attention, x)
    dropping = nnx.MultiHeadAttention(
        2, 8, decode=False, dropout_rate=0.1, deterministic=False, dtype=jnp.float16, rngs=nnx.Rngs(0)
    )
    assert apply(dropping, x).dtype == jnp.float16
    exec(pages.shown("guides/nnx")[title], {"model": attention, "nnx": nnx, "jnp": jnp})
    assert jnp.isfinite(apply(attention, x)).all()


@each(JAX)
def test_jax_a_skipped_step_counts_as_a_call_only_and_its_loss_is_in_no_sum(program):
    names = program.names
    exec(pages.shown("guides/jax")["Step counts and running sums of metrics"], names)
    assert (int(names["calls"]), int(names["applied"])) == (3, 2)
    assert jnp.isfinite(names["loss_sum"])
    assert names["scaler"].step_applied


@each(EQUINOX, EQUINOX_GATED)
def test_equinox_leaves_that_are_not_arrays_bypass_the_gate(program):
    others = [x for x in jax.tree.leaves(program.names["model"]) if not isinstance(x, jax.Array)]
    assert others
    program.step()
    after = [x for x in jax.tree.leaves(program.names["model"]) if not isinstance(x, jax.Array)]
    assert all(x is y for x, y in zip(others, after, strict=True))


@each(JAX_SCAN)
def test_in_a_scan_a_batch_that_overflows_makes_no_difference(ran):
    middle, end = Program(*ran), Program(*ran)
    (x, y), bad = middle.names["batches"], jnp.full((1, 64, 8), 1e6)
    middle.names["batches"] = jnp.concatenate([x[:4], bad, x[4:9]]), jnp.concatenate([y[:4], y[:1], y[4:9]])
    end.names["batches"] = jnp.concatenate([x[:9], bad]), jnp.concatenate([y[:9], y[:1]])
    middle.step()
    end.step()
    np.testing.assert_array_equal(jnp.isfinite(middle.names["log"]["loss"]), np.arange(10) != 4)
    np.testing.assert_array_equal(middle.names["log"]["consecutive_skips"], np.arange(10) == 4)
    assert_step_is_noop(end.kept(), middle.kept())


@pytest.mark.full
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
