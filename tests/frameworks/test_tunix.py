"""The `PeftTrainer` of google-tunix trains in float16 with two added lines, or with an overridden train step.

Run: python -m pytest --confcutdir=tests/frameworks -W default tests/frameworks/test_tunix.py
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

import jmpscale

from bits import assert_equal_bits
from common import BATCH, OVERFLOW, VOCABULARY, WEIGHT, adamw, next_token_losses, page_programs, token_batches
from faults import overflow_backward

STEPS, ACCUMULATED = 30, 2


class LanguageModel(nnx.Module):
    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(VOCABULARY, 32, dtype=dtype, rngs=rngs)
        self.up, self.down, self.head = linear(32, 128), linear(128, 32), linear(32, VOCABULARY)

    def __call__(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(nnx.gelu(self.up(hidden)))
        return self.head(hidden).astype(jnp.float32)


def lora_model(dtype):
    """Returns a model with float16 weights and float32 LoRA parameters; qwix creates both in one dtype."""
    model = LanguageModel(dtype)
    nnx.update(model, jmpscale.cast(nnx.state(model), jnp.float16))
    provider = qwix.LoraProvider(module_path="up|down|head", rank=8, alpha=8.0)
    model = qwix.apply_lora_to_model(model, provider, jnp.zeros((1, 1), jnp.int32), rngs=nnx.Rngs(1))
    nnx.update(model, jmpscale.cast(nnx.state(model, nnx.LoRAParam), jnp.float32))
    return model


def loss_and_accuracy(model, tokens, overflow):
    logits = overflow_backward(model(tokens)[:, :-1], overflow.any())
    return WEIGHT * next_token_losses(logits, tokens).mean(), jnp.mean(logits.argmax(-1) == tokens[:, 1:])


def loss_alone(model, tokens, overflow):
    return loss_and_accuracy(model, tokens, overflow)[0]


TASKS = {  # the model, the loss function, whether it returns auxiliary data, and the learning rate
    "all_parameters": (LanguageModel, loss_alone, False, 3e-3),
    "auxiliary_data": (LanguageModel, loss_and_accuracy, True, 3e-3),
    "lora": (lora_model, loss_alone, False, 1e-2),
}


def make_batches(count, overflow_at=None):
    batches = enumerate(token_batches(count))
    return [{"tokens": tokens, "overflow": np.full(BATCH, i == overflow_at)} for i, tokens in batches]


VALIDATION = make_batches(100)[-1]


# The ways to create a trainer: without jmpscale, and with the lines that a user adds.


def unscaled(model, tx, config, loss_fn, has_aux):
    trainer = PeftTrainer(model, tx, config)
    trainer.with_loss_fn(loss_fn, has_aux=has_aux)
    return trainer


def static(model, tx, config, loss_fn, has_aux):
    trainer = PeftTrainer(model, jmpscale.with_loss_scaling(tx, jmpscale.static(1.0)), config)
    trainer.with_loss_fn(jmpscale.scaled_backward(loss_fn, 2.0**24, has_aux=has_aux), has_aux=has_aux)
    return trainer


def autocast(model, tx, config, loss_fn, has_aux, scale=2.0**24):
    """Trains the program in float32, with its matmuls in float16."""
    trainer = PeftTrainer(model, jmpscale.with_loss_scaling(tx, jmpscale.static(1.0)), config)
    half_loss_fn = jmpscale.scaled_backward(jmpscale.autocast(loss_fn), scale, has_aux=has_aux)
    trainer.with_loss_fn(half_loss_fn, has_aux=has_aux)
    return trainer


class LossScaledTrainer(PeftTrainer):
    def _train_step(self, model, optimizer, inputs):
        loss_fn = self.loss_fn
        self.loss_fn = jmpscale.scaled_backward(loss_fn, optimizer.opt_state.scaler, has_aux=self._has_aux)
        try:
            return super()._train_step(model, optimizer, inputs)
        finally:
            self.loss_fn = loss_fn


def dynamic(model, tx, config, loss_fn, has_aux, init_scale=2.0**24, growth_interval=10, **settings):
    scaler = jmpscale.dynamic(init_scale, growth_interval=growth_interval, **settings)
    trainer = LossScaledTrainer(model, jmpscale.with_loss_scaling(tx, scaler), config)
    trainer.with_loss_fn(loss_fn, has_aux=has_aux)
    return trainer


def alias(model, tx, config, loss_fn, has_aux):
    """Gives the model an alias of the scale, for trainers that cannot be subclassed."""
    scaler = jmpscale.dynamic(2.0**24, growth_interval=10)
    model.loss_scale = nnx.Variable(jnp.float32(0))  # into which a checkpoint of the model is restored
    trainer = PeftTrainer(model, jmpscale.with_loss_scaling(tx, scaler), config)
    trainer.model.loss_scale = trainer.optimizer.opt_state.scaler.loss_scale  # the variable of the optimizer
    # Tunix passes the batch by keyword in evaluation, and nnx.value_and_grad by position in training.
    loss_fn = jmpscale.scaled_backward(loss_fn, lambda model, *args, **kwargs: model.loss_scale, has_aux=has_aux)
    trainer.with_loss_fn(loss_fn, has_aux=has_aux)
    return trainer


def as_on_the_page(program, model, tx, config, loss_fn, has_aux):
    def grpo_learner(*args):
        """Returns as much of a `GRPOLearner` as the page uses: its loss function returns auxiliary data."""
        learner = types.SimpleNamespace(rl_cluster=types.SimpleNamespace())
        learner.rl_cluster.actor_trainer = unscaled(model, tx, config, loss_fn, has_aux)
        return learner

    libraries = {
        "PeftTrainer": PeftTrainer,
        "GRPOLearner": grpo_learner,
        "jmpscale": jmpscale,
        "nnx": nnx,
        "optax": optax,
    }
    names = {"model": model, "tx": tx, "config": config, "loss_fn": loss_fn, "k": ACCUMULATED}
    namespace = {**libraries, **names, **dict.fromkeys(("cluster", "reward_fns", "algo_config"))}
    exec(program, namespace)
    return namespace["trainer"]


# For runs that must be equal bit for bit with and without an overflow: float16 rounds subnormal numbers by the scale.
keeps_scale = functools.partial(dynamic, growth_interval=2000, hysteresis=2)
WAYS = {"static": static, "dynamic": dynamic}
STATIC_ON_PAGE, DYNAMIC_ON_PAGE, GRPO_ON_PAGE = page_programs("tunix")
GRPO_CHANGES = {  # of the program on the page, for a constant scale
    "scaling(optax.MultiSteps(tx, k))": "scaling(optax.MultiSteps(tx, k), jmpscale.static(1.0))",
    "trainer.model.loss_scale = trainer.optimizer.opt_state.scaler.loss_scale\n": "",
    "scale = lambda model, *args, **kwargs: model.loss_scale": "scale = 2.0**16",
}
ON_PAGE = {
    "static, as on the page": functools.partial(as_on_the_page, STATIC_ON_PAGE),
    "dynamic, as on the page": functools.partial(as_on_the_page, DYNAMIC_ON_PAGE),
}


@pytest.fixture(scope="module", autouse=True)
def compile_fast(tmp_path_factory):
    """Compiles with few optimizations, and keeps the programs: many runs differ only in their data."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def make_trainer(way, dtype=jnp.float16, *, task="all_parameters", wrap=lambda tx: tx, **settings):
    make_model, loss_fn, has_aux, learning_rate = TASKS[task]
    config = TrainingConfig(eval_every_n_steps=10, **settings)
    return way(make_model(dtype), wrap(adamw(learning_rate)), config, loss_fn, has_aux)


