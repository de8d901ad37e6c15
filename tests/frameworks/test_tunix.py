"""Proves that the `PeftTrainer` of google-tunix trains in float16 with at most three added lines.

python -m pytest --confcutdir=tests/frameworks -W default -q tests/frameworks/test_tunix.py
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

import jmpscale
from jmpscale.testing import assert_step_is_noop, inject_backward

from page import changed_programs

# The loss, and with it every gradient, is so small that the backward pass underflows in float16.
LOSS_FACTOR = 2.0**-16
TOKENS = 32
STEPS = 30
ACCUMULATED = 2
OVERFLOW_AT = 12
GROWS_EVERY_10_STEPS = jmpscale.dynamic(2.0**24, growth_interval=10)
KEEPS_ITS_SCALE_AT_THE_FIRST_OVERFLOW = jmpscale.dynamic(2.0**24, hysteresis=2)


class LanguageModel(nnx.Module):
    def __init__(self, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(TOKENS, 32, dtype=dtype, rngs=rngs)
        self.up = linear(32, 128)
        self.down = linear(128, 32)
        self.head = linear(32, TOKENS)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(nnx.gelu(self.up(hidden)))
        return self.head(hidden).astype(jnp.float32)


def lora_model(dtype: Any) -> nnx.Module:
    """Returns a model with float16 weights and float32 LoRA parameters, which qwix makes in the weights' dtype."""
    model = LanguageModel(dtype)
    nnx.update(model, jmpscale.cast(nnx.state(model), jnp.float16))
    provider = qwix.LoraProvider(module_path="up|down|head", rank=8, alpha=8.0)
    model = qwix.apply_lora_to_model(model, provider, jnp.zeros((1, 1), jnp.int32), rngs=nnx.Rngs(1))
    nnx.update(model, jmpscale.cast(nnx.state(model, nnx.LoRAParam), jnp.float32))
    return model


