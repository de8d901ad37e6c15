"""Whether float16 needs loss scaling if the vocabulary is large. `python -m benchmarks.studies.vocabulary`.

The gradient of the logits of a softmax is spread over the vocabulary, so a larger vocabulary has smaller gradients. The
model is an embedding, one feed-forward block, and the transposed embedding. It learns a fixed successor of each word from
1,024 words per step, which follow Zipf's law. The loss is the ordinary mean over these words.
"""

import pathlib

import jax
import jax.numpy as jnp
import optax

import jmpscale
from benchmarks import record

STEPS, WORDS, FEATURES = 60, 1024, 32
VOCABULARIES = (2**7, 2**12, 2**15)
SEEDS = (0, 1)
RESULTS = pathlib.Path(__file__).with_suffix(".json")


def loss_fn(params, batch):
    """Computes the mean cross-entropy of the successors of a batch of words, in nats per word."""
    words, successors = batch
    hidden = params["embedding"][words]
    hidden += jax.nn.gelu(hidden @ params["up"]) @ params["down"]
    logits = hidden @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, successors).mean()


VARIANTS = {
    "float32": (loss_fn, jmpscale.disabled()),
    "float16": (jmpscale.autocast(loss_fn), jmpscale.disabled()),
    "float16, jmpscale": (jmpscale.autocast(loss_fn), jmpscale.dynamic()),
}


def train(fun, scaler, vocabulary, seed):
    """Trains the model; returns the mean loss of the last 10 steps, and the number of skipped steps."""
    tx = jmpscale.with_loss_scaling(optax.adam(1e-2), scaler)

    @jax.jit
    def train_step(params, opt_state, key):
        words = (vocabulary ** jax.random.uniform(key, (WORDS,))).astype(int)  # Zipf's law
        batch = words, (words * 7919 + 1) % vocabulary
        loss, grads = jmpscale.value_and_grad(fun)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    keys = jax.random.split(jax.random.key(seed), 3 + STEPS)
    params = {
        "embedding": 0.02 * jax.random.normal(keys[0], (vocabulary, FEATURES)),
        "up": jax.random.normal(keys[1], (FEATURES, 4 * FEATURES)) / FEATURES**0.5,
        "down": jax.random.normal(keys[2], (4 * FEATURES, FEATURES)) / (4 * FEATURES) ** 0.5,
    }
    opt_state, losses = tx.init(params), []
    for key in keys[3:]:
        params, opt_state, loss = train_step(params, opt_state, key)
        losses.append(loss)
    return float(jnp.stack(losses[-10:]).mean()), int(opt_state.scaler.total_skips)


def main():
    """Trains, prints, and writes the figures."""
    runs = []
    for vocabulary in VOCABULARIES:
        for seed in SEEDS:
            for name, (fun, scaler) in VARIANTS.items():
                loss, skipped = train(fun, scaler, vocabulary, seed)
                runs.append(
                    {"vocabulary": vocabulary, "seed": seed, "run": name, "loss": round(loss, 4), "skipped": skipped}
                )
                print(runs[-1], flush=True)
    about = record.about("benchmarks.studies.vocabulary", jax.devices()[0].device_kind) | {"steps": STEPS}
    record.add(RESULTS, {"about": about, "runs": runs})


if __name__ == "__main__":
    main()
