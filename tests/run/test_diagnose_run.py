"""diagnose_run names what half precision does to a run, is silent about right runs, and changes nothing."""

import dataclasses
import itertools
import sys
import types

import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import jmpscale
from benchmarks.studies import runs
from jmpscale import FindingKind
from jmpscale._run import verdict

import meshes
from arrays import normal
from compiling import count_compilations
from tables import names, rows

pytestmark = pytest.mark.usefixtures("standard_promotion_and_ranks")
B, F, H = jnp.bfloat16, jnp.float32, jnp.float16


def kinds(run):
    return [finding.kind for finding in run.findings]


# --- faults and right runs: benchmarks.studies.runs has their programs, and a record of the results


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    rows(
        {name: row for name, row in runs.FAULTS.items() if row[2]},
        default={"counter in bfloat16"},
    ),
)
def test_diagnose_run_names_what_half_precision_does(fault):
    make, steps, expected = fault
    run, _ = runs.diagnosed(make(), steps)
    found = [name for finding in run.findings for name in finding.names]
    assert (FindingKind.LOST_PROGRESS in kinds(run)) if expected == "result[1]" else (expected in found), run.summary
    assert run.diagnosis is not None
    assert run.summary.endswith(run.diagnosis.summary)


@pytest.mark.full
@pytest.mark.parametrize("name", names(runs.RIGHT, default={"loss scaling in float16"}))
def test_diagnose_run_accuses_no_right_run(name):
    run, _ = runs.diagnosed(runs.RIGHT[name](), runs.STEPS)
    assert run.findings == (), run.summary
    assert run.diagnosis is None


# The study has the late states of all right runs. Those of optimizers that choose their own step sizes differ between
# compilers and CPUs, and from some of them the loss rises in half precision and falls in float32.
LATE = (
    "float32 parameters",
    "Adam, mu in bfloat16",
    "stochastic rounding by noise",
    "Kahan summation",
    "LoRA on a bfloat16 base",
    "average in float32",
    "schedule and decoupled decay",
    "loss scaling in float16",
    "SGD, momentum in bfloat16",
    "MultiSteps",
)


@pytest.mark.full
@pytest.mark.parametrize("name", LATE)
def test_diagnose_run_accuses_no_right_run_late_in_training(name):
    run, _ = runs.diagnosed(runs.late(runs.RIGHT[name]()), runs.STEPS)
    assert run.findings == (), run.summary
    assert run.diagnosis is None


@pytest.mark.full
def test_diagnose_run_finds_an_overflow_that_an_argmax_hides():
    """The loss is finite, some ordinary steps are skipped, and each single step that overflows looks like them."""
    run, _ = runs.diagnosed(runs.transported(), 150)
    assert kinds(run)[0] is FindingKind.LOST_PROGRESS
    assert run.loss[-30:].mean() > 1.5 * run.loss_float32[-30:].mean()
    assert "The forward pass overflows" in run.diagnosis.summary


# --- a program whose results are known


X, Y = normal(0, 64, 8), jnp.sin(normal(0, 64, 8)[:, :1])
BATCH = X, Y
PARAMS = {"a": normal(1, 8, 32) / 3, "b": normal(2, 32, 1) / 6}


def loss_fn(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["a"].astype(F))
    return jnp.mean((hidden @ params["b"].astype(F) - y) ** 2)


def descend(params, batch, rate=2.0**-10):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, grads), loss


HALF = jmpscale.cast(PARAMS, B)
STALLED = "params['a']"


