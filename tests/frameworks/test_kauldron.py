"""Kauldron's `kd.train.Trainer` trains in float16 with two added lines, or with three that replace no function.

Run: python -m pytest --confcutdir=tests/frameworks -W default tests/frameworks/test_kauldron.py
"""

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
import pytest
from kauldron import kd, kontext
from kauldron.train import metric_writer, train_step

import jmpscale
from jmpscale.testing import assert_replicated

from bits import assert_equal_bits
from common import BATCH, LENGTH, OVERFLOW, VOCABULARY, WEIGHT, adamw, next_token_losses, page_programs, token_batches
from faults import overflow_backward

STEPS = 40


class LanguageModel(nn.Module):
    dtype: Any
    overflows: bool = False
    tokens: kontext.Key = "batch.tokens"
    step: kontext.Key = "step"

    @nn.compact
    def __call__(self, tokens, step):
        x = nn.Embed(VOCABULARY, 32, dtype=self.dtype)(tokens)
        x = x + nn.Dense(32, dtype=self.dtype)(nn.gelu(nn.Dense(128, dtype=self.dtype)(x)))
        x = overflow_backward(x, jnp.asarray(step == OVERFLOW) & self.overflows)
        return {"logits": nn.Dense(VOCABULARY, dtype=self.dtype)(x).astype(jnp.float32)}


class LossScaledLanguageModel(LanguageModel):
    """Scales its backward pass by a constant, so that no function of Kauldron is replaced."""

    def apply(self, *args, **kwargs):
        return jmpscale.scaled_backward(super().apply, 2.0**24, has_aux=True)(*args, **kwargs)


@dataclasses.dataclass(eq=True, frozen=True, kw_only=True)
class NextToken(kd.losses.Loss):
    logits: kontext.Key = "preds.logits"
    tokens: kontext.Key = "batch.tokens"

    def get_values(self, logits, tokens):
        return next_token_losses(logits[:, :-1], tokens)[..., None]


@dataclasses.dataclass(eq=True, frozen=True, kw_only=True)
class Recorder(metric_writer.NoopWriter):
    logs: dict[str, list[float]] = dataclasses.field(default_factory=dict, compare=False)

    def write_step_metrics(self, *, aux, **_):
        result = aux.compute()
        for name, value in {**result.loss_values, **result.metric_values}.items():
            self.logs.setdefault(name, []).append(float(value))


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    """Compiles equal steps of different trainers once."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def train(model, optimizer, *, steps=STEPS, **options):
    """Runs `Trainer.train` and returns the final state and the values logged in each step."""
    writer = Recorder()
    norm = kd.metrics.Norm(tensor="grads", axis=None, aggregation_type="concat")
    sequences = [{"tokens": tokens} for tokens in token_batches(STEPS).reshape(-1, LENGTH)]
    with tempfile.TemporaryDirectory() as workdir:
        trainer = kd.train.Trainer(
            train_ds=kd.data.py.DataSource(data_source=sequences, shuffle=False, batch_size=BATCH, num_workers=0),
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
            **{"workdir": workdir, **options},
        )
        state, _ = trainer.train()
    return state, {name: np.array(values) / WEIGHT for name, values in writer.logs.items()}


def restored_afterwards():
    """Undoes the replacement of Kauldron's function, because other runs need the original."""
    return mock.patch.object(train_step, "forward_with_loss", train_step.forward_with_loss)


def train_scaled_backward(*, overflows=False, **options):
    with restored_afterwards():
        # kd.train keeps the original: a notebook may execute the line again.
        train_step.forward_with_loss = jmpscale.scaled_backward(
            kd.train.forward_with_loss, lambda context, **_: context.opt_state, has_aux=True
        )
        # The scale grows a few times, so that tests can observe it.
        tx = jmpscale.with_loss_scaling(adamw(), jmpscale.dynamic(2.0**24, growth_interval=8))
        return train(LanguageModel(jnp.float16, overflows), tx, **options)


