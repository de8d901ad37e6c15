"""In random programs, diagnose finds the same lines as a search over all sets of edited lines."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale

from tables import rows

# XLA may otherwise keep the precision of float32 between two operations in float16.
EXACT = {"xla_allow_excess_precision": False}
W = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)) / 3, jnp.float32)
X = jnp.asarray(np.random.default_rng(1).standard_normal((16, 8)), jnp.float32)
ARGS = W, X, jnp.ones(())
ACCURATE = ["jnp.tanh(h)", "h @ w.astype({d})", "h * {d}(0.7)", "h + {d}(0.3)", "jnp.sin(h)", "jnp.maximum(h, {d}(-2))"]
# The compiler does not know that c is 1, so it cannot simplify the operations.
FAULTS = [
    "h * (c * 2**14).astype({d}) * (c * 2**14).astype({d}) * (c * 2**-14).astype({d}) * (c * 2**-14).astype({d})",
    "(h + (c * 4096).astype({d})) - (c * 4096).astype({d})",
    "h * (c * 2**-14).astype({d}) * (c * 2**-14).astype({d}) * (c * 2**14).astype({d}) * (c * 2**14).astype({d})",
]
SEEDS = {  # of programs with these faults
    "overflow": 1,
    "underflow": 2,
    "rounding": 5,
    "underflow and rounding": 4,
    "rounding and overflow": 6,
    "underflow at the beginning and rounding": 7,
}
LARGEST_ERROR, LARGEST_LOSS_ERROR = 0.2, 0.03


def random_lines(seed):
    """Returns the lines of a loss function, as functions of h, w and c in a dtype d."""
    random = np.random.default_rng(seed)
    lines = ["h @ w.astype({d})", *(random.choice(ACCURATE) for _ in range(4))]
    for fault in random.choice(FAULTS, size=random.integers(1, 3), replace=False):
        lines.insert(random.integers(len(lines) + 1), fault)
    return lines


def in_float16(lines):
    """Returns the loss function whose line i + 3 is line i in float16."""
    body = [f"    h = h.astype(jnp.float16); h = {line.format(d='jnp.float16')}" for line in lines]
    source = ["def loss(w, x, c):", "    h = x", *body, "    return jnp.mean(h.astype(jnp.float32) ** 2)"]
    namespace = {"jnp": jnp}
    exec(compile("\n".join(source), "random_program.py", "exec"), namespace)
    return namespace["loss"]


def edited(lines):
    """Returns a function that computes the loss and the gradient, given the lines in float32 and the loss scale."""

    def in_dtype(line, dtype):
        compute = eval(f"lambda h, w, c: {line.format(d='d')}", {"jnp": jnp, "d": dtype})
        return lambda h, w, c: compute(h.astype(dtype), w, c).astype(jnp.float32)

    def loss(w, x, c, kept):
        h = x
        for i, line in enumerate(lines):
            h = jax.lax.cond(kept[i], in_dtype(line, jnp.float32), in_dtype(line, jnp.float16), h, w, c)
        return jnp.mean(h**2)

    def run(scale, *args):
        return jmpscale.value_and_grad(loss)(jmpscale.static(1.0)._replace(loss_scale=scale), *args)

    compiled = jax.jit(run).lower(np.float32(1), *ARGS, np.zeros(len(lines), bool)).compile(EXACT)
    return lambda kept, scale: compiled(np.float32(scale), *ARGS, np.isin(range(len(lines)), kept))


def smallest_sets(lines):
    """Returns the smallest sets, of one or two lines, for which the step is accurate if these lines are in float32."""
    run, all_lines = edited(lines), range(len(lines))
    loss, exact = map(np.asarray, run(all_lines, 1.0))

    def fits(kept):
        for exponent in range(-16, 25, 2):
            value, grad = map(np.asarray, run(kept, 2.0**exponent))
            with np.errstate(invalid="ignore"):
                error = np.linalg.norm(grad - exact) / np.linalg.norm(exact)
                if error <= LARGEST_ERROR and abs(value - loss) <= LARGEST_LOSS_ERROR * loss:
                    return True
        return False

    by_size = ([kept for kept in itertools.combinations(all_lines, size) if fits(kept)] for size in range(3))
    return next((found for found in by_size if found), [])


@pytest.mark.full
@pytest.mark.parametrize("seed", rows(SEEDS))
def test_lines_are_a_smallest_set(seed):
    lines = random_lines(seed)
    found = jmpscale.diagnose(in_float16(lines))(jmpscale.static(2.0**4), *ARGS).lines
    kept = tuple(int(re.fullmatch(r"random_program\.py:(\d+) \(loss\)", line)[1]) - 3 for line in found)
    expected = smallest_sets(lines)
    assert (kept in expected) if expected else len(kept) > 2, (kept, expected, lines)