@pytest.mark.full
def test_diagnose_run_returns_the_losses_of_each_step_and_the_changes():
    run = jmpscale.diagnose_run(descend, [BATCH] * 30)(HALF)
    params, expected = jmpscale.cast(HALF, F), []
    for _ in range(30):
        params, loss = jax.jit(descend)(params, BATCH)
        expected.append(float(loss))
    np.testing.assert_allclose(run.loss_float32, expected, rtol=1e-5)
    assert run.loss.shape == run.loss_spread.shape == (30,)
    assert run.loss[0] == pytest.approx(expected[0], rel=1e-5)
    assert np.abs(run.loss_spread - run.loss_float32).max() < 1e-2 * expected[0]
    assert (run.loss_name, run.state, run.skips, run.skips_float32) == ("result[1]", ("params",), 0, 0)
    [stalled] = [change for change in run.changes if change.name == STALLED]
    assert (stalled.dtype, stalled.progress < 0.5, stalled.error > 0.5, stalled.spread < 0.05) == (
        "bfloat16",
        *[True] * 3,
    )
    share = (expected[0] - run.loss[-6:].mean()) / (expected[0] - run.loss_float32[-6:].mean())
    assert run.progress == pytest.approx(share, rel=1e-3)
    [loss, change] = run.findings
    assert (loss.kind, loss.names, loss.lines, loss.dtype) == (FindingKind.LOST_PROGRESS, ("result[1]",), (), None)
    assert loss.error == pytest.approx(1 - run.progress)
    assert (change.kind, change.names[0], change.dtype, change.error_then) == (
        FindingKind.LAGGING,
        STALLED,
        "bfloat16",
        None,
    )
    assert change.error == pytest.approx(1 - stalled.progress)


def test_diagnose_run_summarizes_a_fault_and_a_right_run():
    run = jmpscale.diagnose_run(descend, [BATCH] * 30)(HALF)
    ends = [f"{x[-6:].mean():.4g}" for x in (run.loss, run.loss_float32, run.loss_spread)]
    share, moved = 100 * run.progress, 100 * next(x.progress for x in run.changes if x.name == STALLED)
    assert run.summary.startswith(
        f"In 30 steps the loss falls to {ends[0]}, in float32 to {ends[1]} ({ends[2]} from a start that is rounded "
        f"otherwise): half precision makes {share:.3g}% of the progress. {STALLED}"
    )
    assert f" {moved:.3g}% as far. At step " in run.summary
    right = jmpscale.diagnose_run(descend, [BATCH] * 30)(PARAMS)
    assert right.findings == ()
    assert right.summary.endswith("half precision makes all of the progress.")
    assert right.summary.count(". ") == 0, "a right run has one sentence"


@pytest.mark.full
def test_diagnose_run_compares_a_float32_program_with_itself():
    """All runs have the same batches and random numbers."""

    def step(state, batch):
        key, own = jax.random.split(state["key"])
        x = batch[0] * jax.random.bernoulli(own, 0.5, batch[0].shape)
        params, loss = descend(state["params"], (x, batch[1]), 0.1)
        return {"params": params, "key": key, "n": state["n"] + 1}, {"loss": loss, "zero": loss * 0}

    state = {"params": PARAMS, "key": jax.random.key(0), "n": jnp.int32(0)}
    run = jmpscale.diagnose_run(step, (jax.tree.map(lambda x, i=i: x + i, BATCH) for i in range(10)))(state)
    np.testing.assert_allclose(run.loss, run.loss_float32, rtol=1e-5)
    assert run.loss_name == "result[1]['loss']"
    assert max(change.error for change in run.changes) < 1e-4
    assert {change.name for change in run.changes} == {"state['params']['a']", "state['params']['b']"}


@pytest.mark.full
def test_diagnose_run_diagnoses_the_step_that_loses_a_change():
    """It is neither the first step nor the last one, and a counter in bfloat16 rounds nothing before it."""

    def step(state, batch):
        n = state["n"] + 1
        w = jnp.where(n == 8, (state["w"] + B(1e-3)).astype(B), state["w"])
        params, loss = descend(state["params"], batch)
        return {"params": params, "w": w, "n": n}, loss

    state = {"params": PARAMS, "w": jnp.ones(4, B), "n": jnp.zeros((), B)}
    run = jmpscale.diagnose_run(step, [BATCH] * 12)(state)
    assert [finding.names for finding in run.findings] == [("state['w']",)]
    assert run.worst_step == 7
    assert "At step 7: " in run.summary
    [change] = [change for change in run.diagnosis.changes if change.name == "state['w']"]
    assert change.error == pytest.approx(1.0)


# --- the state


