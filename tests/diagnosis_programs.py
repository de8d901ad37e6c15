"""Loss functions with one fault each, whose line has the comment `# fault`, and healthy ones without."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmpscale

H = jnp.float16


def normal(seed, *shape, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape)


def fault_line(fun):
    """Returns the source line of the fault in a function."""
    lines, first = inspect.getsourcelines(inspect.unwrap(fun))
    (offset,) = (i for i, line in enumerate(lines) if "# fault" in line)
    return first + offset


def layer_norm(z):
    return (z - z.mean(-1, keepdims=True)) * jax.lax.rsqrt(z.var(-1, keepdims=True) + 1e-5)


W, X = normal(0, 8, 8), normal(1, 16, 8)
OUT = normal(2, 8, 4, scale=0.1)
LARGE = 1e5 * X  # a batch that was never normalized


# --- Overflow in the forward pass. ---


def positive_overflow(w, x):
    z = jnp.abs(x).astype(H) @ jnp.abs(w).astype(H)  # fault
    return jnp.mean(jnp.tanh(z * H(1e-5)).astype(jnp.float32))


def negative_overflow(w, x):
    z = -jnp.abs(x).astype(H) @ jnp.abs(w).astype(H)  # fault
    z = z + H(1)
    return jnp.mean(jnp.tanh(z * H(1e-5)).astype(jnp.float32))


def overflow_before_gelu(w, x):
    w = w.astype(H)
    z = (x / 4).astype(H) @ w  # fault
    z = z + w[0]
    return jnp.mean((jax.nn.gelu(z) @ OUT.astype(H)).astype(jnp.float32) ** 2)


def overflow_before_layer_norm(w, x):
    z = (x / 4).astype(H) @ w.astype(H)  # fault
    z = z + H(1)
    return jnp.mean(layer_norm(z.astype(jnp.float32)).astype(H) @ OUT.astype(H)).astype(jnp.float32)


def sentinel_of_missing_values(w, x):
    half = x.astype(H)  # fault
    return jnp.mean(jnp.tanh(half @ w.astype(H)).astype(jnp.float32) ** 2)


def squares_overflow(w, x):
    h = (x.astype(H) @ w.astype(H)) * H(300)
    variance = jnp.mean(h * h, axis=-1, keepdims=True)  # fault
    return jnp.mean((h * jax.lax.rsqrt(variance + H(1))).astype(jnp.float32) * OUT[0, 0])


def loss_overflows(w, x):
    per_example = (x.astype(H) @ w.astype(H)) ** 2
    return jnp.sum(per_example * H(600)).astype(jnp.float32)  # fault


def gram_overflows(w, x):
    features = jax.nn.relu(x @ w)
    gram = features.T @ features  # fault
    return jnp.mean((gram / len(x) - 1.0) ** 2)


def overflow_in_a_scan(w, x):
    def layer(h, wi):
        h = h @ wi.astype(H)  # fault
        return h, None

    h, _ = jax.lax.scan(layer, x.astype(H), jnp.stack([w * 30] * 6))
    return jnp.mean(jnp.tanh(h.astype(jnp.float32) * 1e-9))


# --- Underflow and poles in the forward pass. ---


def variance_underflows(w, x):
    h = (x * 1e-5).astype(H) @ w.astype(H)
    square = h * h  # fault
    return jnp.mean((h * jax.lax.rsqrt(square.mean(-1, keepdims=True))).astype(jnp.float32) * OUT[0, 0])


def log_of_softmax(w, x):
    p = jax.nn.softmax((x.astype(H) @ w.astype(H)) * H(3))  # fault
    return -jnp.mean(jnp.log(p[:, 0]).astype(jnp.float32))


def exp_without_maximum(w, x):
    e = jnp.exp((x.astype(H) @ w.astype(H)) * H(2))  # fault
    return jnp.mean(-jnp.log(e[:, 0] / e.sum(-1)).astype(jnp.float32))


# --- Constants. ---


def quotient_by_a_large_constant(w, x):
    losses = (x.astype(H) @ w.astype(H)) ** 2
    with np.errstate(over="ignore"):
        losses = losses / H(2.0**22)  # fault
    return jnp.sum(losses).astype(jnp.float32)


def product_with_a_small_constant(w, x):
    losses = (x.astype(H) @ w.astype(H)) ** 2
    losses = losses * 1e-9  # fault
    return jnp.sum(losses).astype(jnp.float32)


def epsilon_of_zero(w, x):
    h = jax.nn.relu(x.astype(H) @ w.astype(H) - H(100))
    norm = jnp.sqrt((h * h).sum(-1, keepdims=True) + 1e-9)  # fault
    return jnp.mean((h / norm).astype(jnp.float32) + h.astype(jnp.float32))


def decay_of_an_average(w, x):
    h = x.astype(H) @ w.astype(H)
    update = h * (1 - 0.99999999)  # fault
    return jnp.sum(update).astype(jnp.float32)


# --- Rounding. ---


def gaussian_process(log_length, x, y):
    z = x * jnp.exp(log_length)
    squares = (z**2).sum(-1)
    products = z @ z.T  # fault
    kernel = jnp.exp(-0.5 * (squares[:, None] + squares - 2 * products)) + 1e-4 * jnp.eye(len(x))
    factor = jnp.linalg.cholesky(kernel)
    return 0.5 * y @ jax.scipy.linalg.cho_solve((factor, True), y) + jnp.log(jnp.diag(factor)).sum()


def ridge_head(w, x, y):
    h = jnp.tanh(x @ w)
    gram = h.T @ h + 1e-3 * jnp.eye(h.shape[1])  # fault
    return jnp.mean((h @ jnp.linalg.solve(gram, h.T @ y) - y) ** 2)


def variance_by_difference(w, x):
    h = (x.astype(H) @ w.astype(H)) * H(0.1) + H(100)
    variance = (h * h).mean(0) - h.mean(0) ** 2  # fault
    return jnp.mean(variance.astype(jnp.float32) ** 2)


def running_sum(w, xs):
    def add(total, x):
        total = total + jax.nn.softplus(x.astype(H) @ w.astype(H)).mean()  # fault
        return total, None

    total, _ = jax.lax.scan(add, H(0), xs)
    return (total.astype(jnp.float32) / len(xs) - 0.5) ** 2


def running_average(w, xs):
    def average(mean, x):
        mean = mean * H(0.9995) + jnp.tanh(x.astype(H) @ w.astype(H)).mean() * H(0.0005)  # fault
        return mean, None

    mean, _ = jax.lax.scan(average, H(1), xs)
    return mean.astype(jnp.float32) ** 2


def large_positions(w, x):
    positions = jnp.arange(4096, dtype=jnp.float32) + 0.5
    angles = positions.astype(H)[:, None] * jnp.float16([1.0, 0.5])  # fault
    return jnp.mean((jnp.sin(angles) @ w[:2].astype(H)).astype(jnp.float32) * jnp.sin(positions)[:, None])


def image_positions(w, x):
    grid = jnp.stack(jnp.meshgrid(jnp.arange(64.0), jnp.arange(64.0)), -1).reshape(-1, 2) * 64 + 0.3
    angles = grid @ jnp.array([[1.0, 0.3], [0.7, 1.0]])  # fault
    return jnp.mean((jnp.sin(angles) @ w[:2]) * jnp.sin(grid[:, :1]))


def embedding_counts(w, tokens):
    table = w.astype(H)
    one = table[tokens]  # fault
    return jnp.sum(one.astype(jnp.float32)) * 2.0**-12


# --- Not finite in float32 either. ---


def masked_row(w, x):
    scores = x @ w
    mask = jnp.arange(len(x))[:, None] > 0
    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))  # fault
    return jnp.mean(p**2)


def masked_nan_and_infinity(w, x):
    z = x @ w
    harmless = jnp.where(z > 0, jnp.log(z), 0.0).mean() * 0
    return jax.lax.stop_gradient(harmless) + jnp.exp(z * 1e4).mean()  # fault


def infinity_in_the_line_above(w, x):
    z = x * 3e38 * 3e38  # fault
    return jnp.mean(jnp.tanh(z @ w))


def norm_at_zero(w, x):
    difference = x @ w - x @ w
    return jnp.mean(jnp.sqrt(jnp.sum(difference**2, axis=-1)))  # fault


# --- Healthy programs. ---


def mlp(w, x):
    return jnp.mean((jnp.tanh(x @ w) @ OUT) ** 2)


def mlp_by_hand(w, x):
    half, x, out = jmpscale.cast((w, x, OUT), H)
    return jnp.mean((jnp.tanh(x @ half) @ out).astype(jnp.float32) ** 2)


def bias_before_normalization(params, x):
    half, x = jmpscale.cast((params, x), H)
    z = (x @ half["w"] + half["b"]).astype(jnp.float32)
    z = (z - z.mean(0)) * jax.lax.rsqrt(z.var(0) + 1e-5)
    return jnp.mean((jax.nn.relu(z).astype(H) @ OUT.astype(H)).astype(jnp.float32) ** 2)


def attention(mask):
    def loss(w, x):
        q, k, v = jnp.split(x.astype(H) @ jnp.tile(w.astype(H), (1, 3)), 3, axis=-1)
        scores = jnp.einsum("bqd,bkd->bqk", q, k)
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
        return jnp.mean(jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v).astype(jnp.float32) ** 2)

    return loss


CAUSAL = np.tri(16, dtype=bool)
with np.errstate(over="ignore"):
    MASKS = {
        f"{name} {shape}": np.broadcast_to(np.where(keep, 0, value), shape).astype(np.float16)
        for name, value in {"lowest": np.finfo(np.float16).min, "-inf": -np.inf, "-1e9": -1e9, "-1e4": -1e4}.items()
        for shape, keep in {
            (16, 16): CAUSAL,
            (1, 16, 16): CAUSAL,
            (2, 1, 16): np.arange(16) < 12,
            (16,): np.arange(16) < 12,
            (2, 16, 16): CAUSAL,
        }.items()
    }
MASKS["boolean"] = CAUSAL


def saturated_activation(w, x):
    return jnp.mean(jnp.tanh((1e3 * x).astype(H) @ (100 * w).astype(H)).astype(jnp.float32) * (x @ OUT)[:, :1])


def recurrent(w, xs):
    def cell(h, x):
        h = jnp.tanh(x @ w + h)
        return h, None

    h, _ = jax.lax.scan(cell, jnp.zeros(xs.shape[1:]), xs)
    return jnp.mean(h**2)


def newton_iterations(w, x):
    def step(state):
        y, i = state
        return y - (y**3 - x) / (3 * y**2 + 1), i + 1

    y, _ = jax.lax.while_loop(lambda state: state[1] < 5, step, (jnp.ones_like(x), 0))
    return jnp.mean((y @ w) ** 2)


@jax.custom_vjp
def clip_cotangent(x):
    return x


clip_cotangent.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-2, 1e-2),))


def clipped_backward_pass(w, x):
    return jnp.mean((clip_cotangent(jnp.tanh(x @ w)) - 1) ** 2)


def zero_derivative(params, x):
    return jnp.mean((x @ params["w"]) ** 2) + 0 * jnp.sum(params["unused"])


def critic(w, x):
    """The difference of two means, whose relative error is large because it is small."""
    score = jnp.tanh(x @ w) @ OUT
    return score[::2].mean() - score[1::2].mean()


def ctc(w, x):
    logits = x.reshape(2, 8, 8) @ w
    labels = jnp.array([[1, 2], [3, 3]])
    zeros = jnp.zeros((2, 8)), jnp.zeros((2, 2))
    return jnp.mean(optax.ctc_loss(logits, zeros[0], labels, zeros[1]))