def loss_and_accuracy(model: nnx.Module, tokens: jax.Array, overflow: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits, targets = model(tokens)[:, :-1], tokens[:, 1:]
    logits = inject_backward(logits, jnp.inf, path="", when=overflow.any())
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return LOSS_FACTOR * loss, jnp.mean(logits.argmax(-1) == targets)


def loss_alone(model: nnx.Module, tokens: jax.Array, overflow: jax.Array) -> jax.Array:
    return loss_and_accuracy(model, tokens, overflow)[0]


class Task(NamedTuple):
    make_model: Callable[[Any], nnx.Module] = LanguageModel
    loss_fn: Callable[..., Any] = loss_alone
    has_aux: bool = False
    learning_rate: float = 3e-3


TASKS = {
    "all_parameters": Task(),
    "auxiliary_data": Task(loss_fn=loss_and_accuracy, has_aux=True),
    "lora": Task(lora_model, learning_rate=1e-2),
}


def make_batches(count: int, overflow_at: int | None = None) -> list[dict[str, np.ndarray]]:
    """Returns batches in which the next token is the token plus 3; the backward pass overflows in one of them."""
    first = np.random.default_rng(0).integers(0, TOKENS, (count, 16, 1))
    tokens = ((first + 3 * np.arange(12)) % TOKENS).astype(np.int32)
    return [{"tokens": tokens[i], "overflow": np.full(16, i == overflow_at)} for i in range(count)]


VALIDATION = make_batches(100)[-1]


def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    # Adam's eps would hide gradients that are as small as these: the loss is made smaller, and so is eps.
    return optax.chain(optax.clip_by_global_norm(0.5 * LOSS_FACTOR), optax.adamw(learning_rate, eps=1e-8 * LOSS_FACTOR))


def accumulate(tx: optax.GradientTransformation) -> optax.MultiSteps:
    return optax.MultiSteps(tx, ACCUMULATED)


# The ways to create a trainer: as without jmpscale, and with the lines that a user adds.


def unscaled(model: nnx.Module, tx: Any, config: Any, loss_fn: Any, has_aux: bool = False) -> PeftTrainer:
    trainer = PeftTrainer(model, tx, config)
    trainer.with_loss_fn(loss_fn, has_aux=has_aux)
    return trainer


def static(model: nnx.Module, tx: Any, config: Any, loss_fn: Any, has_aux: bool = False) -> PeftTrainer:
    trainer = PeftTrainer(model, jmpscale.with_loss_scaling(tx, jmpscale.static(1.0)), config)
    trainer.with_loss_fn(jmpscale.loss_scaled(loss_fn, 2.0**24, has_aux=has_aux), has_aux=has_aux)
    return trainer


def dynamic(
    model: nnx.Module,
    tx: Any,
    config: Any,
    loss_fn: Any,
    has_aux: bool = False,
    scaler: jmpscale.ScalerState = GROWS_EVERY_10_STEPS,
) -> PeftTrainer:
    model.loss_scale = nnx.Variable(jnp.float32(0))  # a place for it, where a checkpoint of the model is restored
    trainer = PeftTrainer(model, jmpscale.with_loss_scaling(tx, scaler), config)
    trainer.model.loss_scale = trainer.optimizer.opt_state.scaler.loss_scale  # the optimizer's own variable
    # Tunix passes the batch by keyword in evaluation, and nnx.value_and_grad by position in training.
    loss_fn = jmpscale.loss_scaled(loss_fn, lambda model, *args, **kwargs: model.loss_scale, has_aux=has_aux)
    trainer.with_loss_fn(loss_fn, has_aux=has_aux)
    return trainer


WAYS = {"static": static, "dynamic": dynamic}
# For runs that must be equal bit for bit, with and without an overflow: float16 rounds subnormals by the scale.
dynamic_patient = functools.partial(dynamic, scaler=KEEPS_ITS_SCALE_AT_THE_FIRST_OVERFLOW)


@pytest.fixture(scope="module", autouse=True)
def compile_fast(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiles with few optimizations, and keeps the programs: many runs differ only in their data."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def make_trainer(
    way: Callable[..., PeftTrainer],
    dtype: Any = jnp.float16,
    *,
    task: Task = TASKS["all_parameters"],
    transform_optimizer: Callable[[Any], Any] = lambda tx: tx,
    **settings: Any,
) -> PeftTrainer:
    tx = transform_optimizer(make_optimizer(task.learning_rate))
    model = task.make_model(dtype)
    return way(model, tx, TrainingConfig(eval_every_n_steps=10, **settings), task.loss_fn, has_aux=task.has_aux)


def train(way: Callable[..., PeftTrainer], batches: list[Any], *args: Any, **options: Any) -> PeftTrainer:
    trainer = make_trainer(way, *args, **options)
    trainer.train(batches, [VALIDATION])
    return trainer


@functools.cache
def trained(way: str, task: str, dtype: Any = jnp.float16) -> PeftTrainer:
    ways = {"unscaled": unscaled, **WAYS}
    return train(ways[way], make_batches(STEPS), dtype, task=TASKS[task])


def final_loss(trainer: PeftTrainer) -> float:
    """Returns the loss on the validation batch, in nats."""
    return float(loss_alone(trainer.model, **VALIDATION)) / LOSS_FACTOR


def logged(trainer: PeftTrainer, name: str, mode: str = "train") -> np.ndarray:
    return trainer.metrics_logger.get_metric_history("", name, mode)


def scaler_of(trainer: PeftTrainer) -> jmpscale.ScalerState:
    return jmpscale.get_scaler(trainer.optimizer.opt_state)


def gated_state(trainer: PeftTrainer) -> Any:
    """Returns the parameters and the optimizer state without the scaler and the count of steps."""
    return nnx.state(trainer.model, nnx.Param), trainer.optimizer.opt_state.inner_state


def whole_state(trainer: PeftTrainer) -> Any:
    return nnx.state(trainer.model), nnx.state(trainer.optimizer)


def assert_same_bits(one: Any, other: Any) -> None:
    assert_step_is_noop(nnx.as_pure(one), nnx.as_pure(other))


@pytest.mark.parametrize(("task", "nats"), [("all_parameters", 2.0), ("lora", 1.0)])
def test_float16_alone_ends_far_above_float32(task: str, nats: float) -> None:
    assert final_loss(trained("unscaled", task)) > final_loss(trained("unscaled", task, jnp.float32)) + nats


@pytest.mark.parametrize("way", WAYS)
def test_float16_with_loss_scaled_trains_like_float32(way: str) -> None:
    expected = final_loss(trained("unscaled", "all_parameters", jnp.float32))
    assert final_loss(trained(way, "all_parameters")) == pytest.approx(expected, abs=1e-3)


def as_on_the_page(program: str, model: nnx.Module, tx: Any, config: Any, loss_fn: Any, has_aux: bool) -> PeftTrainer:
    names = {"model": model, "tx": tx, "config": config, "loss_fn": loss_fn}
    exec(program, {"PeftTrainer": PeftTrainer, "jmpscale": jmpscale, **names}, names)
    return names["trainer"]


@pytest.mark.parametrize("program", changed_programs("Tunix"), ids=WAYS)
def test_the_lines_of_the_page_train_like_float32(program: str) -> None:
    trainer = train(functools.partial(as_on_the_page, program), make_batches(STEPS))
    expected = final_loss(trained("unscaled", "all_parameters", jnp.float32))
    assert final_loss(trainer) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_float16_with_auxiliary_data_trains_like_float32_and_returns_them(way: str) -> None:
    trainer, auxiliary = make_trainer(WAYS[way], task=TASKS["auxiliary_data"]), []
    trainer._post_process_train_step = auxiliary.append
    trainer.train(make_batches(STEPS))
    expected = final_loss(trained("unscaled", "all_parameters", jnp.float32))
    assert final_loss(trainer) == pytest.approx(expected, abs=1e-3)
    assert len(auxiliary) == STEPS
    assert auxiliary[0] < 0.1
    assert auxiliary[-1] > 0.8


@pytest.mark.parametrize("way", WAYS)
def test_float16_with_lora_trains_like_float32_and_keeps_the_other_weights(way: str) -> None:
    trainer = trained(way, "lora")
    expected = final_loss(trained("unscaled", "lora", jnp.float32))
    assert final_loss(trainer) == pytest.approx(expected, abs=1e-3)
    assert_same_bits(lora_model(jnp.float16).head.kernel, trainer.model.head.kernel)
    momentum = optax.tree.get(nnx.as_pure(trainer.optimizer.opt_state), "mu")
    assert len(jax.tree.leaves(momentum)) == 6  # two factors for each of three layers


def test_dynamic_scale_decreases_until_gradients_are_finite() -> None:
    too_large = functools.partial(dynamic, scaler=jmpscale.dynamic(2.0**40, max_scale=2.0**40))
    batches = make_batches(STEPS)
    trainer = train(too_large, batches)
    finite = np.isfinite(logged(trainer, "grad_norm"))
    expected = train(unscaled, [batches[i] for i in np.flatnonzero(finite)], jnp.float32)
    assert not finite[0]
    assert scaler_of(trainer).skipped == np.sum(~finite) < 10
    assert scaler_of(trainer).loss_scale == 2.0 ** (40 - np.sum(~finite))
    assert final_loss(trainer) == pytest.approx(final_loss(expected), abs=1e-3)


@pytest.mark.parametrize(("way", "scale_after"), [("static", 1.0), ("dynamic", 2.0**24)])
def test_overflow_changes_neither_parameters_nor_optimizer_state(way: str, scale_after: float) -> None:
    batches = make_batches(OVERFLOW_AT + 1, OVERFLOW_AT)
    before, after = train(WAYS[way], batches[:-1]), train(WAYS[way], batches)
    assert_same_bits(gated_state(before), gated_state(after))
    assert scaler_of(before).skipped == 0
    assert scaler_of(after).skipped == 1
    assert scaler_of(after).loss_scale == scale_after  # the dynamic one grew after 10 steps


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "mode"), [("loss", "train"), ("loss", "eval"), ("grad_norm", "train")])
def test_logged_values_are_in_true_units(way: str, name: str, mode: str) -> None:
    expected = logged(trained("unscaled", "all_parameters", jnp.float32), name, mode)
    np.testing.assert_allclose(logged(trained(way, "all_parameters"), name, mode), expected, rtol=1e-3)


