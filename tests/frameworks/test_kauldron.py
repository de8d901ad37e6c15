"""Users of Kauldron's `kd.train.Trainer` train in float16 with two added lines, or with three that replace nothing.

Run: python -m pytest --confcutdir=tests/frameworks -W default tests/frameworks/test_kauldron.py
"""

import contextlib
import dataclasses
import functools
import os
import tempfile
from typing import Any
from unittest import mock

# Kauldron splits batches over all devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kauldron import kd, kontext
from kauldron.train import metric_writer, train_step

import jmpscale
from jmpscale.testing import assert_replicated, assert_step_is_noop, inject_backward

from page import changed_programs

VOCABULARY, LENGTH, BATCH, STEPS = 32, 12, 16, 40
WEIGHT = 2.0**-16  # of the loss: without loss scaling most gradients are below the smallest float16
OVERFLOW = 12  # the step, counted from 0, that overflows where a test asks for it


class LanguageModel(nn.Module):
    """Predicts each token from the one before it."""

    dtype: Any
    overflows: bool = False
    tokens: kontext.Key = "batch.tokens"
    step: kontext.Key = "step"

    @nn.compact
    def __call__(self, tokens, step):
        x = nn.Embed(VOCABULARY, 32, dtype=self.dtype)(tokens)
        x = x + nn.Dense(32, dtype=self.dtype)(nn.gelu(nn.Dense(128, dtype=self.dtype)(x)))
        x = inject_backward(x, jnp.inf, path="", when=jnp.asarray(step == OVERFLOW) & self.overflows)
        return {"logits": nn.Dense(VOCABULARY, dtype=self.dtype)(x).astype(jnp.float32)}


class LossScaledLanguageModel(LanguageModel):
    """Scales its own backward pass by a constant, so that nothing in Kauldron is replaced."""

    def apply(self, *args, **kwargs):
        return jmpscale.loss_scaled(super().apply, 2.0**24, has_aux=True)(*args, **kwargs)


@dataclasses.dataclass(eq=True, frozen=True, kw_only=True)
class NextToken(kd.losses.Loss):
    logits: kontext.Key = "preds.logits"
    tokens: kontext.Key = "batch.tokens"

    def get_values(self, logits, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])[..., None]


@dataclasses.dataclass(eq=True, frozen=True, kw_only=True)
class Recorder(metric_writer.NoopWriter):
    """Keeps what Kauldron logs."""

    logs: dict[str, list[float]] = dataclasses.field(default_factory=dict, compare=False)

    def write_step_metrics(self, *, aux, **_):
        result = aux.compute()
        for name, value in {**result.loss_values, **result.metric_values}.items():
            self.logs.setdefault(name, []).append(float(value))


def sequences():
    """Returns examples in which each token is the one before it plus 3."""
    starts = np.random.default_rng(0).integers(VOCABULARY, size=STEPS * BATCH)
    return [{"tokens": np.int32((start + 3 * np.arange(LENGTH)) % VOCABULARY)} for start in starts]


def adamw():
    # With the usual epsilon of 1e-8 the gradients of this loss would train nothing in float32 either.
    return optax.chain(optax.clip_by_global_norm(0.5 * WEIGHT), optax.adamw(3e-3, eps=1e-8 * WEIGHT))


