"""Loss functions with one fault each, on the line with the comment `# fault`, and healthy loss functions."""

import inspect

import equinox
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import jmpscale

from arrays import normal

H = jnp.float16


def fault_line(fun):
    """Returns the number of the line of a function with the comment `# fault`, None if no line has it."""
    lines, first = inspect.getsourcelines(inspect.unwrap(fun))
    return next((i for i, line in enumerate(lines, first) if "# fault" in line), None)


def layer_norm(z):
    return (z - z.mean(-1, keepdims=True)) * jax.lax.rsqrt(z.var(-1, keepdims=True) + 1e-5)


W, X = normal(0, 8, 8), normal(1, 16, 8)
OUT = normal(2, 8, 4, scale=0.1)
LARGE = 1e5 * X  # a batch that is not normalized


# --- Overflow in the forward pass. ---


def negative_overflow(w, x):
    z = -jnp.abs(x).astype(H) @ jnp.abs(w).astype(H)  # fault
    z = z + H(1)
    return jnp.mean(jnp.tanh(z * H(1e-5)).astype(jnp.float32))


def overflow_before_gelu(w, x):
    w = w.astype(H)
    z = (x / 4).astype(H) @ w  # fault
    z = z + w[:1]
    return jnp.mean((jax.nn.gelu(z) @ OUT.astype(H)).astype(jnp.float32) ** 2)


def sentinel_of_missing_values(w, x):
    half = x.astype(H)  # fault
    return jnp.mean(jnp.tanh(half @ w.astype(H)).astype(jnp.float32) ** 2)


def squares_overflow(w, x):
    h = (x.astype(H) @ w.astype(H)) * H(300)
    variance = jnp.mean(h * h, axis=-1, keepdims=True)  # fault
    return jnp.mean((h * jax.lax.rsqrt(variance + H(1))).astype(jnp.float32) * OUT[0, 0])


def overflow_and_rounding(w, x):
    z = x.astype(H) @ w.astype(H) * H(100)
    square = z * z  # fault
    return jnp.mean(jnp.sin(1e-3 * square.astype(jnp.float32)))


def loss_overflows(w, x):
    per_example = (x.astype(H) @ w.astype(H)) ** 2
    return jnp.sum(per_example * H(600)).astype(jnp.float32)  # fault


def gram_overflows(w, x):
    features = jax.nn.relu(x @ w)
    gram = features.T @ features  # fault
    return jnp.mean((gram / len(x) - 1.0) ** 2)


def linear_attention(w, x):
    q, k = jax.nn.relu(x @ w), jax.nn.relu(x @ w.T)
    totals = k.T @ jnp.pad(x, ((0, 0), (0, 1)), constant_values=1)  # the last column is the normalizer
    out = q @ totals  # fault
    return jnp.mean((out[:, :-1] / (out[:, -1:] + 1e-6)) ** 2)


def second_derivative(w, x):
    def u(t):
        h = jnp.sin(1e3 * t * w[0])
        return (h @ jnp.tanh(w)).sum()  # fault

    return jnp.mean(jax.vmap(jax.jacfwd(jax.jacfwd(u)))(x[:, 0]) ** 2) * 1e-12


def combined_constants(w, x):
    z = (1e-4 * x).astype(H) @ w.astype(H)
    z = z * H(1024) * H(1024)
    return jnp.mean(jnp.sin(z).astype(jnp.float32))


def overflow_in_a_scan(w, x):
    def layer(h, wi):
        h = h @ wi.astype(H)  # fault
        return h, None

    h, _ = jax.lax.scan(layer, x.astype(H), jnp.stack([w * 30] * 6))
    return jnp.mean(jnp.tanh(h.astype(jnp.float32) * 1e-9))


def overflow_in_a_while_loop(w, x):
    def grow(state):
        h, i = state
        h = h * H(30)  # fault
        return h, i + 1

    h, _ = jax.lax.while_loop(lambda state: state[1] < 4, grow, (jax.lax.stop_gradient(x.astype(H)), 0))
    return jnp.mean(jnp.tanh(h.astype(jnp.float32) * 1e-6) @ w)


def overflow_in_a_branch(w, x):
    def large(h):
        return h * H(60000)  # fault

    h = jax.lax.cond(x[0, 0] < 100, large, lambda h: h, x.astype(H) @ w.astype(H))
    return jnp.mean(jnp.tanh(h.astype(jnp.float32) * 1e-6))


@jax.checkpoint
def _large_block(h, w):
    h = h @ w  # fault
    return jnp.tanh(h.astype(jnp.float32) * 1e-6)


def overflow_in_a_checkpointed_function(w, x):
    return jnp.mean(_large_block(x.astype(H) * H(10000), w.astype(H)))