def train_autocast():
    """Trains the program in float32, with its matmuls in float16."""
    with restored_afterwards():
        half = jmpscale.autocast(kd.train.forward_with_loss)
        train_step.forward_with_loss = jmpscale.scaled_backward(half, 2.0**24, has_aux=True)
        return train(LanguageModel(jnp.float32), jmpscale.with_loss_scaling(adamw(), jmpscale.static(1.0)))


def train_as_on_the_page(program):
    names = {"kd": kd, "jmpscale": jmpscale, "Model": LanguageModel, "LossScaledModel": LanguageModel, "tx": adamw()}
    with restored_afterwards():
        exec(program, names)
        return train(names["LossScaledModel"](jnp.float16), names["optimizer"])


DYNAMIC_ON_PAGE, STATIC_ON_PAGE = page_programs("training_loops", "Kauldron")
RUNS = {
    "float32": lambda: train(LanguageModel(jnp.float32), adamw()),
    "float16": lambda: train(LanguageModel(jnp.float16), adamw()),
    "dynamic": train_scaled_backward,
    "autocast": train_autocast,
    "static": lambda: train(
        LossScaledLanguageModel(jnp.float16), jmpscale.with_loss_scaling(adamw(), jmpscale.static(1.0))
    ),
    "dynamic, as on the page": lambda: train_as_on_the_page(DYNAMIC_ON_PAGE),
    "static, as on the page": lambda: train_as_on_the_page(STATIC_ON_PAGE),
}
run = functools.cache(lambda name: RUNS[name]())


@pytest.mark.parametrize("way", list(RUNS)[2:])
def test_float16_with_scaled_backward_trains_like_float32(way):
    losses = {name: run(name)[1]["losses/total"][-1] for name in ("float32", "float16", way)}
    assert losses["float16"] > losses["float32"] + 2
    assert abs(losses[way] - losses["float32"]) < 1e-3
    scaler = jmpscale.get_scaler(run(way)[0])
    assert scaler.total_skips == 0
    assert scaler.loss_scale == 2.0 ** (24 + STEPS // 8) or way != "dynamic"


@pytest.mark.parametrize("way", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["losses/next_token", "metrics/grad_norm"])
def test_logged_numbers_are_in_true_units(name, way):
    np.testing.assert_allclose(run(way)[1][name], run("float32")[1][name], rtol=0.01)


SHARDINGS = {
    "replicated": kd.sharding.ShardingStrategy(),
    "fsdp": kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0)),
}


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_overflow_leaves_parameters_and_optimizer_state_unchanged(sharding):
    options = {"overflows": True, "sharding": SHARDINGS[sharding]}
    before, logs = train_scaled_backward(steps=OVERFLOW, **options)
    kernel = before.params["Dense_0"]["kernel"]
    assert len(kernel.sharding.device_set) == 2
    assert kernel.is_fully_replicated == (sharding == "replicated")
    np.testing.assert_allclose(logs["losses/total"], run("float32")[1]["losses/total"][:OVERFLOW], rtol=0, atol=1e-3)
    after, logs = train_scaled_backward(steps=OVERFLOW + 1, **options)
    assert not np.isfinite(logs["metrics/grad_norm"][OVERFLOW])
    assert_equal_bits((before.params, before.opt_state.inner_state), (after.params, after.opt_state.inner_state))
    scaler = after.opt_state.scaler
    assert_replicated(scaler)
    assert (after.step, scaler.total_skips) == (OVERFLOW + 1, 1)
    assert scaler.loss_scale == before.opt_state.scaler.loss_scale / 2


def test_restored_checkpoint_continues_like_the_uninterrupted_run(tmp_path):
    options = {"workdir": tmp_path, "checkpointer": kd.ckpts.Checkpointer(save_interval_steps=20)}
    train_scaled_backward(steps=22, **options)
    state, logs = train_scaled_backward(**options)
    expected_state, expected_logs = run("dynamic")
    assert_equal_bits(expected_state, state)
    np.testing.assert_array_equal(logs["losses/total"], expected_logs["losses/total"][20:])