def test_diagnose_run_leaves_the_state_of_the_caller_unchanged():
    donating = jax.jit(descend, donate_argnums=0)
    params = jax.tree.map(jnp.copy, HALF)
    jmpscale.diagnose_run(donating, [BATCH] * 3)(params)
    chex.assert_trees_all_equal(params, HALF)


@pytest.mark.full
def test_diagnose_run_takes_python_numbers_of_the_state():
    """A train state of Flax begins with `step=0`, and tests of Python read a number that does not change."""
    model = linen.Dense(1)
    variables = model.init(jax.random.key(0), X)
    train_state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2))

    def step(state, flags, batch):
        def loss_fn(params):
            return jnp.mean((state.apply_fn({"params": params}, batch[0].astype(B)) - batch[1]).astype(F) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        if flags["negate"]:
            loss = -loss
        return state.apply_gradients(grads=grads), loss

    run = jmpscale.diagnose_run(step, [BATCH] * 5)(train_state, {"negate": False})
    assert (run.state, run.findings) == (("state",), ())
    assert run.loss[4] < run.loss[0]


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.dense = nnx.Linear(8, 1, rngs=rngs, param_dtype=B)
        self.seen = nnx.Variable(jnp.zeros((), B))

    def __call__(self, x):
        self.seen[...] = self.seen[...] + B(64)
        return self.dense(self.dropout(self.norm(x)))


@pytest.mark.full
def test_diagnose_run_feeds_objects_of_nnx_back():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    before = nnx.state((model, optimizer))

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(batch[0]) - batch[1]).astype(F) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    run = jmpscale.diagnose_run(step, [BATCH] * 400)(model, optimizer)
    assert run.loss_float32[-1] < 0.9 * run.loss_float32[0]
    names = [name for finding in run.findings for name in finding.names]
    assert "model.seen.value" in names or "model.seen" in names, names
    assert run.diagnosis.changes
    chex.assert_trees_all_equal(nnx.to_pure_dict(before), nnx.to_pure_dict(nnx.state((model, optimizer))))


