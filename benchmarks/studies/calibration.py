"""How to find the loss scale: the plain rule against others. Run with `python -m benchmarks.studies.calibration`.

Three networks are trained in float32 while the distribution of their gradients is recorded at every step. Each rule is
then replayed on these records, and on two records made from them: spikes, and a stretch of huge gradients. A step
overflows if its largest gradient times the scale exceeds 65504. This ignores the gradients of activations, which a
float16 run also has. So the plain rule and calibration also train in float16, where their skipped steps are counted.
"""

import argparse
import functools
import pathlib
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets

import jmpscale

from benchmarks import record as records

STEPS = 10_000
TRAINED = 1_500  # recorded steps; the last thousand are repeated to fill STEPS
LARGEST = np.log2(65504.0)
SMALLEST = -25  # float16 rounds smaller values to zero
EXPONENTS = np.arange(-80, 41)  # bins of log2 |gradient|
RESULTS = pathlib.Path(__file__).with_suffix(".json")


# --- networks: each makes (loss_fn(params, batch, dtype), params, batches[steps], learning rate)


def photo():
    """A neural field fitted to a photograph."""
    image = jnp.asarray(sklearn.datasets.load_sample_image("china.jpg")[::16, ::16] / 255.0, jnp.float32)
    rows, columns = np.mgrid[0 : image.shape[0], 0 : image.shape[1]]
    centers = jnp.asarray(np.stack([rows, columns], -1).reshape(-1, 2) / 40.0, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 5)
    phases = centers @ (40.0 * jax.random.normal(keys[0], (2, 64)))
    features = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], -1)
    params = _dense(keys[1:], (128, 128, 128, 3))

    def loss_fn(params, batch, dtype):
        return jnp.mean((_mlp(params, batch[0], dtype) - batch[1]) ** 2)

    batch = features, image.reshape(-1, 3)
    return loss_fn, params, lambda _: batch, 2e-3