def train(way, batches, *args, **options):
    trainer = make_trainer(way, *args, **options)
    trainer.train(batches, [VALIDATION])
    return trainer


@functools.cache
def trained(way, task="all_parameters", dtype=jnp.float16):
    return train({"unscaled": unscaled, "alias": alias, **WAYS, **ON_PAGE}[way], make_batches(STEPS), dtype, task=task)


def final_loss(trainer):
    """Returns the loss on the validation batch, in nats."""
    return float(loss_alone(trainer.model, **VALIDATION)) / WEIGHT


def assert_trains_like(expected, trainer):
    assert final_loss(trainer) == pytest.approx(final_loss(expected), abs=1e-3)


def logged(trainer, name, mode):
    return trainer.metrics_logger.get_metric_history("", name, mode)


def scaler_of(trainer):
    return jmpscale.get_scaler(trainer.optimizer.opt_state)


def gated_state(trainer):
    """Returns the parameters and the optimizer state without the scaler and the count of steps."""
    return nnx.state(trainer.model, nnx.Param), trainer.optimizer.opt_state.inner_state


def assert_same_bits(one, other):
    assert_equal_bits(nnx.as_pure(one), nnx.as_pure(other))


@pytest.mark.parametrize("way", ["alias", *WAYS, *ON_PAGE])
def test_float16_with_scaled_backward_trains_like_float32(way):
    assert final_loss(trained("unscaled")) > final_loss(trained("unscaled", dtype=jnp.float32)) + 2
    assert_trains_like(trained("unscaled", dtype=jnp.float32), trained(way))


