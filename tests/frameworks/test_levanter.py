"""Levanter's `Trainer` trains in float16 with two added lines, or with a dynamic scale in an overridden train step.

Run: python -m pytest --confcutdir=tests/frameworks -W default tests/frameworks/test_levanter.py
"""

import functools
import os
import tempfile

# Levanter splits parameters and batches over all devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from levanter import tracker
from levanter.callbacks.watch import WatchConfig
from levanter.checkpoint import CheckpointerConfig
from levanter.optim import AdamConfig
from levanter.tracker import NoopTracker
from levanter.trainer import Trainer, TrainerConfig

import jmpscale
from jmpscale.testing import assert_replicated

from bits import assert_equal_bits
from common import BATCH, EPSILON, LENGTH, OVERFLOW, VOCABULARY, WEIGHT, next_token_losses, page_programs, token_batches
from faults import overflow_backward

STEPS, RESUMED = 30, 16
MICRO_BATCHES = {"per_device_parallelism": BATCH // 4}  # two on each of two devices
FLOAT32, FLOAT16 = jmp.get_policy("f32"), jmp.get_policy("p=f32,c=f16,o=f32")
Batch, Pos = hax.Axis("batch", BATCH), hax.Axis("position", LENGTH)
Vocab, Embed, Mlp = hax.Axis("vocab", VOCABULARY), hax.Axis("embed", 32), hax.Axis("mlp", 128)


class LanguageModel(eqx.Module):
    embed: hax.nn.Embedding
    up: hax.nn.Linear
    down: hax.nn.Linear
    head: hax.nn.Linear

    @staticmethod
    def init():
        keys = iter(jax.random.split(jax.random.key(0), 4))
        axes = [(Embed, Mlp), (Mlp, Embed), (Embed, Vocab)]
        linear = [hax.nn.Linear.init(*pair, key=next(keys), use_bias=False) for pair in axes]
        return LanguageModel(hax.nn.Embedding.init(Vocab, Embed, key=next(keys)), *linear)

    def __call__(self, tokens):
        hidden = self.embed(tokens)
        return self.head(hidden + self.down(hax.nn.gelu(self.up(hidden))))


def loss_fn(model, batch, *, key=None):
    tokens, overflow = batch
    logits = model(tokens).rearrange((Batch, Pos, Vocab)).array.astype(jnp.float32)
    logits = overflow_backward(logits[:, :-1], overflow.array.any())
    return WEIGHT * next_token_losses(logits, tokens.array).mean()


class Recorder(NoopTracker):
    def __init__(self):
        self.logs = {}

    def init(self, run_id):
        return self

    def log(self, metrics, *, step, commit=None):
        for name, value in metrics.items():
            self.logs.setdefault(name, []).append(value)


class Checkpoints(CheckpointerConfig):
    """Keeps the checkpointer that the trainer creates, so that tests can wait for it."""

    def create(self, run_id):
        self.created = super().create(run_id)
        return self.created


# The ways to create a trainer: without jmpscale, and with the lines that a user adds.


class LossScaledTrainer(Trainer):
    def _train_step(self, state, *args, **kwargs):
        loss_fn = self.loss_fn
        self.loss_fn = jmpscale.scaled_backward(loss_fn, state.opt_state, has_aux=True)
        try:
            return super()._train_step(state, *args, **kwargs)
        finally:
            self.loss_fn = loss_fn


def static(config, tx):
    trainer = Trainer(config, jmpscale.with_loss_scaling(tx, jmpscale.static(1.0)), loss_fn)
    trainer.loss_fn = jmpscale.scaled_backward(trainer.loss_fn, 2.0**24, has_aux=True)
    return trainer


def dynamic(config, tx):
    tx = jmpscale.with_loss_scaling(tx, jmpscale.dynamic(2.0**24, growth_interval=10))
    return LossScaledTrainer(config, tx, loss_fn)


def autocast(config, tx, scale=2.0**24):
    """Trains the program in float32, with its matmuls in float16."""
    half_loss_fn = jmpscale.scaled_backward(jmpscale.autocast(loss_fn), scale)
    return Trainer(config, jmpscale.with_loss_scaling(tx, jmpscale.static(1.0)), half_loss_fn)


def as_on_the_page(program, config, tx):
    names = {"config": config, "tx": tx, "loss_fn": loss_fn}
    namespace = {"Trainer": Trainer, "jmpscale": jmpscale, "tracker": tracker, **names}
    exec(program, namespace)
    return namespace["trainer"]


AUTOCAST_ON_PAGE, STATIC_ON_PAGE, DYNAMIC_ON_PAGE, HOOK_ON_PAGE = page_programs("levanter")
WAYS = {
    "unscaled": lambda config, tx: Trainer(config, tx, loss_fn),
    "around the function of the user": lambda config, tx: Trainer(
        config, tx, jmpscale.scaled_backward(loss_fn, 2.0**24)
    ),
    "autocast": autocast,
    "autocast without scaling": functools.partial(autocast, scale=1.0),
    "autocast, as on the page": functools.partial(as_on_the_page, AUTOCAST_ON_PAGE),
    "static": static,
    "dynamic": dynamic,
    "static, as on the page": functools.partial(as_on_the_page, STATIC_ON_PAGE),
    "dynamic, as on the page": functools.partial(as_on_the_page, DYNAMIC_ON_PAGE + HOOK_ON_PAGE),
}


@pytest.fixture(scope="module", autouse=True)
def compile_fast(tmp_path_factory):
    """Compiles with few optimizations, and keeps the programs: many runs differ only in their data."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def make_batches(count, overflows):
    """Returns batches of tokens and of flags. If a flag is set, only its sequence overflows."""
    tokens = jnp.asarray(token_batches(STEPS)[:count])
    flags = jnp.zeros((STEPS, BATCH), bool).at[OVERFLOW, 0].set(overflows)
    return [(hax.named(t, (Batch, Pos)), hax.named(flag, Batch)) for t, flag in zip(tokens, flags, strict=False)]


def train(way, mp=FLOAT16, *, steps=STEPS, overflows=False, folder=None, **options):
    """Runs `Trainer.train` and returns the trainer and the final state. It continues from a checkpoint in `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        checkpointer = Checkpoints(base_path=str(folder or temporary), keep=[{"every": 5}])
        watch = WatchConfig(watch_targets=["grads"], include_per_parameter_norms=False, interval=1)
        config = TrainerConfig(
            id="run",
            mp=mp,
            tracker=Recorder(),
            watch=watch,
            checkpointer=checkpointer,
            train_batch_size=BATCH,
            num_train_steps=STEPS,
            log_jaxprs=False,
            log_xla_hlo=False,
            require_accelerator=False,
            **options,
        )
        config._validate_and_set_defaults()  # part of `levanter.initialize`, which also parses the command line
        adam = AdamConfig(learning_rate=1e-2, epsilon=EPSILON, max_grad_norm=0.5 * WEIGHT, warmup=0.0)
        trainer = WAYS[way](config, adam.build(STEPS))
        with trainer:
            state = trainer.initial_state(jax.random.PRNGKey(0), model_init=LanguageModel.init)
            state = trainer.train(state, make_batches(steps, overflows)[int(state.step) :]).state
        checkpointer.created.wait_until_finished()
    return trainer, state


trained = functools.cache(train)


def logged(name, *args):
    trainer, _ = trained(*args)
    return np.array(trainer.tracker.logs[name])


def test_autocast_trains_a_float32_program_like_float32():
    ways = ("unscaled", "autocast without scaling", "autocast", "autocast, as on the page")
    float32, float16, *scaled = (logged("train/loss", way, FLOAT32)[-1] / WEIGHT for way in ways)
    assert float16 > float32 + 0.5
    assert all(abs(loss - float32) < 1e-3 for loss in scaled)


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith(("static", "dynamic"))])
def test_float16_with_scaled_backward_trains_like_float32(way):
    losses = [logged("train/loss", *run)[-1] / WEIGHT for run in (("unscaled", FLOAT32), ("unscaled",), (way,))]
    float32, float16, scaled = losses
    assert float16 > float32 + 2
    assert abs(scaled - float32) < 1e-3
    scaler = jmpscale.get_scaler(trained(way)[1].opt_state)
    assert_replicated(scaler)
    assert scaler.total_skips == 0
    assert scaler.loss_scale == 2.0 ** (24 + STEPS // 10) or way != "dynamic"


@pytest.mark.parametrize("way", ["static", "dynamic"])
@pytest.mark.parametrize("name", ["train/loss", "grad/norm/total"])
def test_logged_values_are_in_true_units(name, way):
    np.testing.assert_allclose(logged(name, way), logged(name, "unscaled", FLOAT32), rtol=0.01)


def test_hook_of_the_page_logs_the_learning_rate():
    """Levanter looks for it in the optimizer state itself."""
    name = "optim/learning_rate"
    assert name not in trained("dynamic")[0].tracker.logs
    np.testing.assert_array_equal(logged(name, "dynamic, as on the page"), logged(name, "unscaled"))


def test_micro_batches_in_float16_train_like_float32():
    trainer, _ = train("dynamic", **MICRO_BATCHES)
    assert abs(trainer.tracker.logs["train/loss"][-1] - logged("train/loss", "unscaled", FLOAT32)[-1]) < 1e-3 * WEIGHT


def test_wrapping_the_function_of_the_user_raises_with_the_remedy():
    """Levanter converts the model before it calls this function."""
    with pytest.raises(TypeError, match="wrap its function"):
        train("around the function of the user", steps=1)


@pytest.mark.parametrize(
    ("way", "options", "scale_after"),
    [("static", {}, 1.0), ("dynamic", {}, 2.0**24), ("dynamic", MICRO_BATCHES, 2.0**24)],
    ids=["static", "dynamic", "one_micro_batch"],
)
def test_overflow_changes_neither_parameters_nor_optimizer_state(way, options, scale_after):
    before, after = (train(way, overflows=True, steps=OVERFLOW + i, **options)[1] for i in (0, 1))
    assert not before.model.up.weight.array.sharding.is_fully_replicated
    assert_equal_bits((before.model, before.opt_state.inner_state), (after.model, after.opt_state.inner_state))
    old, new = (jmpscale.get_scaler(state.opt_state) for state in (before, after))
    assert (old.total_skips, new.total_skips) == (0, 1)
    assert new.loss_scale == scale_after  # the dynamic scale grew after 10 steps
    assert after.step == OVERFLOW + 1


def saved(state):
    """Returns the state without the optimizer itself, a field that each trainer creates."""
    return state.step, state.model, state.opt_state, state.training_key


@pytest.mark.parametrize("way", ["static", "dynamic"])
def test_training_continues_identically_from_a_checkpoint(way, tmp_path):
    _, uninterrupted = train(way, overflows=True)
    train(way, overflows=True, steps=RESUMED, folder=tmp_path)
    trainer, resumed = train(way, overflows=True, folder=tmp_path)
    assert len(trainer.tracker.logs["grad/norm/total"]) == STEPS - RESUMED
    assert jmpscale.get_scaler(resumed.opt_state).total_skips == 1
    assert_equal_bits(saved(uninterrupted), saved(resumed))


@pytest.mark.parametrize(("parameters", "is_right"), [("f32", True), ("bfloat16", False)])
def test_diagnose_step_of_the_train_step_names_parameters_in_bfloat16(parameters, is_right, tmp_path):
    policy = jmp.get_policy(f"p={parameters},c=bfloat16,o=f32")
    config = TrainerConfig(
        id="run",
        mp=policy,
        tracker=Recorder(),
        checkpointer=CheckpointerConfig(base_path=str(tmp_path)),
        train_batch_size=BATCH,
        num_train_steps=STEPS,
        require_accelerator=False,
    )
    config._validate_and_set_defaults()
    with Trainer(config, AdamConfig(learning_rate=1e-4, warmup=0.0).build(STEPS), loss_fn) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model_init=LanguageModel.init)
        diagnosis = jmpscale.diagnose_step(trainer._jit_train_step_fn)(state, (make_batches(1, False)[0],), {})
    assert diagnosis.state == ("state",)
    wrong = {x.name.partition("[")[0] for x in diagnosis.changes if x.error > 0.5}
    layers = {f"state.model.{name}.weight" for name in ("embed", "up", "down", "head")}
    assert layers.isdisjoint(wrong) if is_right else layers <= wrong
    assert (" loses " in diagnosis.summary) != is_right