@pytest.mark.full
def test_diagnose_run_runs_equinox_and_haiku():
    layer = eqx.nn.MLP(8, 1, 16, 1, key=jax.random.key(0))
    tx = optax.adam(1e-2)

    @eqx.filter_jit
    def equinox_step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(batch[0]) - batch[1]) ** 2))(model)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    transformed = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(1)(x.astype(B)).astype(F)))

    def haiku_step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((transformed.apply(p, batch[0]) - batch[1]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    run = jmpscale.diagnose_run(equinox_step, [BATCH] * 5)(layer, tx.init(eqx.filter(layer, eqx.is_array)))
    assert (run.findings, run.state) == ((), ("model", "opt_state"))
    run = jmpscale.diagnose_run(haiku_step, [BATCH] * 5)(transformed.init(jax.random.key(0), X))
    assert (run.findings, run.state) == ((), ("params",))
    assert run.loss[4] < run.loss[0]


@pytest.mark.full
def test_diagnose_run_names_arguments_that_do_not_come_back():
    def step(params, teacher, batch):
        return descend(params, (batch[0], batch[0] @ teacher), 0.1)

    run = jmpscale.diagnose_run(step, [BATCH] * 5)(PARAMS, normal(3, 8, 1))
    assert run.state == ("params",)
    assert run.summary.endswith("The step does not return teacher, which keeps its value.")


# --- scalers


@pytest.mark.full
def test_diagnose_run_gives_each_run_a_scaler_of_its_own():
    run, _ = runs.diagnosed(runs.scaled(), 12)
    assert (run.skips, run.skips_float32) == (4, 0)
    assert "4 steps are skipped, 0 in float32." in run.summary
    assert not any("scaler" in change.name for change in run.changes)


@pytest.mark.full
def test_diagnose_run_counts_only_the_skips_of_the_run():
    step, state = runs.scaled()
    skipped = jax.tree.map(
        lambda x: x._replace(total_skips=jnp.int32(7)) if isinstance(x, jmpscale.ScalerState) else x,
        state,
        is_leaf=lambda x: isinstance(x, jmpscale.ScalerState),
    )
    run, _ = runs.diagnosed((step, skipped), 12)
    assert (run.skips, run.skips_float32) == (4, 0)


# --- batches


def test_diagnose_run_uses_each_batch_once():
    taken = []

    def batches():
        for i in range(4):
            taken.append(i)
            yield BATCH

    run = jmpscale.diagnose_run(descend, batches())(PARAMS)
    assert (taken, len(run.loss)) == ([0, 1, 2, 3], 4)


@pytest.mark.full
def test_diagnose_run_compiles_a_smaller_last_batch():
    small = X[:5], Y[:5]
    run = jmpscale.diagnose_run(descend, [BATCH, BATCH, small])(PARAMS)
    assert run.loss[2] == pytest.approx(float(loss_fn(PARAMS, small)), rel=0.1)


def test_diagnose_run_takes_numbers_in_batches():
    """They are arrays, as under `jax.jit`, so that the step is traced once."""
    traced = []

    def step(params, batch):
        traced.append(1)
        x, y, rate = batch
        return descend(params, (x, y), rate)

    run = jmpscale.diagnose_run(step, [(X, Y, 0.1 / (i + 1)) for i in range(5)])(PARAMS)
    assert (len(traced), run.findings) == (1, ())


def test_diagnose_run_traces_once_and_compiles_each_form_once():
    traced = []

    def step(params, batch):
        traced.append(1)
        return descend(params, batch)

    def compilations(steps):
        with count_compilations() as programs:
            jmpscale.diagnose_run(step, [BATCH] * steps)(PARAMS)
        return len(programs)

    compilations(1)  # also compiles what all runs have in common
    traced.clear()
    assert compilations(2) == compilations(7)
    assert len(traced) == 2


# --- devices


@pytest.mark.full
def test_diagnose_run_runs_where_the_arguments_are():
    mesh = meshes.make_mesh(data=4, model=2)
    rows_, columns = jax.NamedSharding(mesh, jax.P("data")), jax.NamedSharding(mesh, jax.P(None, "model"))
    batch = jax.device_put(BATCH, rows_)
    params = jax.device_put(HALF, {"a": columns, "b": jax.NamedSharding(mesh, jax.P("model"))})
    run = jmpscale.diagnose_run(jax.jit(descend), [batch] * 12)(params)
    expected = jmpscale.diagnose_run(descend, [BATCH] * 12)(HALF)
    np.testing.assert_allclose(run.loss_float32, expected.loss_float32, rtol=1e-4)
    assert kinds(run) == kinds(expected)


@pytest.mark.full
def test_diagnose_run_runs_on_an_explicit_mesh():
    mesh = meshes.make_mesh(AxisType.Explicit, data=4)
    with jax.set_mesh(mesh):
        batch = jax.device_put(BATCH, jax.P("data"))
        params = jax.device_put(PARAMS, jax.P())
        run = jmpscale.diagnose_run(descend, [batch] * 5)(params)
    assert run.findings == ()
    with pytest.raises(ValueError, match="must be used in the context of its mesh"):
        jmpscale.diagnose_run(descend, [BATCH])(params)


@pytest.mark.full
def test_diagnose_run_runs_shard_map():
    mesh = meshes.make_mesh(d=4)

    def shard_step(params, batch):
        params, loss = descend(params, batch)
        return params, jax.lax.pmean(loss, "d")

    step = jax.shard_map(
        shard_step, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=(jax.P(), jax.P()), check_vma=False
    )
    run = jmpscale.diagnose_run(step, [BATCH] * 12)(HALF)
    assert FindingKind.LAGGING in kinds(run)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The function .* includes a pmap")
def test_diagnose_run_runs_pmap():
    """Each device has a copy of the parameters, and a loss."""
    meshes.require_devices(2)

    def device_step(params, scaler, batch):
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, batch)
        loss, grads = jax.lax.pmean((loss, grads), "d")
        finite = jmpscale.all_finite(grads, axis_name="d")
        new = jax.tree.map(lambda p, g: (p - 1e-3 * g).astype(p.dtype), params, grads)
        return (
            jmpscale.select_tree(finite, new, params),
            jmpscale.update(scaler, finite, loss=loss, axis_name="d"),
            loss,
        )

    def stacked(tree):
        return jax.tree.map(lambda x: jnp.stack([x] * 2), tree)

    step = jax.pmap(device_step, axis_name="d", devices=jax.devices()[:2])
    batch = jax.tree.map(lambda x: x.reshape(2, 32, *x.shape[1:]), BATCH)
    run = jmpscale.diagnose_run(step, [batch] * 12)(stacked(HALF), stacked(jmpscale.dynamic(2.0**4)))
    assert (run.loss_name, run.loss.shape, run.state) == ("result[2]", (12,), ("params", "scaler"))
    assert STALLED in [name for finding in run.findings for name in finding.names]


# --- runs that cannot be judged by a loss


def test_diagnose_run_judges_by_the_state_if_the_step_returns_no_loss():
    run = jmpscale.diagnose_run(lambda params, batch: descend(params, batch)[0], [BATCH] * 12)(HALF)
    assert (run.loss, run.loss_name, run.progress) == (None, None, None)
    assert kinds(run) == [FindingKind.LAGGING]
    assert run.summary.startswith(
        "In 12 steps, the run does not change its state as float32 does; the step returns no loss."
    )


@pytest.mark.full
def test_diagnose_run_names_what_is_finite_only_in_float32():
    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((w.astype(H) * H(100)).astype(F)))(params)
        return params * 4 - grads * 0, loss

    run = jmpscale.diagnose_run(step, [BATCH] * 12)(jnp.ones(3))
    assert kinds(run)[0] is FindingKind.NOT_FINITE
    assert run.findings[0].names[0] == "result[1]"
    assert run.summary.startswith("In 12 steps the loss becomes infinite or NaN, at step 5; in float32 it ends at ")
    run = jmpscale.diagnose_run(lambda w, _: (w * 1e10, jax.value_and_grad(jnp.sum)(w)[0]), [BATCH] * 12)(jnp.ones(3))
    assert run.findings == ()
    assert run.summary.startswith("In 12 steps the loss becomes infinite or NaN in float32, too, at step 4")


