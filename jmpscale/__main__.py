"""The demonstration, `python -m jmpscale`: training in float16 with and without loss scaling.

A small character-level language model, written in float32, is trained four times, from the same initial parameters and
on the same batches: in float32, with autocast to bfloat16, with autocast to float16, and with autocast to float16 and
loss scaling. Each step computes the loss of one shard of a large batch, as in data-parallel training. The loss is
divided by the size of the whole batch, so its gradients are small.
"""

import argparse
import functools
import io
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmpscale

Params: TypeAlias = dict[str, jax.Array]
Text: TypeAlias = tuple[np.ndarray, np.ndarray]  # the alphabet, and the characters as integers

SEQUENCES, LENGTH, WIDTH, HEADS, LAYERS = 16, 64, 64, 4, 2
SHARD_TOKENS = SEQUENCES * LENGTH  # in each step
LEARNING_RATE, WARMUP_STEPS = 3e-3, 50
GROWTH_INTERVAL = 40  # instead of 2000, because the runs are short
SAMPLE_LENGTH, SHOWN_LENGTH, TEMPERATURE = 400, 190, 0.6
AVERAGED_STEPS = 100  # for each loss in the table
PROGRESS_STEPS = 200  # from one printed step to the next
RUNS = ("float32", "bfloat16", "float16", "float16, jmpscale")


class Trained(NamedTuple):
    """The result of one training run."""

    history: dict[str, np.ndarray]  # the loss, the fraction of zero gradients, and the scaler's metrics, by step
    sample: str  # text written by the trained model
    params: Params  # after the last step

    def mean(self, name: str, end: int | None = None) -> float:
        """Averages a quantity over the last steps, or over the last steps until step `end`."""
        return float(self.history[name][:end][-AVERAGED_STEPS:].mean())


def init(key: jax.Array, characters: int) -> Params:
    """Initializes the parameters of a transformer, in float32."""
    sizes = {"embed": (characters, WIDTH, 1.0), "position": (LENGTH, WIDTH, 1.0), "unembed": (WIDTH, characters, 1.0)}
    for layer in (f"layer_{n}" for n in range(LAYERS)):
        sizes |= {f"{layer}/qkv": (WIDTH, 3 * WIDTH, 1.0), f"{layer}/out": (WIDTH, WIDTH, 0.2)}
        sizes |= {f"{layer}/up": (WIDTH, 4 * WIDTH, 1.0), f"{layer}/down": (4 * WIDTH, WIDTH, 0.2)}
    keys = dict(zip(sizes, jax.random.split(key, len(sizes)), strict=True))
    return {name: jax.random.normal(keys[name], (n, m)) * gain * n**-0.5 for name, (n, m, gain) in sizes.items()}


