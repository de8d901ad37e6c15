"""A diagnosis compiles equal parts of a program once, and differing parts separately."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmpscale._diagnosis.run import blocks
from jmpscale._diagnosis.run.blocks import BlockProgram, first_equations
from jmpscale._diagnosis.run.forms import Forms
from jmpscale._diagnosis.run.modes import Mode
from jmpscale._diagnosis.trace.program import Program
from jmpscale._programs.compile import compiled

from arrays import normal

pytestmark = pytest.mark.full

H = jnp.float16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "WINDOW", 12)


WEIGHTS, X = normal(0, 8, 16).astype(H), normal(1, 16).astype(H)


def step(fun, *consts):
    closed = jax.make_jaxpr(lambda _: fun(*consts))(jnp.float32(1))
    return Program(closed.jaxpr, closed.consts, ("",) * len(closed.consts))


def layer(x, w):
    """Returns the activations after a layer, whose results do not depend on the compiler."""
    for i in range(3):
        x = jax.lax.tanh(jax.lax.max(x * w + H(i), -x) / H(i + 3))
    return x


def layers(ws, x):
    """Returns a loss and its gradients after layers in a Python loop."""

    def loss(ws):
        y = x
        for w in ws:
            y = layer(y, w)
        return y[0].astype(jnp.float32)

    value, grads = jax.value_and_grad(loss)(ws)
    return [value, *grads]


def forms(program):
    return Forms(program, len(program.jaxpr.outvars))


def functions(step, form="precision"):
    """Returns the number of blocks, and of different functions of them."""
    found = getattr(forms(step), form)._blocks
    return len(found), len({id(x.function) for x in found})


@pytest.mark.parametrize("form", ["precision", "recording"])
def test_equal_layers_are_compiled_once(form):
    (_, few), (count, many) = (functions(step(layers, list(WEIGHTS[:n]), X), form) for n in (4, 8))
    assert many <= few + 2  # the layers at the ends differ
    assert count > 2 * many


def test_blocks_have_the_results_of_the_program():
    program = step(layers, list(WEIGHTS[:4]), X)
    found, _ = forms(program).precision.run(1.0, {}, Mode.AS_WRITTEN)
    expected = compiled(lambda *consts: jax.core.eval_jaxpr(program.jaxpr, consts, jnp.float32(1)))(*program.consts)
    for x, y in zip(found, expected, strict=True):
        # On some CPUs, XLA rounds a function such as tanh in another way in a larger program: by one last place.
        np.testing.assert_allclose(x, y, rtol=2 * float(jnp.finfo(jnp.float16).eps), atol=0)


def test_operations_of_equal_blocks_have_their_own_modes_and_records():
    def two_layers(w, x):
        y = layer(x, w)
        z = layer(y, 8 * w)
        return [jnp.float32(0), y.astype(jnp.float32), z.astype(jnp.float32)]

    program = step(two_layers, WEIGHTS[0], X)
    modal, recording = forms(program).precision, forms(program).recording
    assert functions(program)[0] > functions(program)[1]
    inside = [x for x in modal.sites if "(layer)" in x.part.path[-1]]
    first, second = dict.fromkeys(x.part.path[:-1] for x in inside)  # the lines of the two calls
    _, records = recording.run(1.0, {}, Mode.FLOAT32)
    products = {x.part.path[:-1]: records[x][0] for x in inside if x.operation == "mul"}
    assert products[second] > 2 * products[first]

    def run(caller):
        modes = {x: Mode.FLOAT32 for x in inside if x.part.path[:-1] == caller}
        return modal.run(1.0, modes, Mode.AS_WRITTEN)[0][1:]

    written, *others = map(run, [None, first, second])
    same = [[np.array_equal(x, y) for x, y in zip(found, written, strict=True)] for found in others]
    assert same == [[False, False], [True, False]]


def test_result_in_range_is_as_it_is_written_in_the_range_of_float32():
    """Its operands are rounded, even if their casts compute in float32."""
    sizes = jnp.array([[1.0], [2.0**-18], [2.0**12]])  # in range, with underflow, with overflow
    x, w = sizes * normal(2, 3, 512), normal(3, 512, 64)
    program = step(lambda x, w: [jnp.float32(0), (x.astype(H) @ w.astype(H)).astype(jnp.float32)], x, w)
    modal = forms(program).precision
    casts = {site: Mode.FLOAT32 for site in modal.sites if site.operation == "convert_element_type"}
    modes = (Mode.AS_WRITTEN, Mode.RANGE, Mode.FLOAT32)
    written, ranged, exact = (np.asarray(modal.run(1.0, casts, mode)[0][1]) for mode in modes)
    in_range = np.isfinite(written) & (np.abs(written) >= 2.0**-14)
    assert 0 < in_range.mean() < 1
    assert (np.abs(exact) > 65504).any()
    np.testing.assert_array_equal(ranged[in_range], written[in_range])
    np.testing.assert_allclose(ranged[~in_range], exact[~in_range], rtol=2.0**-11)


def block_key(fun, *args):
    (block,) = BlockProgram(jax.make_jaxpr(fun)(*args).jaxpr).blocks
    return block.key()


def scanned(factor):
    return lambda x, y: jax.lax.scan(lambda c, _: (c * factor, c), x, length=3)


DIFFERENT = {  # functions of two vectors
    "operation": (lambda x, y: x + y, lambda x, y: x * y),
    "one operand twice": (lambda x, y: (x + y) * x, lambda x, y: (x + y) * y),
    "parameter": (lambda x, y: x**2 + y, lambda x, y: x**3 + y),
    "literal": (lambda x, y: 2 * x + y, lambda x, y: 3 * x + y),
    "sign of zero": (lambda x, y: x + 0.0 * y, lambda x, y: x + -0.0 * y),
    "dtype": (lambda x, y: x.astype(H) + y.astype(H), lambda x, y: x.astype(jnp.bfloat16) + y.astype(jnp.bfloat16)),
    "body of a loop": (scanned(2.0), scanned(3.0)),
    "what is returned": (lambda x, y: (x + y, x * y), lambda x, y: (x + y, x * y + x)[:1]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_blocks_have_different_keys(name):
    first, second = (block_key(fun, jnp.ones(3), jnp.ones(3)) for fun in DIFFERENT[name])
    assert first != second


@pytest.mark.parametrize("name", DIFFERENT)
def test_equal_blocks_have_equal_keys(name):
    first, second = (block_key(lambda x, y, fun=fun: fun(x, y), *[jnp.ones(3)] * 2) for fun in [DIFFERENT[name][0]] * 2)
    assert first == second
    assert hash(first) == hash(second)


def test_blocks_begin_at_the_same_places_of_equal_parts():
    rng = np.random.default_rng(0)
    part, other = (rng.integers(2**32, size=n).tolist() for n in (300, 77))
    starts = first_equations([*other, *part, *part, *part], window=16)
    inside = [[i - 77 - 300 * k for i in starts if 16 <= i - 77 - 300 * k < 300 - 16] for k in range(3)]
    assert inside[0] == inside[1] == inside[2] != []
    assert starts[0] == 0
    assert max(np.diff([*starts, 977])) <= 32


@pytest.mark.parametrize("digests", [[], [5], [3] * 40], ids=["empty", "one equation", "equal equations"])
def test_programs_without_variety_are_split(digests):
    assert first_equations(digests, window=16) == ([0, *range(15, 40)] if len(digests) == 40 else [0][: len(digests)])
