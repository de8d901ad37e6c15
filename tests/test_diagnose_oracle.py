"""diagnose finds the smallest set of lines in random programs, as running all sets of edited lines does."""

import functools
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
HARMLESS = ["jnp.tanh(h)", "h @ w.astype({d})", "h * {d}(0.7)", "h + {d}(0.3)", "jnp.sin(h)", "jnp.maximum(h, {d}(-2))"]
# The compiler does not know that c is 1, so it cannot simplify the operations.
FAULTS = [
    "h * (c * 2**14).astype({d}) * (c * 2**14).astype({d}) * (c * 2**-14).astype({d}) * (c * 2**-14).astype({d})",
    "(h + (c * 4096).astype({d})) - (c * 4096).astype({d})",
    "h * (c * 2**-14).astype({d}) * (c * 2**-14).astype({d}) * (c * 2**14).astype({d}) * (c * 2**14).astype({d})",
]
LARGEST_ERROR, LARGEST_LOSS_ERROR = 0.2, 0.03


def random_program(seed):
    """Returns the source of a loss function of which line i computes in the dtype `d[i]`."""
    random = np.random.default_rng(seed)
    lines = ["h @ w.astype({d})", *(random.choice(HARMLESS) for _ in range(4))]
    for fault in random.choice(FAULTS, size=random.integers(1, 3), replace=False):
        lines.insert(random.integers(len(lines) + 1), fault)
    body = [f"    h = h.astype(d[{i}]); h = {line.format(d=f'd[{i}]')}" for i, line in enumerate(lines)]
    return "\n".join(
        ["def loss(w, x, c):", "    h = x", *body, "    return jnp.mean(h.astype(jnp.float32) ** 2)"]
    ), lines


def compile_program(source, dtypes):
    namespace = {"jnp": jnp, "d": dtypes}
    exec(compile(source, "random_program.py", "exec"), namespace)
    return namespace["loss"]


def run(source, dtypes, exponents):
    """Yields the loss and the gradient at powers of two as the loss scale."""
    loss = compile_program(source, dtypes)

    def at(scale, *args):
        return jmpscale.value_and_grad(loss)(jmpscale.static(1.0)._replace(loss_scale=scale), *args)

    compiled = jax.jit(at).lower(jnp.float32(1), *ARGS).compile(EXACT)
    for exponent in exponents:
        value, grad = compiled(jnp.float32(2.0**exponent), *ARGS)
        yield float(value), np.asarray(grad, np.float64)


def fits(source, count, kept, exact):
    """Tests whether a scale fits if some lines compute in float32."""
    dtypes = [jnp.float32 if i in kept else jnp.float16 for i in range(count)]
    for value, grad in run(source, dtypes, range(-16, 25, 2)):
        if np.isfinite(grad).all() and np.isfinite(value):
            error = np.linalg.norm(grad - exact[1]) / np.linalg.norm(exact[1])
            if error <= LARGEST_ERROR and abs(value - exact[0]) <= LARGEST_LOSS_ERROR * exact[0]:
                return True
    return False


@functools.cache
def smallest_sets(seed):
    """Returns all sets of at most two lines that are enough, of the smallest size."""
    source, lines = random_program(seed)
    (exact,) = run(source, [jnp.float32] * len(lines), [0])
    for size in range(3):
        found = [
            kept for kept in itertools.combinations(range(len(lines)), size) if fits(source, len(lines), kept, exact)
        ]
        if found:
            return found
    return []


@pytest.mark.parametrize("seed", rows({str(seed): seed for seed in range(8)}, default={"1"}))
def test_lines_are_a_smallest_set(seed):
    source, lines = random_program(seed)
    loss = compile_program(source, [jnp.float16] * len(lines))
    found = jmpscale.diagnose(loss)(jmpscale.static(2.0**4), *ARGS).lines
    kept = tuple(int(re.fullmatch(r"random_program\.py:(\d+) \(loss\)", line)[1]) - 3 for line in found)
    expected = smallest_sets(seed)
    assert (kept in expected) if expected else len(kept) > 2, (kept, expected, source)