def text():
    """A character-level language model with one attention layer, on the documentation of Python itself."""
    codes = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode("ascii", "replace"), np.uint8) % 128
    keys = jax.random.split(jax.random.key(0), 8)
    width, length, size = 64, 64, 16
    params = {
        "embed": 0.02 * jax.random.normal(keys[0], (128, width)),
        "place": 0.02 * jax.random.normal(keys[1], (length, width)),
        "qkv": jax.random.normal(keys[2], (width, 3 * width)) * width**-0.5,
        "mlp": _dense(keys[3:6], (width, 4 * width, width)),
        "out": jax.random.normal(keys[6], (width, 128)) * width**-0.5,
    }

    def loss_fn(params, batch, dtype):
        half = jax.tree.map(lambda p: p.astype(dtype), params)
        x = half["embed"][batch[:, :-1]] + half["place"][None]
        q, k, v = jnp.split(_norm(x) @ half["qkv"], 3, axis=-1)
        weights = jnp.einsum("btc,bsc->bts", q, k).astype(jnp.float32) * width**-0.5
        weights = jnp.where(jnp.tri(length, dtype=bool)[None], weights, -1e9)
        x = x + jax.nn.softmax(weights).astype(dtype) @ v
        x = x + _mlp(params["mlp"], _norm(x), dtype).astype(dtype)
        logits = (_norm(x) @ half["out"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def make_batch(step):
        starts = np.random.default_rng(step).integers(0, len(codes) - length - 1, size)
        return jnp.asarray(codes[starts[:, None] + np.arange(length + 1)], jnp.int32)

    return loss_fn, params, make_batch, 1e-3


def digits():
    """A convolutional network on scikit-learn's digits."""
    data = sklearn.datasets.load_digits()
    images, labels = jnp.asarray(data.images[..., None] / 16.0, jnp.float32), jnp.asarray(data.target)
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "conv": [
            jax.random.normal(keys[0], (3, 3, 1, 16)) / 3,
            jax.random.normal(keys[1], (3, 3, 16, 32)) / 12,
        ],
        "dense": _dense(keys[2:], (512, 10)),
    }

    def loss_fn(params, batch, dtype):
        x = batch[0].astype(dtype)
        for kernel in params["conv"]:
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, kernel.astype(dtype), (1, 1), "SAME", dimension_numbers=dims)
            x = jax.nn.relu(x)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = _mlp(params["dense"], x.reshape(len(x), -1), dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def make_batch(step):
        chosen = np.random.default_rng(step).integers(0, len(labels), 64)
        return images[chosen], labels[chosen]

    return loss_fn, params, make_batch, 1e-3


def _dense(keys, widths):
    pairs = zip(keys, widths, widths[1:], strict=False)
    return [(jax.random.normal(k, (n, m)) * n**-0.5, jnp.zeros(m)) for k, n, m in pairs]


def _mlp(params, x, dtype):
    x = x.astype(dtype)
    for weights, biases in params[:-1]:
        x = jax.nn.gelu(x @ weights.astype(dtype) + biases.astype(dtype))
    weights, biases = params[-1]
    return (x @ weights.astype(dtype) + biases.astype(dtype)).astype(jnp.float32)


def _norm(x):
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    return (centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


# --- recording and replaying


def _train(network, dtype, scaler, steps, look):
    """Trains, and returns the stacked results of `look(grads, finite)` of all steps, and the final scaler."""
    loss_fn, params, make_batch, rate = network()
    tx = optax.adamw(rate)

    @jax.jit
    def train_step(params, opt_state, scaler, batch):
        fn = functools.partial(loss_fn, batch=batch, dtype=dtype)
        loss, grads = jmpscale.value_and_grad(fn)(scaler, params)
        finite = jmpscale.all_finite((loss, grads))
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)
        return params, opt_state, jmpscale.update(scaler, finite, loss=loss), look(grads, finite)

    opt_state, seen = tx.init(params), []
    for step in range(steps):
        params, opt_state, scaler, record = train_step(params, opt_state, scaler, make_batch(step))
        seen.append(record)
    return jax.tree.map(lambda *x: np.stack(x), *jax.device_get(seen)), scaler


def _histogram(grads, _):
    """Counts the nonzero gradients by exponent, and takes the largest."""
    values = jnp.concatenate([jnp.abs(g.astype(jnp.float32)).ravel() for g in jax.tree.leaves(grads)])
    exponents = jnp.floor(jnp.log2(values)).astype(jnp.int32)
    bins = jnp.clip(exponents - EXPONENTS[0], 0, len(EXPONENTS) - 1)
    return jnp.zeros(len(EXPONENTS)).at[bins].add(values > 0), jnp.max(values)


def record(network):
    """Returns log2 of the largest gradient, and the fraction of nonzero gradients below each exponent, by step."""
    (counts, largest), _ = _train(network, jnp.float32, jmpscale.disabled(), TRAINED, _histogram)
    below = np.cumsum(counts, axis=1) - counts
    repeat = np.r_[np.arange(TRAINED), np.resize(np.arange(TRAINED - 1000, TRAINED), STEPS - TRAINED)]
    return np.log2(largest)[repeat], (below / counts.sum(1, keepdims=True))[repeat]


def spikes(trace):
    """One step in two hundred has gradients up to 2^12 times as large."""
    rng = np.random.default_rng(0)
    largest, below = trace
    return largest + np.where(rng.random(STEPS) < 1 / 200, rng.uniform(4, 12, STEPS), 0), below


def collapse(trace):
    """From step 4000 on gradients are 2^20 times as large, for thirty steps."""
    largest, below = trace
    stretch = (np.arange(STEPS) >= 4000) & (np.arange(STEPS) < 4030)
    return largest + 20.0 * stretch, below


# --- rules: from a start (log2 of the scale) and the largest gradients to log2 of the scale used at each step


def plain(start, largest, **settings):
    """The rule of `jmpscale.update`."""

    def step(state, top):
        return jmpscale.update(state, jnp.log2(state.loss_scale) + top <= LARGEST), jnp.log2(state.loss_scale)

    return np.asarray(
        jax.lax.scan(step, jmpscale.dynamic(2.0**start, **settings), jnp.asarray(largest, jnp.float32))[1]
    )


def calibrated(start, largest, headroom):
    """Sets the scale by the first batch, and then adapts it by the plain rule."""
    return plain(np.clip(np.floor(LARGEST - headroom - largest[0]), 0, 32), largest)


def eager_start(start, largest):
    """Doubles after every finite step until the first overflow, and then follows the plain rule."""
    scales, scale = [], float(start)
    for top in largest:
        scales.append(scale)
        if scale + top > LARGEST:
            break
        scale = min(scale + 1, 32)
    rest = plain(max(scale - 1, 0), largest[len(scales) :]) if len(scales) < len(largest) else []
    return np.r_[scales, rest]


def predictive(start, largest, headroom, decay):
    """Keeps `headroom` bits above a slowly decaying maximum; an overflow raises that maximum by a bit."""
    scales, scale, slow = [], float(start), -np.inf
    for top in largest:
        scales.append(scale)
        slow = LARGEST - headroom - scale + 1 if scale + top > LARGEST else max(top, slow - decay)
        scale = float(np.clip(np.floor(LARGEST - headroom - slow), 0, 32))
    return np.array(scales)


RULES = {
    "plain": plain,
    "plain, growth_interval=200": functools.partial(plain, growth_interval=200),
    "calibrated, 2 bits": functools.partial(calibrated, headroom=2),
    "calibrated, 4 bits": functools.partial(calibrated, headroom=4),
    "eager start": eager_start,
    "predictive, 2 bits, 0.01 a step": functools.partial(predictive, headroom=2, decay=0.01),
    "predictive, 4 bits, 0.001 a step": functools.partial(predictive, headroom=4, decay=0.001),
}


def judge(scales, trace):
    """Returns the skips, the steps until the scale is right, the fraction that underflows, and the steps to recover."""
    largest, below = trace
    finite = scales + largest <= LARGEST
    ahead = np.lib.stride_tricks.sliding_window_view(np.r_[largest, np.full(99, largest[-1])], 100)
    right = np.abs(np.floor(LARGEST - np.median(ahead, axis=1)) - 1 - scales) <= 3  # within three bits of its best
    underflow = np.array(
        [b[np.clip(int(SMALLEST - s) - EXPONENTS[0], 0, len(b) - 1)] for b, s in zip(below, scales, strict=True)]
    )
    return {
        "skipped": int((~finite).sum()),
        "steps until right": int(np.argmax(right)) if right.any() else STEPS,
        "underflow": float(underflow.mean()),
        "right again after step 4030": int(np.argmax(right[4030:])) if right[4030:].any() else STEPS,
    }


def measure():
    """Replays every rule on every record, and runs two of them in float16."""
    networks = {"photo": photo, "text": text, "digits": digits}
    traces = {name: record(network) for name, network in networks.items()}
    traces |= {"text, spikes": spikes(traces["text"]), "text, collapse": collapse(traces["text"])}
    replayed = {
        f"{task}, from 2^{start}": {rule: judge(fn(start, trace[0]), trace) for rule, fn in RULES.items()}
        for task, trace in traces.items()
        for start in (0, 16, 32)
    }
    in_float16 = {}
    for name, network in networks.items():
        for start in (0, 16, 32):
            flags, _ = _train(network, jnp.float16, jmpscale.dynamic(2.0**start), 300, lambda _, finite: finite)
            in_float16[f"{name}, plain from 2^{start}"] = int((~flags).sum())
        for headroom in (0, 2, 4):
            start = np.clip(np.floor(LARGEST - headroom - traces[name][0][0]), 0, 32)
            flags, _ = _train(network, jnp.float16, jmpscale.dynamic(2.0**start), 300, lambda _, finite: finite)
            in_float16[f"{name}, calibrated with {headroom} bits (2^{start:.0f})"] = int((~flags).sum())
    return {"replayed": replayed, "skipped in 300 float16 steps": in_float16}


def main():
    """Measures, prints a table, and writes the figures."""
    argparse.ArgumentParser(prog="python -m benchmarks.studies.calibration", description=__doc__).parse_args()
    figures = measure()
    for task, rules in figures["replayed"].items():
        print(task)
        for rule, numbers in rules.items():
            values = "  ".join(f"{k} {v:.2%}" if k == "underflow" else f"{k} {v:>5}" for k, v in numbers.items())
            print(f"  {rule:<34}{values}")
    for run, skipped in figures["skipped in 300 float16 steps"].items():
        print(f"{run:<48}{skipped:>4} skipped of 300, in float16")
    about = records.about("benchmarks.studies.calibration", jax.devices()[0].device_kind)
    records.write(RESULTS, {"about": about, **figures})


if __name__ == "__main__":
    main()