# --- Overflow and underflow in the backward pass, at any scale. JAX attributes a rule to the line of the call. ---


@jax.custom_vjp
def normalized_backward(x):
    return x


def _normalize(_, g):
    size = jnp.max(jnp.abs(g))
    return ((g / size * H(60000) + g / size * H(60000)) * H(2.0**-20) * size,)


normalized_backward.defvjp(lambda x: (x, None), _normalize)


@jax.custom_vjp
def tiny_backward(x):
    return x


def _vanish(_, g):
    size = jnp.max(jnp.abs(g))
    return ((g / size * H(2.0**-13) * H(2.0**-13)) * H(2.0**10) * size,)


tiny_backward.defvjp(lambda x: (x, None), _vanish)


def gradients_of_two_sizes(params, x):
    large = params["large"].astype(H) * H(2.0**12)
    small = params["small"].astype(H) * H(2.0**-12)  # fault
    return (large.astype(jnp.float32).sum() + small.astype(jnp.float32).sum() * 2.0**-20) * x[0, 0]


# --- Gradients that need another scale. ---


def min_max_of_equal_scores(w, x):
    scores = (0 * x + x[:1]) @ w[:, 0]
    scores = (scores - scores.min()) / (scores.max() - scores.min() + 1e-6)
    return jnp.mean((scores - x[:, 0]) ** 2)


def wrong_at_one_scale(w, x):
    return jnp.mean(reversed_backward(jnp.tanh(x @ w)) ** 2)


@jax.custom_vjp
def reversed_backward(x):
    return x


def _reverse(_, g):
    largest = jnp.max(jnp.abs(g))  # 0.015 times the scale
    return (jnp.where((largest > 11) & (largest < 22), -g, g),)


reversed_backward.defvjp(lambda x: (x, None), _reverse)


# --- A value of the forward pass that a derivative rule saves in half precision, and casts up. ---


@jax.custom_vjp
def root_mean_square_norm(x, gain):
    return _normalize_forward(x, gain)[0]


def _normalize_forward(x, gain):
    square = jnp.mean(x**2, -1, keepdims=True)
    inverse = jax.lax.rsqrt(square).astype(H)  # fault
    return x * jax.lax.rsqrt(square) * gain, (x, gain, inverse)


def _normalize_backward(residuals, g):
    x, gain, inverse = residuals
    inverse = inverse.astype(jnp.float32)
    normalized = x * inverse
    mean = jnp.mean(g * gain * normalized, -1, keepdims=True)
    return inverse * (g * gain - normalized * mean), (g * normalized).sum(0, keepdims=True)


root_mean_square_norm.defvjp(_normalize_forward, _normalize_backward)


def reciprocal_saved_in_half(params, x):
    h = (x @ params["w"]).astype(H).astype(jnp.float32) * 1e-6
    return jnp.mean((root_mean_square_norm(h, params["gain"]) - 1) ** 2)


# --- Underflow and poles in the forward pass. ---


def variance_underflows(w, x):
    h = (x * 1e-5).astype(H) @ w.astype(H)
    square = h * h  # fault
    return jnp.mean((h * jax.lax.rsqrt(square.mean(-1, keepdims=True))).astype(jnp.float32) * OUT[0, 0])


def exp_without_maximum(w, x):
    e = jnp.exp((x.astype(H) @ w.astype(H)) * H(2))  # fault
    return jnp.mean(-jnp.log(e[:, 0] / e.sum(-1)).astype(jnp.float32))


def clipped_cross_entropy(w, x):
    z = (x.astype(H) @ w.astype(H)) * H(2)
    p = jax.nn.sigmoid(z)
    p = jnp.clip(p, H(1e-7), H(1 - 1e-7))
    return -jnp.mean((jnp.log(p) + jnp.log(H(1) - p)).astype(jnp.float32))  # fault


def transducer_normalizer(w, x):
    first, second = x @ w, x @ w.T
    exps = [jnp.exp(z - z.max(-1, keepdims=True)) for z in (first, second)]
    total = exps[0] @ exps[1].T  # fault
    return jnp.mean(jnp.log(total + jnp.finfo(jnp.float32).tiny)) - jnp.mean(first + second)


def log_mel(w, x):
    power = (3e-4 * (x @ w)) ** 2
    bands = power @ jnp.abs(OUT)  # fault
    return jnp.mean(jnp.log(jnp.maximum(bands, 1e-10)) * (x @ OUT))


# --- Constants. ---


def quotient_by_a_large_constant(w, x):
    losses = (x.astype(H) @ w.astype(H)) ** 2
    with np.errstate(over="ignore"):
        losses = losses / H(2.0**22)
    return jnp.sum(losses).astype(jnp.float32)


