"""What to keep in float32 in a bfloat16 program: `python -m benchmarks.studies.bfloat16`.

In each program, one expression or one part of the state is in bfloat16, and everything else in float32. It is trained
in this form, and entirely in float32, from the same values. Both losses are evaluated in float32. `diagnose_step` sees
the first step, and the step after training.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"

import jax
import jax.numpy as jnp
import optax

import jmpscale
from benchmarks import record, table

RESULTS = table.STUDIES / "bfloat16.json"
KEYS = jax.random.split(jax.random.key(0), 8)
STEPS = 1000
ADAM = optax.adam(1e-2)


def normal(i, *shape):
    return jax.random.normal(KEYS[i], shape)


# --- Expressions of the loss, computed in `dtype`. Each returns a loss function, its parameters and a batch. ---


def rotary(dtype):
    """Angles of rotary position embeddings, at positions from 1024 on."""
    frequencies = 1e4 ** -(jnp.arange(0, 32, 2) / 32)

    def loss_fn(params, x):
        positions = jnp.arange(1024, 1024 + len(x), dtype=dtype)[:, None]
        angle = (positions * frequencies.astype(dtype)).astype(jnp.float32)
        cos, sin = jnp.cos(angle), jnp.sin(angle)

        def rotated(v):
            a, b = jnp.split(v, 2)
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], 1)

        scores = jnp.where(jnp.tri(len(x), dtype=bool), rotated(params["q"]) @ rotated(params["k"]).T, -1e9)
        return jnp.mean(((jax.nn.softmax(scores) @ x)[8:] - x[5:-3]) ** 2)

    return loss_fn, {"q": normal(0, 32), "k": normal(1, 32)}, normal(2, 256, 8)


def time_steps(dtype):
    """Time steps of 0 to 999, and their angles."""

    def features(times, dtype):
        angle = times.astype(dtype)[:, None] * (1e3 ** -(jnp.arange(16) / 16)).astype(dtype)
        return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], 1).astype(jnp.float32)

    target = jnp.ones((32, 1)) / 4

    def loss_fn(params, times):
        return jnp.mean((features(times, dtype) @ params["w"] - features(times, jnp.float32) @ target) ** 2)

    return loss_fn, {"w": normal(0, 32, 1) / 8}, jnp.arange(1000.0)


def coordinates(dtype):
    """Coordinates near 100, and their distances."""

    def loss_fn(params, x):
        moved = (100 + x + params["shift"]).astype(dtype)
        squares = jnp.sum((moved[:, None] - moved) ** 2, -1).astype(jnp.float32)
        return jnp.mean((jnp.sqrt(squares + 1e-3) - jnp.sqrt(jnp.sum((x[:, None] - x) ** 2, -1) + 1e-3)) ** 2)

    return loss_fn, {"shift": normal(0, 32, 3) / 3}, normal(1, 32, 3)


def decay(dtype):
    """The decay of a state-space model over 512 steps."""

    def loss_fn(params, x):
        factor = jnp.exp(-0.01 * jax.nn.softplus(params["rate"])).astype(dtype)
        _, states = jax.lax.scan(lambda h, x: ((h * factor).astype(jnp.float32) + x,) * 2, jnp.zeros(16), x)
        _, target = jax.lax.scan(lambda h, x: (h * jnp.exp(-0.002) + x,) * 2, jnp.zeros(16), x)
        return jnp.mean((states - target) ** 2)

    return loss_fn, {"rate": normal(0, 16)}, normal(1, 512, 16)


def running_sum(dtype):
    """A cumulative sum over 2,048 positions."""

    def loss_fn(params, x):
        sums = jnp.cumsum(jax.nn.sigmoid(x * params["w"]).astype(dtype), 0).astype(jnp.float32)
        return jnp.mean((sums - jnp.cumsum(jax.nn.sigmoid(x * 0.5), 0)) ** 2) / len(x)

    return loss_fn, {"w": normal(0, 8)}, normal(1, 2048, 8)


def log_probabilities(dtype):
    """The difference of two sums of 512 log-probabilities, as in preference optimization."""

    def loss_fn(params, batch):
        chosen, rejected = (jax.nn.log_sigmoid(x * params["w"] - 4).astype(dtype).sum(1) for x in batch)
        return jnp.mean(jax.nn.softplus(-0.1 * (chosen - rejected).astype(jnp.float32)))

    return loss_fn, {"w": normal(0, 512) / 8}, (0.3 + normal(1, 64, 512), normal(2, 64, 512))


def small_variance(dtype):
    """A normalization of values near 8 with a small variance."""

    def loss_fn(params, batch):
        x = (8 + 0.05 * (batch[0] @ params["w"])).astype(dtype)
        normalized = (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + dtype(1e-6))
        return jnp.mean((normalized.astype(jnp.float32) @ params["out"] - batch[1]) ** 2)

    x = normal(0, 128, 16)
    return loss_fn, {"w": normal(1, 16, 32) / 4, "out": normal(2, 32, 1) / 6}, (x, jnp.sin(x[:, :1]))


LOSSES = {
    "angles of rotary embeddings": rotary,
    "time steps up to 999": time_steps,
    "coordinates near 100": coordinates,
    "decay over 512 steps": decay,
    "cumulative sum over 2,048 positions": running_sum,
    "sums of 512 log-probabilities": log_probabilities,
    "normalization of a small variance": small_variance,
}


def step_of(loss_fn):
    """Returns a step with a loss function, whose state is a pair of parameters and optimizer state."""

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


# --- Parts of the state, stored in `dtype`. ---

X = normal(0, 256, 8)
BATCH = X, jnp.sin(2 * X[:, :1]) + 0.1 * normal(1, 256, 1)
PARAMS = {"a": normal(2, 8, 64) / 3, "b": normal(3, 64, 1) / 8}
SMALL = optax.adam(3e-4)


def regression(params, batch):
    return jnp.mean((jnp.tanh(batch[0] @ params["a"]) @ params["b"] - batch[1]) ** 2)


def in_dtype(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def parameters(dtype):
    """Parameters, changed by Adam with a learning rate of 3e-4."""

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(regression)(in_dtype(params, jnp.float32), batch)
        updates, opt_state = SMALL.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (in_dtype(PARAMS, dtype), SMALL.init(PARAMS)), BATCH, lambda state: state[0]


def average(dtype):
    """An average of the parameters, with a decay of 0.999."""

    def step(state, batch):
        params, mean = state["params"], state["average"]
        loss, grads = jax.value_and_grad(regression)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
        mean = jax.tree.map(lambda m, p: (0.999 * m + 0.001 * p).astype(dtype), mean, params)
        return {"params": params, "average": mean}, loss

    return step, {"params": PARAMS, "average": in_dtype(PARAMS, dtype)}, BATCH, lambda state: state["average"]


def second_moment(dtype):
    """The second moment of Adam, with a decay of 0.999."""

    def step(state, batch):
        params, mean, square = state["params"], state["mean"], state["square"]
        loss, grads = jax.value_and_grad(regression)(params, batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda v, g: (0.999 * v + 0.001 * g**2).astype(dtype), square, grads)
        root = jax.tree.map(lambda v: jnp.sqrt(v.astype(jnp.float32)) + 1e-8, square)
        params = jax.tree.map(lambda p, m, r: p - 1e-3 * m / r, params, mean, root)
        return {"params": params, "mean": mean, "square": square}, loss

    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    large = jax.tree.map(lambda p: jnp.full_like(p, 1.0), PARAMS)  # as after a spike
    return step, {"params": PARAMS, "mean": zeros, "square": in_dtype(large, dtype)}, BATCH, lambda s: s["params"]


def accumulation(dtype):
    """The sum of the gradients of 1,024 micro-batches."""

    def step(params, batch):
        def add(total, rows):
            loss, grads = jax.value_and_grad(regression)(params, jax.tree.map(lambda x: x[rows], batch))
            return jax.tree.map(lambda t, g: t + g.astype(dtype), total, grads), loss

        rows = jnp.arange(4096).reshape(1024, 4) * 61 % 256
        total, losses = jax.lax.scan(add, in_dtype(jax.tree.map(jnp.zeros_like, params), dtype), rows)
        return jax.tree.map(lambda p, t: p - 1e-4 * t.astype(jnp.float32), params, total), losses.mean()

    return step, PARAMS, BATCH, lambda params: params


STATES = {
    "parameters, learning rate 3e-4": parameters,
    "average, decay 0.999": average,
    "second moment, decay 0.999": second_moment,
    "sum of 1,024 gradients": accumulation,
}


def trained(step, state, batch, steps):
    return jax.jit(lambda state: jax.lax.scan(lambda s, _: (step(s, batch)[0], None), state, None, steps)[0])(state)


def error_of(step, state, batch):
    """Returns the largest error of a gradient or a change, and what the summary begins with."""
    diagnosis = jmpscale.diagnose_step(step)(state, batch)
    errors = [diagnosis.gradient_error, *(change.error for change in diagnosis.changes)]
    return max(errors), diagnosis.summary


def row(name, half, full, batch, loss_of, steps=STEPS):
    """Trains a program in both forms; `half` and `full` are pairs of a step and a state."""
    ends = [trained(step, state, batch, steps) for step, state in (half, full)]
    first, late = (error_of(half[0], state, batch) for state in (half[1], ends[0]))
    found = {"program": name, "first error": first[0], "late error": late[0]}
    found |= {"first summary": first[1], "late summary": late[1]}
    found |= {"bfloat16 loss": float(loss_of(ends[0])), "float32 loss": float(loss_of(ends[1]))}
    print(found, flush=True)
    return found


def rows():
    for name, make in LOSSES.items():
        (half, params, batch), (full, *_) = make(jnp.bfloat16), make(jnp.float32)
        state = params, ADAM.init(params)
        yield row(
            name, (step_of(half), state), (step_of(full), state), batch, lambda s, full=full, b=batch: full(s[0], b)
        )
    for name, make in STATES.items():
        (step, state, batch, params_of), (full, start, *_) = make(jnp.bfloat16), make(jnp.float32)
        steps = {accumulation: 100, second_moment: 5 * STEPS}.get(make, STEPS)
        yield row(
            name,
            (step, state),
            (full, start),
            batch,
            lambda s, of=params_of, b=batch: regression(in_dtype(of(s), jnp.float32), b),
            steps,
        )


def main():
    record.add(RESULTS, {"about": record.about("benchmarks.studies.bfloat16", "cpu"), "programs": list(rows())})


if __name__ == "__main__":
    main()