def test_autocast_trains_a_float32_program_like_float32():
    batches = make_batches(STEPS)
    unscaled_half = train(functools.partial(autocast, scale=1.0), batches, jnp.float32)
    float32 = trained("unscaled", dtype=jnp.float32)
    assert final_loss(unscaled_half) > final_loss(float32) + 0.5
    assert_trains_like(float32, train(autocast, batches, jnp.float32))


@pytest.mark.parametrize("way", WAYS)
def test_float16_with_auxiliary_data_trains_like_float32(way):
    trainer, auxiliary = make_trainer(WAYS[way], task="auxiliary_data"), []
    trainer._post_process_train_step = auxiliary.append
    trainer.train(make_batches(STEPS))
    assert_trains_like(trained("unscaled", dtype=jnp.float32), trainer)
    assert len(auxiliary) == STEPS
    assert auxiliary[0] < 0.1 < 0.8 < auxiliary[-1]


@pytest.mark.parametrize("way", WAYS)
def test_float16_with_lora_trains_only_lora_parameters_like_float32(way):
    trainer, expected = trained(way, "lora"), trained("unscaled", "lora", jnp.float32)
    assert final_loss(trained("unscaled", "lora")) > final_loss(expected) + 1
    assert_trains_like(expected, trainer)
    assert_same_bits(lora_model(jnp.float16).head.kernel, trainer.model.head.kernel)
    momentum = optax.tree.get(nnx.as_pure(trainer.optimizer.opt_state), "mu")
    assert len(jax.tree.leaves(momentum)) == 6  # two factors for each of three layers


def test_dynamic_scale_decreases_until_gradients_are_finite():
    batches = make_batches(STEPS)
    too_large = functools.partial(dynamic, init_scale=2.0**40, max_scale=2.0**40, growth_interval=2000)
    trainer = train(too_large, batches)
    finite = np.isfinite(logged(trainer, "grad_norm", "train"))
    skips = np.sum(~finite)
    assert not finite[0]
    assert scaler_of(trainer).total_skips == skips < 10
    assert scaler_of(trainer).loss_scale == 2.0 ** (40 - skips)
    assert_trains_like(train(unscaled, [batches[i] for i in np.flatnonzero(finite)], jnp.float32), trainer)


@pytest.mark.parametrize(("way", "scale_after"), [("static", 1.0), ("dynamic", 2.0**24)])
def test_overflow_changes_neither_parameters_nor_optimizer_state(way, scale_after):
    batches = make_batches(OVERFLOW + 1, OVERFLOW)
    before, after = train(WAYS[way], batches[:-1]), train(WAYS[way], batches)
    assert_same_bits(gated_state(before), gated_state(after))
    assert (scaler_of(before).total_skips, scaler_of(after).total_skips) == (0, 1)
    assert scaler_of(after).loss_scale == scale_after  # the dynamic scale grew after 10 steps


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "mode"), [("loss", "train"), ("loss", "eval"), ("grad_norm", "train")])
def test_logged_values_are_in_true_units(way, name, mode):
    expected = logged(trained("unscaled", dtype=jnp.float32), name, mode)
    np.testing.assert_allclose(logged(trained(way), name, mode), expected, rtol=1e-3)