def test_diagnose_run_says_if_float32_makes_no_progress():
    run = jmpscale.diagnose_run(lambda p, batch: descend(p, batch, 0.0), [BATCH] * 5)(HALF)
    assert (run.progress, run.findings) == (None, ())
    assert run.summary.startswith("In 5 steps the loss makes no clear progress in float32, from ")


@pytest.mark.full
def test_diagnose_run_accuses_no_chaotic_run():
    def step(x, batch):
        half = x.astype(B).astype(F)
        loss = jax.value_and_grad(lambda x: jnp.mean(x))(half)[0]
        return 3.9 * half * (1 - half), loss

    assert jmpscale.diagnose_run(step, [BATCH] * 100)(jnp.linspace(0.1, 0.9, 200)).findings == ()


# --- the verdict


def measured(written, float32, otherwise=None, nearby=np.nan):
    """Returns what a run of 100 steps has shown, given how the losses fall from 1."""
    fall = np.linspace(0, 1, 100)
    losses = np.stack([1 - x * fall for x in (written, float32, float32 if otherwise is None else otherwise)])
    traced = types.SimpleNamespace(loss=(0, "loss"))
    return types.SimpleNamespace(traced=traced, losses=losses, loss_nearby=nearby, leaves=[])


LOSSES = {  # how the losses fall, and whether the loss is accused
    "half of the progress": (measured(0.4, 0.8), True),
    "nearly all": (measured(0.78, 0.8), False),
    "more": (measured(0.9, 0.8), False),
    "as far apart as two runs in float32": (measured(0.6, 0.8, 0.7), False),
    "further apart than two runs in float32": (measured(0.6, 0.8, 0.79), True),
    "near a minimum": (measured(0.8, 0.9, nearby=10.0), False),
    "infinite after a change of the state": (measured(0.4, 0.8, nearby=np.inf), True),
    "no progress": (measured(0.0, 0.0), False),
    "no progress, and worse": (measured(-0.5, 0.0), True),
    "less than the same loss": (measured(0.001, 0.005), False),
}