def product_with_a_small_constant(w, x):
    losses = (x.astype(H) @ w.astype(H)) ** 2
    losses = losses * 1e-9
    return jnp.sum(losses).astype(jnp.float32)


def epsilon_of_zero(w, x):
    h = jax.nn.relu(x.astype(H) @ w.astype(H) - H(100))
    norm = jnp.sqrt((h * h).sum(-1, keepdims=True) + 1e-9)
    return jnp.mean((h / norm).astype(jnp.float32) + h.astype(jnp.float32))  # fault


# --- Rounding. ---


def gaussian_process(log_length, x, y):
    z = x * jnp.exp(log_length)
    squares = (z**2).sum(-1)
    products = z @ z.T  # fault
    kernel = jnp.exp(-0.5 * (squares[:, None] + squares[None] - 2 * products)) + 1e-4 * jnp.eye(len(x))
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

    total, _ = jax.lax.scan(add, H(2048), xs[:100])  # above 2048, the distance of two numbers is 2
    return (total.astype(jnp.float32) / 1000 - 1.9) ** 2


def large_positions(w, x):
    positions = jnp.arange(4096, dtype=jnp.float32) + 0.5
    angles = positions.astype(H)[:, None] * jnp.float16([[1.0, 0.5]])  # fault
    return jnp.mean((jnp.sin(angles) @ w[:2].astype(H)).astype(jnp.float32) * jnp.sin(positions)[:, None])


def image_positions(w, x):
    grid = jnp.stack(jnp.meshgrid(jnp.arange(64.0), jnp.arange(64.0)), -1).reshape(-1, 2) * 256 + 0.3
    angles = jnp.tile(grid, 4) @ (jnp.tile(jnp.array([[1.0, 0.3], [0.7, 1.0]]), (4, 1)) / 4)  # fault
    return jnp.mean((jnp.sin(angles) @ w[:2]) * jnp.sin(grid[:, :1]))


def cumulative_sum(w, x):
    total = jnp.cumsum(x.astype(H) @ w.astype(H) + H(8), axis=0)  # fault
    return jnp.mean((total[1:] - total[:-1] - H(8)).astype(jnp.float32) ** 2)


def embedding_counts(w, tokens):
    table = w.astype(H)
    one = table[tokens]  # fault
    return jnp.sum(one.astype(jnp.float32)) * 2.0**-12


def root_of_a_rounded_difference(w, x):
    z = (1 + 1e-4 * jnp.cosh(w)).astype(H)  # fault
    return jnp.mean(jnp.sqrt(z - H(1)).astype(jnp.float32))


# --- Not finite in float32 either. ---


def masked_row(w, x):
    mask = jnp.arange(len(x))[:, None] > 0
    scores = jnp.where(mask, x @ w, -jnp.inf)
    p = jax.nn.softmax(scores)  # fault
    return jnp.mean(p**2)


def nan_after_an_infinity(w, x):
    z = jax.lax.stop_gradient(x @ w)
    large = jnp.exp(jnp.abs(z) * 1e4).mean()
    return large + jnp.log(-jnp.abs(z)).mean() + jnp.mean(w)  # fault


def masked_nan_and_infinity(w, x):
    z = x @ w
    zero = jnp.where(z > 0, jnp.log(z), 0.0).mean() * 0
    return jax.lax.stop_gradient(zero) + jnp.exp(z * 1e4).mean()  # fault


def infinity_in_the_line_above(w, x):
    z = x * 3e38 * 3e38  # fault
    return jnp.mean(jnp.tanh(z @ w))


def norm_at_zero(w, x):
    difference = x @ w - x @ w
    return jnp.mean(jnp.sqrt(jnp.sum(difference**2, axis=-1)))  # fault


def infinite_derivative(w, x):
    identity = jax.custom_vjp(lambda w: w)
    identity.defvjp(lambda w: (w, None), lambda _, g: (g * jnp.inf,))
    return jnp.mean(x @ identity(w))  # fault


# --- Models of frameworks in which the result of a layer overflows before a normalization. ---


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        z = linen.Dense(16, dtype=H, name="hidden")(x)  # fault
        return linen.Dense(4, dtype=H, name="readout")(linen.LayerNorm(dtype=H)(z))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 16, dtype=H, rngs=rngs)
        self.norm = nnx.BatchNorm(16, dtype=H, rngs=rngs)
        self.readout = nnx.Linear(16, 4, dtype=H, rngs=rngs)

    def __call__(self, x):
        z = self.hidden(x)  # fault
        return self.readout(self.norm(z))


class Equinox(equinox.Module):
    hidden: equinox.nn.Linear
    readout: equinox.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.hidden, self.readout = equinox.nn.Linear(8, 16, key=keys[0]), equinox.nn.Linear(16, 4, key=keys[1])

    def __call__(self, x):
        z = self.hidden(x) * H(64)  # fault
        return self.readout(layer_norm(z.astype(jnp.float32)).astype(H))