ACCUMULATING = {"wrap": lambda tx: optax.MultiSteps(tx, ACCUMULATED)}


@pytest.mark.parametrize(
    ("way", "accumulation"),
    [(static, {}), (alias, {}), (dynamic, {}), (keeps_scale, ACCUMULATING)],
    ids=["static", "alias", "dynamic", "dynamic_with_accumulation"],
)
def test_training_continues_identically_from_a_checkpoint(way, accumulation, tmp_path):
    batches = make_batches(STEPS, OVERFLOW)
    uninterrupted = train(way, batches, **accumulation)
    train(way, batches[:16], **accumulation, checkpoint_root_directory=str(tmp_path))
    restored = make_trainer(way, **accumulation, checkpoint_root_directory=str(tmp_path))
    assert (restored.iter_steps, scaler_of(restored).total_skips) == (16, 1)
    restored.train(batches)
    assert restored.iter_steps == STEPS
    assert_same_bits(nnx.state(uninterrupted.model), nnx.state(restored.model))
    assert_same_bits(nnx.state(uninterrupted.optimizer), nnx.state(restored.optimizer))


def test_accumulation_by_tunix_trains_like_float32_without_an_overflow():
    accumulating, batches = {"gradient_accumulation_steps": ACCUMULATED}, make_batches(ACCUMULATED * STEPS)
    trainer = train(static, batches, **accumulating)
    assert_trains_like(train(unscaled, batches, jnp.float32, **accumulating), trainer)


@functools.cache
def accumulated_in_float32():
    """Trains without the batch that overflows in the other runs."""
    batches = make_batches(ACCUMULATED * STEPS + 1)
    finite = batches[:OVERFLOW] + batches[OVERFLOW + 1 :]
    return train(unscaled, finite, jnp.float32, gradient_accumulation_steps=ACCUMULATED)


@pytest.mark.parametrize("way", [static, keeps_scale], ids=WAYS)
def test_accumulation_inside_skips_only_the_overflowing_micro_batch(way):
    batches = make_batches(ACCUMULATED * STEPS + 1, OVERFLOW)
    finite = batches[:OVERFLOW] + batches[OVERFLOW + 1 :]
    trainer, without = train(way, batches, **ACCUMULATING), train(way, finite, **ACCUMULATING)
    assert scaler_of(trainer).total_skips == 1
    assert_same_bits(gated_state(without), gated_state(trainer))
    assert_trains_like(accumulated_in_float32(), trainer)


@pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "static"])
def test_replaced_optimizer_skips_only_the_overflowing_micro_batch(is_dynamic):
    program = GRPO_ON_PAGE
    for line, constant in {} if is_dynamic else GRPO_CHANGES.items():
        assert line in program
        program = program.replace(line, constant)
    batches = make_batches(ACCUMULATED * STEPS + 1, OVERFLOW)
    way, accumulating = functools.partial(as_on_the_page, program), {"gradient_accumulation_steps": ACCUMULATED}
    trainer = train(way, batches, task="auxiliary_data", **accumulating)
    assert (trainer.train_steps, scaler_of(trainer).total_skips) == (STEPS, 1)
    assert_trains_like(accumulated_in_float32(), trainer)


def test_diagnose_step_of_the_compiled_train_step_names_parameters_in_bfloat16():
    """The trainer binds the model and the optimizer to its compiled step."""
    model = LanguageModel(jnp.bfloat16)
    nnx.update(model, jmpscale.cast(nnx.state(model), jnp.bfloat16))
    config = TrainingConfig(eval_every_n_steps=1000, max_steps=1)
    trainer = unscaled(model, optax.adam(1e-4), config, loss_alone, False)
    trainer.with_gen_model_input_fn(lambda batch: batch)
    step, _ = trainer.jit_train_and_eval_step()
    diagnosis = jmpscale.diagnose_step(step)(make_batches(1)[0])
    assert diagnosis.state == ("model", "optimizer")
    assert re.match(
        r"Even with the right gradients, the update loses \d\d.*% of the change of model\.", diagnosis.summary
    )