ACCUMULATING = {"transform_optimizer": accumulate}


@pytest.mark.parametrize(
    ("way", "accumulation"),
    [(static, {}), (dynamic, {}), (dynamic_patient, ACCUMULATING)],
    ids=["static", "dynamic", "dynamic_with_accumulation"],
)
def test_training_continues_identically_from_a_checkpoint(
    way: Callable[..., PeftTrainer], accumulation: dict[str, Any], tmp_path: Any
) -> None:
    batches = make_batches(STEPS, OVERFLOW_AT)
    unbroken = train(way, batches, **accumulation)
    train(way, batches[:16], **accumulation, checkpoint_root_directory=str(tmp_path))
    restored = make_trainer(way, **accumulation, checkpoint_root_directory=str(tmp_path))
    assert restored.iter_steps == 16
    assert scaler_of(restored).skipped == 1
    restored.train(batches)
    assert restored.iter_steps == STEPS
    assert_same_bits(whole_state(unbroken), whole_state(restored))


@pytest.mark.filterwarnings("ignore:.*MultiSteps:UserWarning")
def test_accumulation_by_tunix_without_overflow_trains_like_float32() -> None:
    batches = make_batches(ACCUMULATED * STEPS)
    trainer = train(static, batches, gradient_accumulation_steps=ACCUMULATED)
    expected = train(unscaled, batches, jnp.float32, gradient_accumulation_steps=ACCUMULATED)
    assert final_loss(trainer) == pytest.approx(final_loss(expected), abs=1e-3)


def test_accumulation_by_tunix_warns() -> None:
    with pytest.warns(UserWarning, match="MultiSteps"):
        make_trainer(static, gradient_accumulation_steps=ACCUMULATED)


@pytest.mark.parametrize("way", [static, dynamic_patient], ids=WAYS)
def test_accumulation_inside_skips_only_the_micro_batch_that_overflows(way: Callable[..., PeftTrainer]) -> None:
    batches = make_batches(ACCUMULATED * STEPS + 1, OVERFLOW_AT)
    good = batches[:OVERFLOW_AT] + batches[OVERFLOW_AT + 1 :]
    trainer, without = train(way, batches, **ACCUMULATING), train(way, good, **ACCUMULATING)
    expected = train(unscaled, good, jnp.float32, gradient_accumulation_steps=ACCUMULATED)
    assert scaler_of(trainer).skipped == 1
    assert_same_bits(gated_state(without), gated_state(trainer))
    assert final_loss(trainer) == pytest.approx(final_loss(expected), abs=1e-3)