def normalize(x: jax.Array) -> jax.Array:
    """Applies layer normalization, computed in float32."""
    return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Applies causal attention; the softmax is computed in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(np.tri(LENGTH, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


def predict(params: Params, tokens: jax.Array) -> jax.Array:
    """Computes the logits of the next character, f32[sequences, LENGTH, characters], in the dtype of the parameters."""
    h = params["embed"][tokens] + params["position"]
    for layer in (f"layer_{n}" for n in range(LAYERS)):
        qkv = (normalize(h) @ params[f"{layer}/qkv"]).reshape(*tokens.shape, HEADS, -1)
        h = h + attend(*jnp.split(qkv, 3, -1)).reshape(h.shape) @ params[f"{layer}/out"]
        h = h + jax.nn.gelu(normalize(h) @ params[f"{layer}/up"]) @ params[f"{layer}/down"]
    return (normalize(h) @ params["unembed"]).astype(jnp.float32)


def shard_loss(params: Params, batch: jax.Array, batch_tokens: float) -> jax.Array:
    """Computes the loss of one shard of a batch of `batch_tokens` tokens.

    The gradients of all shards add up to the gradients of the mean loss over the batch.
    """
    logits = predict(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).sum() / batch_tokens


@jax.jit
def sample(params: Params, prompt: jax.Array, seed: int) -> jax.Array:
    """Samples the characters that follow a prompt, i32[LENGTH]."""

    def step(context: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = predict(params, context[None])[0, -1]
        character = jax.random.categorical(key, logits / TEMPERATURE).astype(context.dtype)
        return jnp.append(context[1:], character), character

    return jax.lax.scan(step, prompt, jax.random.split(jax.random.key(seed), SAMPLE_LENGTH))[1]


def train(name: str, text: Text, steps: int, batch_tokens: int, seed: int) -> Trained:
    """Trains the model on an encoded text; `name` is one of `RUNS`."""
    alphabet, tokens = text
    loss_fn: Callable[..., jax.Array] = functools.partial(shard_loss, batch_tokens=batch_tokens)  # in float32
    if name != "float32":
        loss_fn = jmpscale.autocast(loss_fn, dtype=name.removesuffix(", jmpscale"))  # the same in float16 or bfloat16
    scaler = jmpscale.dynamic(growth_interval=GROWTH_INTERVAL) if "jmpscale" in name else jmpscale.disabled()
    schedule = optax.warmup_cosine_decay_schedule(1e-4, LEARNING_RATE, min(WARMUP_STEPS, steps // 4), steps)
    tx = jmpscale.with_loss_scaling(optax.adam(schedule), scaler)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, batch: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        logged = {"loss": loss * (batch_tokens / SHARD_TOKENS), "zero": jmpscale.grad_report(grads).totals()["zero"]}
        return params, opt_state, logged | jmpscale.metrics(opt_state)

    params = jax.jit(init, static_argnums=1)(jax.random.key(seed), len(alphabet))
    opt_state: Any = tx.init(params)
    starts = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH, (steps, SEQUENCES, 1))
    batches = [tokens[start + np.arange(LENGTH + 1)] for start in starts]
    history = []
    for step, batch in enumerate(batches, 1):
        params, opt_state, logged = train_step(params, opt_state, batch)
        history.append(logged)
        if step % PROGRESS_STEPS == 0 or step == steps:
            print(
                f"{name}: step {step} of {steps}, loss of its batch {logged['loss']:.3f}", file=sys.stderr, flush=True
            )
    written = " ".join("".join(alphabet[sample(params, tokens[-LENGTH:], seed)]).split())[:SHOWN_LENGTH]
    return Trained(jax.tree.map(lambda *x: np.stack(x), *jax.device_get(history)), written, params)


def format_table(runs: Mapping[str, Trained]) -> str:
    """Formats the losses of each quarter of the steps, the zero gradients, the scale and the skips, and the texts.

    The digits are few, so that another machine prints the same. Equal texts are shown once.
    """
    [steps] = {len(run.history["loss"]) for run in runs.values()}
    ends = sorted({max(steps * quarter // 4, 1) for quarter in range(1, 5)})
    losses = "".join(f"{f'step {end}':>10}" for end in ends)
    lines = [
        "",
        f"A loss is a mean over {AVERAGED_STEPS} steps, in nats per character. Zero gradients: the fraction of zeros",
        f"in the gradients of all parameters, over the last {AVERAGED_STEPS} steps.",
        "",
        f"{'loss':<18}{losses}{'zero gradients':>16}{'final scale':>13}{'skipped':>9}",
    ]
    for name, run in runs.items():
        losses = "".join(f"{run.mean('loss', end):>10.2f}" for end in ends)
        scale, skipped = f"2^{np.log2(run.history['loss_scale'][-1]):.0f}", run.history["total_skips"][-1]
        scaling = f"{scale:>13}{skipped:>9}" if "jmpscale" in name else f"{'-':>13}{'-':>9}"
        lines.append(f"{name:<18}{losses}{run.mean('zero'):>16.0%}{scaling}")
    names: dict[str, list[str]] = {}  # of the runs, by their texts
    for name, run in runs.items():
        names.setdefault(run.sample, []).append(name)
    texts = [f"\nText of {'; '.join(found)}:\n{textwrap.fill(text, 100)}" for text, found in names.items()]
    return "\n".join(lines + texts)


def read_text() -> Text:
    """Returns the reference manual that Python contains for `help()`: its alphabet, and i32[length]."""
    alphabet, tokens = np.unique(list("\n".join(topics[name] for name in sorted(topics))), return_inverse=True)
    return alphabet, tokens.astype(np.int32)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the model four times, and prints a table and what the models write."""
    parser = argparse.ArgumentParser("python -m jmpscale", description="Train a language model four times.")
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("--steps", default=800, help="training steps of each run (default: 800)")
    add("--batch-tokens", default=2**19, help="number of tokens by which the loss is divided (default: 524288)")
    add("--seed", default=0, help="seed of the random numbers (default: 0)")
    options = parser.parse_args(argv)
    for name, low, high in (("steps", 1, 10**6), ("batch-tokens", SHARD_TOKENS, 2**30), ("seed", 0, 2**31 - 1)):
        if not low <= (value := getattr(options, name.replace("-", "_"))) <= high:
            parser.error(f"argument --{name}: must be between {low} and {high}, got {value}")
    text = read_text()
    runs = {name: train(name, text, options.steps, options.batch_tokens, options.seed) for name in RUNS}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal cannot print
    print(format_table(runs))


if __name__ == "__main__":
    main()