def haiku_network(x):
    z = haiku.Linear(16, name="hidden")(x) * H(64)  # fault
    return haiku.Linear(4, name="readout")(layer_norm(z.astype(jnp.float32)).astype(H))


HAIKU = haiku.transform(haiku_network)


def linen_loss(params, x):
    return jnp.mean(Linen().apply(params, x).astype(jnp.float32) ** 2)


def nnx_loss(model, x):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def equinox_loss(model, x):
    return jnp.mean(jax.vmap(jmpscale.cast(model, H))(x.astype(H)).astype(jnp.float32) ** 2)


def haiku_loss(params, x):
    return jnp.mean(HAIKU.apply(jmpscale.cast(params, H), None, x.astype(H)).astype(jnp.float32) ** 2)


# --- Healthy programs. ---


@jax.custom_vjp
def quantized(x, unit):
    return (x / unit).astype(H)


def _quantize_backward(residuals, g):
    half, unit = residuals
    g = g.astype(jnp.float32)
    return g / unit, -(g * half.astype(jnp.float32)).sum() / unit


quantized.defvjp(lambda x, unit: (quantized(x, unit), (quantized(x, unit), unit)), _quantize_backward)


def quantizer(params, x):
    """Returns a loss whose gradient by the unit is zero but for the last digits of a sum."""
    return jnp.mean((quantized(x @ params["w"], params["unit"]).astype(jnp.float32) * params["unit"] - 1) ** 2)


def mlp(w, x):
    return jnp.mean((jnp.tanh(x @ w) @ OUT) ** 2)


def mlp_by_hand(w, x):
    half, x, out = jmpscale.cast((w, x, OUT), H)
    return jnp.mean((jnp.tanh(x @ half) @ out).astype(jnp.float32) ** 2)


def bias_before_normalization(params, x):
    half, x = jmpscale.cast((params, x), H)
    z = (x @ half["w"] + half["b"][None]).astype(jnp.float32)
    z = (z - z.mean(0, keepdims=True)) * jax.lax.rsqrt(z.var(0, keepdims=True) + 1e-5)
    return jnp.mean((jax.nn.relu(z).astype(H) @ OUT.astype(H)).astype(jnp.float32) ** 2)


def attention(mask):
    def loss(w, x):
        q, k, v = jnp.split(x.astype(H) @ jnp.tile(w.astype(H), (1, 3)), 3, axis=-1)
        scores = jnp.einsum("bqd,bkd->bqk", q, k)
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
        return jnp.mean(jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v).astype(jnp.float32) ** 2)

    return loss


CAUSAL = np.tri(16, dtype=bool)[None]
MASKS = {name: np.where(CAUSAL, 0, np.float16(name)) for name in ("-65504", "-inf")} | {"boolean": CAUSAL}


def saturated_softmax(params, x):
    q, k, v = (x @ params[name] for name in "qkv")
    p = jax.nn.softmax(jnp.matmul(q, k.T, precision="highest"))  # nearly all probabilities are 0 or 1
    return jnp.mean((p @ v - 1) ** 2)


def saturated_activation(w, x):
    large = jnp.tanh((1e3 * x).astype(H) @ (100 * w).astype(H))
    return jnp.mean((large + x.astype(H) @ w.astype(H)).astype(jnp.float32) * (x @ OUT)[:, :1])


def while_loop(w, x):
    def step(state):
        y, i = state
        return y - (y**3 - y0) / (3 * y**2 + 1), i + 1

    y0 = jax.lax.stop_gradient(x)
    y, _ = jax.lax.while_loop(lambda state: state[1] < 5, step, (jnp.ones_like(y0), 0))
    return jnp.mean((y.astype(H) @ w.astype(H)).astype(jnp.float32) ** 2)


@jax.custom_vjp
def clip_cotangent(x):
    return x


clip_cotangent.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-2, 1e-2),))


def checkpointed(w, x):
    block = jax.checkpoint(lambda h: jnp.tanh(h @ w))
    return jnp.mean(block(block(x)) ** 2)


def zero_derivative(params, x):
    return jnp.mean((x @ params["w"]) ** 2) + 0 * jnp.sum(params["unused"])


def critic(w, x):
    """Returns the difference of two means, which is small, so its relative error is large."""
    score = jnp.tanh(x @ w) @ OUT
    return score[::2].mean() - score[1::2].mean()


def ctc(w, x):
    logits = x.reshape(2, 8, 8) @ w
    labels = jnp.array([[1, 2], [3, 3]])
    return jnp.mean(optax.ctc_loss(logits, jnp.zeros((2, 8)), labels, jnp.zeros((2, 2))))