NOT_FINITE = {  # the losses at the end as written, in float32, and from another start, and whether the loss is accused
    "as written": ((np.nan, 0.5, 0.5), True),
    "in all runs": ((np.nan, np.nan, np.nan), False),
    "from another start": ((0.5, 0.5, np.inf), False),
    "one step, which may be skipped": ((0.5, 0.5, 0.5), False),
}


@pytest.mark.parametrize("row", rows(NOT_FINITE))
def test_verdict_accuses_a_loss_that_is_finite_only_in_float32(row):
    ends, is_wrong = row
    given = measured(0.5, 0.5)
    for i, end in enumerate(ends):
        given.losses[i, 80:] = end
    given.losses[0, -1] = np.inf
    found = verdict.find_wrong(given, verdict.measure_losses(given))
    assert [x.kind for x in found] == [FindingKind.NOT_FINITE] * is_wrong


@pytest.mark.parametrize("row", rows(LOSSES))
def test_verdict_compares_the_progress_of_the_losses(row):
    given, is_wrong = row
    assert bool(verdict.find_wrong(given, verdict.measure_losses(given))) == is_wrong


# --- errors and the progress bar


ERRORS = {
    "step": (lambda: jmpscale.diagnose_run(3, [BATCH]), TypeError, "step must be the training step, got 3"),
    "batches": (lambda: jmpscale.diagnose_run(descend, 3), TypeError, "batches must be an iterable .* got 3. Pass"),
    "no batch": (lambda: jmpscale.diagnose_run(descend, [])(PARAMS), ValueError, "a batch for each step, got none"),
    "structure": (
        lambda: jmpscale.diagnose_run(descend, [BATCH, [X, Y]])(PARAMS),
        ValueError,
        r"batches must have one structure, got .* as batch 1, and .* Convert it",
    ),
    "call": (
        lambda: jmpscale.diagnose_run(lambda params, x, y: descend(params, (x, y)), [BATCH])(PARAMS),
        TypeError,
        r"step must accept \(\*state, batch\).*train_step\(params, \*batch\)",
    ),
    "no state": (
        lambda: jmpscale.diagnose_run(lambda params, batch: loss_fn(params, batch), [BATCH])(PARAMS),
        TypeError,
        r"step must return its state, got float32\[\], of which no part has the types of one",
    ),
    "abstract": (
        lambda: jmpscale.diagnose_run(descend, [BATCH])(jax.eval_shape(lambda: PARAMS)),
        TypeError,
        "Call diagnose_run outside of jax.jit",
    ),
}


@pytest.mark.parametrize("row", rows(ERRORS))
def test_diagnose_run_names_the_mistake_of_a_call(row):
    call, error, message = row
    with pytest.raises(error, match=message):
        call()


def test_diagnose_run_explains_an_error_of_a_step_that_it_traces():
    def step(params, batch):
        params, loss = descend(params, batch)
        print(f"{loss:.3f}")
        return params, loss

    with pytest.raises(TypeError) as caught:
        jmpscale.diagnose_run(step, [BATCH])(PARAMS)
    assert "diagnose_run traces the step, as jax.jit does" in "".join(caught.value.__notes__)


def test_diagnose_run_shows_a_progress_bar_on_a_terminal(monkeypatch):
    shown = []
    tqdm = types.SimpleNamespace(tqdm=lambda batches, **options: shown.append(options["desc"]) or batches)
    monkeypatch.setitem(sys.modules, "tqdm", tqdm)
    jmpscale.diagnose_run(descend, [BATCH])(PARAMS)
    assert shown == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    jmpscale.diagnose_run(descend, [BATCH])(PARAMS)
    assert shown == ["diagnose_run"]
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    jmpscale.diagnose_run(descend, [BATCH])(PARAMS)


def test_run_diagnosis_is_frozen():
    run = jmpscale.diagnose_run(descend, [BATCH])(PARAMS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.summary = ""
    assert len(list(itertools.chain(run.changes))) == 2