def loss_scaling_adamw():
    # The scale grows a few times, so that tests see it move.
    return jmpscale.with_loss_scaling(adamw(), jmpscale.dynamic(2.0**24, growth_interval=8))


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    """Compiles equal steps of different trainers once."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@contextlib.contextmanager
def loss_scaled_trainer():
    """Contains the line that a user adds once; undone here because other runs must be without it."""
    with mock.patch.object(train_step, "forward_with_loss"):
        # kd.train keeps the original: a notebook may execute the line again.
        train_step.forward_with_loss = jmpscale.loss_scaled(
            kd.train.forward_with_loss, lambda context, **_: context.opt_state, has_aux=True
        )
        yield


def train(model, optimizer, *, steps=STEPS, **options):
    """Runs `Trainer.train` and returns the final state and what was logged in each step."""
    writer = Recorder()
    norm = kd.metrics.Norm(tensor="grads", axis=None, aggregation_type="concat")
    with tempfile.TemporaryDirectory() as workdir:
        options = {"workdir": workdir, **options}
        trainer = kd.train.Trainer(
            train_ds=kd.data.py.DataSource(data_source=sequences(), shuffle=False, batch_size=BATCH, num_workers=0),
            model=model,
            train_losses={"next_token": NextToken(weight=WEIGHT)},
            train_metrics={"grad_norm": kd.metrics.TreeReduce(metric=norm)},
            optimizer=optimizer,
            num_train_steps=STEPS,
            stop_after_steps=steps,
            log_metrics_every=1,
            log_summaries_every=1,  # with another interval Kauldron would compile two steps
            writer=writer,
            profiler=None,
            **options,
        )
        state, _ = trainer.train()
    return state, {name: np.array(values) / WEIGHT for name, values in writer.logs.items()}


def train_loss_scaled(*, overflows=False, **options):
    with loss_scaled_trainer():
        return train(LanguageModel(jnp.float16, overflows), loss_scaling_adamw(), **options)


@functools.cache
def finished(way):
    """Returns the state and the logs of a run of all steps."""
    match way:
        case "float32":
            return train(LanguageModel(jnp.float32), adamw())
        case "float16":
            return train(LanguageModel(jnp.float16), adamw())
        case "dynamic":
            return train_loss_scaled()
        case "static":
            optimizer = jmpscale.with_loss_scaling(adamw(), jmpscale.static(1.0))
            return train(LossScaledLanguageModel(jnp.float16), optimizer)


@pytest.mark.parametrize("way", ["dynamic", "static"])
def test_float16_with_loss_scaled_trains_like_float32(way):
    losses = {name: finished(name)[1]["losses/total"] for name in ("float32", "float16", way)}
    assert losses["float16"][-1] > losses["float32"][-1] + 2
    assert abs(losses[way][-1] - losses["float32"][-1]) < 1e-3
    assert jmpscale.get_scaler(finished(way)[0]).skipped == 0


@pytest.mark.parametrize("program", changed_programs("Kauldron"), ids=["dynamic", "static"])
def test_the_lines_of_the_page_train_like_float32(program):
    names = {"kd": kd, "jmpscale": jmpscale, "Model": LanguageModel, "LossScaledModel": LanguageModel, "tx": adamw()}
    with mock.patch.object(train_step, "forward_with_loss", train_step.forward_with_loss):  # undone afterwards
        exec(program, names)
        _, logs = train(names["LossScaledModel"](jnp.float16), names["optimizer"])
    expected = finished("float32")[1]["losses/total"][-1]
    assert abs(logs["losses/total"][-1] - expected) < 1e-3


def test_scale_grows_in_the_optimizer_state_of_kauldron():
    scaler = jmpscale.get_scaler(finished("dynamic")[0])
    assert scaler.loss_scale == 2.0 ** (24 + STEPS // 8)


@pytest.mark.parametrize("way", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["losses/next_token", "metrics/grad_norm"])
def test_logged_numbers_are_in_true_units(name, way):
    expected, logged = finished("float32")[1][name], finished(way)[1][name]
    np.testing.assert_allclose(logged, expected, rtol=0.01)


SHARDINGS = {
    "replicated": kd.sharding.ShardingStrategy(),
    "fsdp": kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0)),
}


@functools.cache
def train_with_overflow(sharding, steps):
    return train_loss_scaled(overflows=True, steps=steps, sharding=SHARDINGS[sharding])


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_overflow_leaves_parameters_and_optimizer_state_unchanged(sharding):
    before, _ = train_with_overflow(sharding, OVERFLOW)
    after, logs = train_with_overflow(sharding, OVERFLOW + 1)
    assert not np.isfinite(logs["metrics/grad_norm"][OVERFLOW])
    assert_step_is_noop((before.params, before.opt_state.inner_state), (after.params, after.opt_state.inner_state))
    scaler = after.opt_state.scaler
    assert_replicated(scaler)
    assert (after.step, scaler.skipped) == (OVERFLOW + 1, 1)
    assert scaler.loss_scale == before.opt_state.scaler.loss_scale / 2


def test_parameters_sharded_over_two_devices_train_like_float32():
    state, logs = train_with_overflow("fsdp", OVERFLOW)
    kernel = state.params["Dense_0"]["kernel"]
    assert len(kernel.sharding.device_set) == 2
    assert not kernel.is_fully_replicated
    expected = finished("float32")[1]["losses/total"][:OVERFLOW]
    np.testing.assert_allclose(logs["losses/total"], expected, rtol=0, atol=1e-3)


def test_restored_checkpoint_continues_like_the_unbroken_run(tmp_path):
    options = {"workdir": tmp_path, "checkpointer": kd.ckpts.Checkpointer(save_interval_steps=20)}
    train_loss_scaled(steps=22, **options)
    state, logs = train_loss_scaled(**options)
    expected_state, expected_logs = finished("dynamic")
    assert_step_is_noop(expected_state, state)
    np.testing.assert_array_equal(logs["losses/total"], expected_logs["losses/total"][20:])
