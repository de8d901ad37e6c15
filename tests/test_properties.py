"""Properties of all inputs: drawn by hypothesis, or enumerated where there are few enough."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

import jmpscale

import hlo
from cases import some, some_of_all

EIGHT_BITS = [
    jnp.float8_e3m4,
    jnp.float8_e4m3,
    jnp.float8_e4m3b11fnuz,
    jnp.float8_e4m3fn,
    jnp.float8_e4m3fnuz,
    jnp.float8_e5m2,
    jnp.float8_e5m2fnuz,
    jnp.float8_e8m0fnu,
]
NARROW = [*map(np.dtype, EIGHT_BITS), np.dtype(np.float16), np.dtype(jnp.bfloat16)]
BROAD = [np.dtype(np.float32), np.dtype(np.float64)]
COMPLEX = [np.dtype(np.complex64), np.dtype(np.complex128)]

each_narrow = pytest.mark.parametrize("dtype", NARROW, ids=str)
each_broad = pytest.mark.parametrize("dtype", BROAD, ids=str)

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # NumPy, of signalling NaN
]


def _unsigned(dtype):
    return np.dtype(f"u{dtype.itemsize}")


def _all_numbers(dtype):
    """Returns every number of a dtype of 8 or 16 bits, infinities and NaN of every payload among them."""
    return np.arange(2 ** (8 * dtype.itemsize), dtype=_unsigned(dtype)).view(dtype)


def _same_bits(a, b):
    return (a.dtype == b.dtype) & (a.view(_unsigned(a.dtype)) == b.view(_unsigned(b.dtype)))


# --- scaling and unscaling ---

EXPONENTS = range(-126, 127)


def _wide(dtype):
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _is_subnormal(x, exponent=0):
    """Tests where `x * 2^exponent`, before rounding, is too small for a normal number of its dtype."""
    return (x != 0) & np.isfinite(x) & (np.frexp(x)[1] + exponent <= np.finfo(x.dtype).minexp)


def _assert_is_the_product(got, x, exponent, dtype):
    """Asserts that `got` is `x * 2^exponent` in `dtype` bit for bit.

    The exception is an operand or a result that is subnormal in the dtype of the computation, float32 or float64: XLA
    on CPU flushes it to zero.
    """
    x = x.astype(_wide(x.dtype))
    with np.errstate(over="ignore", under="ignore"):
        want = (x * x.dtype.type(2.0**exponent)).astype(dtype)
    exact = _same_bits(got, want) | (np.isnan(got) & np.isnan(want))
    flushed = (_is_subnormal(x) | _is_subnormal(x, exponent)) & _same_bits(got, np.copysign(0, x).astype(dtype))
    wrong = ~(exact | flushed)
    assert not wrong.any(), (x[wrong][:3], exponent, got[wrong][:3], want[wrong][:3])


def _assert_scaling_is_exact(x, exponent):
    scaler = jmpscale.static(2.0**exponent)
    scaled, unscaled = jmpscale.scale(scaler, x), jmpscale.unscale(scaler, x)
    back = np.asarray(jmpscale.unscale(scaler, scaled))
    scaled, unscaled = np.asarray(scaled), np.asarray(unscaled)
    _assert_is_the_product(scaled, x, exponent, _wide(x.dtype))
    _assert_is_the_product(unscaled, x, -exponent, x.dtype if x.dtype == jnp.bfloat16 else _wide(x.dtype))

    # Representable: neither the number nor the scaled one overflows or is subnormal in float32 (float64 for float64).
    # Every finite float16, and every finite float8 but the smallest e8m0fnu, 2^-127, is normal there or zero.
    wide = x.astype(_wide(x.dtype))
    representable = np.isfinite(scaled) & ~_is_subnormal(wide) & ~_is_subnormal(wide, exponent)
    assert _same_bits(back, wide)[representable].all()
    return representable


@each_narrow
def test_every_narrow_number_is_scaled_and_unscaled_exactly_by_every_power_of_two(dtype):
    numbers = _all_numbers(dtype)
    finite = np.isfinite(numbers)
    for exponent in EXPONENTS:
        representable = _assert_scaling_is_exact(numbers, exponent)
        if exponent in range(-100, 100) and dtype not in (jnp.bfloat16, jnp.float8_e8m0fnu):
            assert (representable == finite).all(), "float16 and float8 survive all likely scales, including subnormals"


def _significands(dtype):
    last = (1 << ml_dtypes.finfo(dtype).nmant) - 1
    return st.lists(st.sampled_from([0, 1, last]) | st.integers(0, last), min_size=4, max_size=4)


def _each_exponent_with(significands, dtype):
    """Returns numbers of each sign and exponent, including zero and infinity, with each of the significands."""
    word, info = _unsigned(dtype).type, ml_dtypes.finfo(dtype)
    tops = np.arange(2 ** (info.bits - info.nmant), dtype=word) << word(info.nmant)
    return (tops[:, None] | np.array(significands, word)[None]).reshape(-1).view(dtype)


@each_broad
def test_any_wide_number_is_scaled_and_unscaled_exactly_by_any_power_of_two(dtype):
    @hypothesis.given(_significands(dtype), st.sampled_from(EXPONENTS))
    def exact(significands, exponent):
        numbers = _each_exponent_with(significands, dtype)
        assert _assert_scaling_is_exact(numbers, exponent).any()

    exact()


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_any_complex_number_is_unscaled_part_by_part(dtype):
    part = np.empty(0, dtype).real.dtype

    @hypothesis.given(_significands(part), st.sampled_from(EXPONENTS))
    def exact(significands, exponent):
        real = _each_exponent_with(significands, part)
        imaginary = np.roll(real, 12_345)
        numbers = np.stack([real, imaginary], axis=1).reshape(-1).view(dtype)
        out = np.asarray(jmpscale.unscale(jmpscale.static(2.0**exponent), numbers))
        _assert_is_the_product(out.real.copy(), real, -exponent, part)
        _assert_is_the_product(out.imag.copy(), imaginary, -exponent, part)

    exact()


# --- finite ---


LARGE = 2**12  # elements, from which on the check is a variadic reduction in a process with one device


@pytest.mark.parametrize(
    ("dtype", "size"),
    some_of_all(
        NARROW,
        [67, LARGE + 67],
        default=[
            (np.dtype(name), LARGE + 67) for name in (jnp.float8_e4m3fn, jnp.float8_e5m2, np.float16, jnp.bfloat16)
        ],
    ),
    ids=str,
)
def test_all_finite_classifies_every_narrow_number(dtype, size):
    numbers, word = _all_numbers(dtype), _unsigned(dtype)
    finite, bad = numbers[np.isfinite(numbers)], numbers[~np.isfinite(numbers)]
    leaf = np.resize(finite, max(size, len(finite)))
    assert jmpscale.all_finite(leaf)

    def plant(args):
        bits, place = args
        bits = jnp.asarray(leaf.view(word)).at[place].set(bits)
        return jmpscale.all_finite(jax.lax.bitcast_convert_type(bits, dtype))

    # A loop instead of vmap, which would compile to another kind of reduction.
    places = len(leaf) - 1 - np.arange(len(bad)) * 61 % len(leaf)
    assert not jax.jit(lambda *args: jax.lax.map(plant, args))(bad.view(word), places).any()


def test_with_one_device_all_finite_uses_a_variadic_reduction_for_a_large_leaf():
    if jax.device_count() > 1:
        pytest.skip("runs in the process that test_with_one_device_all_finite_is_as_exact starts")
    small, large = (hlo.instructions(hlo.compiled(jmpscale.all_finite, np.ones(n))) for n in (LARGE - 1, LARGE))
    assert not [x for x in small if x.startswith("reduce (")]
    assert [x for x in large if x.startswith("reduce (s32[], s32[])")]


def _not_finite(dtype, payload, negative):
    """Returns an infinity (payload 0) or a NaN, quiet or signalling; for narrow dtypes the n-th non-finite number."""
    if np.issubdtype(dtype, np.complexfloating):
        part = np.empty(0, dtype).real.dtype
        parts = [_not_finite(part, payload // 2, negative), np.ones((), part)]
        return np.stack(parts[:: 1 if payload % 2 else -1]).view(dtype)[0]
    if dtype in NARROW:
        bad = _all_numbers(dtype)
        bad = bad[~np.isfinite(bad)]
        return bad[(2 * payload + negative) % len(bad)]
    word, info = _unsigned(dtype), ml_dtypes.finfo(dtype)
    bits = ((1 << info.nexp) - 1) << info.nmant | payload % (1 << info.nmant) | negative << (info.bits - 1)
    return np.array(bits, word).view(dtype)


def _finite_values(dtype, shape, seed):
    """Returns numbers over the whole range of a dtype, its extremes first and last."""
    if np.issubdtype(dtype, np.complexfloating):
        part = np.empty(0, dtype).real.dtype
        return _finite_values(part, (*shape, 2), seed).view(dtype)[..., 0]
    count, info = int(np.prod(shape)), ml_dtypes.finfo(dtype)
    extremes = np.array([info.max, info.max, info.min, info.min, info.smallest_subnormal, info.tiny, -0.0], dtype)
    extremes = extremes[np.isfinite(extremes)]  # e8m0fnu has no zero
    bits = np.random.default_rng(seed).integers(2 ** (8 * dtype.itemsize), size=count, dtype=_unsigned(dtype))
    values = np.where(np.isfinite(bits.view(dtype)), bits.view(dtype), extremes[0])
    values[: len(extremes)] = extremes[:count]
    values[-len(extremes) :] = extremes[:count]
    return values.reshape(shape)


SHAPES = [(), (0,), (3, 0), (1,), (2,), (7,), (3, 5), (67,), (2, 3, 5, 7), (4_095,), (4_097,), (61, 83), (2**18 + 5,)]
DTYPES = [*NARROW, *BROAD, *COMPLEX]
OTHERS = [None, (), 3, True, 1.5, -0.0, 2j, "name", np.int8(4), np.float16(65504), np.arange(5), np.zeros(3, bool)]
CONTAINERS = [list, tuple, lambda parts: dict(zip("abcdefghi", parts, strict=False)), lambda parts: {"inner": [*parts]}]


@st.composite
def _trees(draw):
    """Draws finite trees: two to five arrays of different dtypes and shapes among other leaves, nested in some way."""
    count = draw(st.integers(2, 5))
    dtypes, shapes = (draw(st.permutations(x))[:count] for x in (DTYPES, SHAPES))
    arrays = [_finite_values(*kind, draw(st.integers(0, 99))) for kind in zip(dtypes, shapes, strict=True)]
    parts = draw(st.permutations(arrays + draw(st.lists(st.sampled_from(OTHERS), max_size=4))))
    while len(parts) > 1:
        size = draw(st.integers(2, len(parts)))
        parts = [draw(st.sampled_from(CONTAINERS))(parts[:size]), *parts[size:]]
    return parts[0]


_faults = st.lists(st.tuples(st.integers(0, 2**52), st.booleans(), st.floats(0, 1)), min_size=1, max_size=3)
INFINITY, SIGNALLING, QUIET = (0, 1, -1)


def test_any_tree_is_finite_until_one_element_is_not():
    @hypothesis.given(_trees(), _faults)
    def exact(tree, faults):
        assert jmpscale.all_finite(tree)
        leaves, structure = jax.tree.flatten(tree)
        kinds = [(INFINITY, False, None), (INFINITY, True, None), (SIGNALLING, False, None), (QUIET, True, None)]
        for i, leaf in enumerate(leaves):
            if not (isinstance(leaf, np.ndarray) and leaf.dtype in DTYPES and leaf.size):
                continue
            for payload, negative, where in kinds + faults:
                last = leaf.size - 1
                for place in {0, leaf.size // 2, last} if where is None else {round(where * last)}:
                    bad = leaf.copy()
                    bad.reshape(-1)[place] = _not_finite(leaf.dtype, payload, negative)
                    assert not np.isfinite(bad).all()
                    corrupt = jax.tree.unflatten(structure, [*leaves[:i], bad, *leaves[i + 1 :]])
                    assert not jmpscale.all_finite(corrupt), (leaf.dtype, place, payload)

    exact()


LENGTHS = {
    "short": [*range(1, 20), 31, 32, 33, 63, 64, 65],
    "long": [LARGE + tail for tail in (1, 7, 31)],
    "every short": [*range(1, 71), *range(120, 140), *range(250, 260)],
    "every long": [LARGE + tail for tail in range(66)],
}


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [(np.dtype(dtype), lengths) for dtype in (np.float16, np.float32) for lengths in ("short", "long")]
    + [
        pytest.param(dtype, lengths, marks=pytest.mark.slow)
        for dtype in [np.dtype(jnp.float8_e5m2), np.dtype(np.float16), np.dtype(jnp.bfloat16), *BROAD, *COMPLEX]
        for lengths in ("every short", "every long")
    ],
    ids=str,
)
def test_a_vector_of_any_length_is_not_finite_with_one_bad_value_in_any_place(dtype, lengths):
    lengths = np.array(LENGTHS[lengths])
    # One program for all lengths, each with a reduction of its own.
    check = jax.jit(lambda x: jnp.stack([jmpscale.all_finite(x[:length]) for length in lengths]))
    good = _finite_values(dtype, (max(lengths),), seed=0)
    assert check(good).all()
    for place in sorted({*range(70), *range(max(lengths) - 70, max(lengths))} & {*range(max(lengths))}):
        bad = good.copy()
        bad[place] = _not_finite(dtype, payload=place // 2, negative=place % 2)
        np.testing.assert_array_equal(check(bad), lengths <= place)


def test_with_one_device_all_finite_is_as_exact(request):
    """Runs the tests above again with a single device, for which the check compiles to other reductions."""
    if jax.device_count() == 1:
        pytest.skip("this is the process with one device")
    here = pathlib.Path(__file__).parent
    chosen = "(test_properties and finite and not short and not 67) or (test_finite and 1000000)"
    if not request.config.getoption("--full"):
        chosen = f"({chosen}) and not any_tree"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen]
    command += [option for option in ("--full", "--slow") if request.config.getoption(option)]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    files = [here / "test_properties.py", here / "test_finite.py"]
    done = subprocess.run(command + files, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) >= 8, done.stdout


# --- the same bits, however it is run ---

ROWS = 16  # of each leaf, over eight devices
LEAVES = {
    "e5m2": (np.dtype(jnp.float8_e5m2), (ROWS,)),
    "f16": (np.dtype(np.float16), (ROWS, 3)),
    "bf16": (np.dtype(jnp.bfloat16), (ROWS,)),
    "f32": (np.dtype(np.float32), (ROWS, 5)),
    "f64": (np.dtype(np.float64), (ROWS,)),
}
SHARDED, WHOLE = Spec("data"), Spec()


def _loss(params, batch, total):
    # Whole numbers that float16 and float32 hold exactly, in whatever order they are added.
    prediction = params["w"].astype(jnp.float16) * batch["x"].astype(jnp.float16) + params["b"].astype(jnp.float16)
    return total(jnp.sum((prediction.astype(jnp.float32) - batch["y"]) ** 2))


def _step(state, data, total):
    loss, grads = jmpscale.value_and_grad(_loss)(state, data["params"], data["batch"], total)
    finite = jmpscale.all_finite(grads)

    def descend(params, velocity):
        velocity = jax.tree.map(lambda v, g: v * 0.5 + g, velocity, grads)
        return jax.tree.map(lambda p, v: p - v * 0.125, params, velocity), velocity

    params, velocity = jmpscale.apply_if(finite, descend, data["params"], data["velocity"])
    return (params, velocity), (jmpscale.update(state, finite, loss=loss), loss, finite)


# Each returns what is sharded like the data, and what is replicated.
PROGRAMS = {
    "scale": lambda state, data, _: (jmpscale.scale(state, data["leaves"]), ()),
    "unscale": lambda state, data, _: (jmpscale.unscale(state, data["leaves"]), ()),
    "unscale_and_check": lambda state, data, _: jmpscale.unscale_and_check(state, data["leaves"]),
    "update": lambda state, data, _: ((), jmpscale.update(state, data["finite"], loss=data["loss"])),
    "a step": _step,
}


def _example(random):
    """Returns the arrays of a scaler in any state, and data that is finite most of the time."""

    def whole(*shape):
        return random.integers(-8, 9, shape).astype(np.float32)

    leaves = {name: _finite_values(dtype, shape, random.integers(1000)) for name, (dtype, shape) in LEAVES.items()}
    if random.random() < 0.5:
        leaf = leaves[name := random.choice(list(leaves))].reshape(-1)
        leaf[random.integers(leaf.size)] = _not_finite(LEAVES[name][0], int(random.integers(99)), random.random() < 0.5)
    params, velocity = ({"w": whole(ROWS), "b": whole(ROWS)} for _ in range(2))
    batch = {"x": whole(ROWS), "y": whole(ROWS)}
    if random.random() < 0.5:
        random.choice([batch["x"], batch["y"], params["b"]])[random.integers(ROWS)] = random.choice([np.inf, np.nan])
    scale = 2.0 ** random.integers(-126, 127) if random.random() < 0.5 else 2.0 ** random.uniform(-126, 126)
    limits = np.iinfo(np.int32).max - np.arange(3)
    counts = [random.choice([*range(6), *limits]).astype(np.int32) for _ in range(4)]
    loss = np.float32(random.choice([1.0, np.nan, np.inf]))
    data = {"leaves": leaves, "params": params, "velocity": velocity, "batch": batch, "loss": loss}
    return (np.float32(scale), *counts, np.int32(0)), data | {"finite": random.random() < 0.5}


SCALER = jmpscale.dynamic(growth_factor=1.7, growth_interval=4, hysteresis=2, min_scale=2.0**-126, max_scale=2.0**126)
DATA_SPECS = dict.fromkeys(("leaves", "params", "velocity", "batch"), SHARDED) | {"loss": WHOLE, "finite": WHOLE}
STRICT = {"xla_allow_excess_precision": False}  # otherwise float16 may be float32 in one of the programs


def _stack(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def _one_by_one(run):
    return lambda states, data: _stack(
        [run(*jax.tree.map(lambda x, i=i: x[i], (states, data))) for i in range(len(data["loss"]))]
    )


def _mesh(axis_type):
    return jax.make_mesh((8,), ("data",), axis_types=(axis_type,))


def _sharded(run, axis_type):
    mesh = _mesh(axis_type)

    def call(state, data):
        with jax.set_mesh(mesh):
            state = jax.device_put(state, NamedSharding(mesh, WHOLE))
            data = {name: jax.device_put(x, NamedSharding(mesh, DATA_SPECS[name])) for name, x in data.items()}
            return run(state, data)

    return _one_by_one(call)


def _ways(program):
    """Returns functions of a batch of states and data, which should all return the same."""

    def alone(state, data):
        return program(state, data, lambda x: x)

    def local(state, data):
        return program(state, data, lambda x: jax.lax.psum(x, "data"))

    mapped = jax.shard_map(local, mesh=_mesh(AxisType.Auto), in_specs=(WHOLE, DATA_SPECS), out_specs=(SHARDED, WHOLE))
    jit = functools.partial(jax.jit, compiler_options=STRICT)
    return {
        "jit": _one_by_one(jit(alone)),
        "vmap": jit(jax.vmap(alone)),
        "vmap, eager": jax.vmap(alone),
        "scan": jit(lambda *batch: jax.lax.map(lambda one: alone(*one), batch)),
        "sharded": _sharded(jit(alone), AxisType.Auto),
        "sharded, by type": _sharded(jit(alone), AxisType.Explicit),
        "shard_map": _sharded(jit(mapped), AxisType.Auto),
        "eager": _one_by_one(alone),
    }


def _bits(x):
    """Returns the bits of an array, with every NaN replaced by the same one, since its payload is not specified."""
    x = np.asarray(x)
    return np.where(np.isnan(x), np.full_like(x, np.nan), x).tobytes() if x.dtype.kind in "fV" else x.tobytes()


@pytest.mark.filterwarnings("ignore:the loss is:UserWarning")  # the leaves that are scaled have every dtype
@pytest.mark.parametrize("name", some(list(PROGRAMS), default=["unscale_and_check"]))
def test_eager_jit_vmap_scan_and_sharded_give_the_same_bits(name):
    ways = _ways(PROGRAMS[name])
    examples = hypothesis.settings.default.max_examples // (
        6 if name == "a step" else 1
    )  # each eager step compiles again

    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(st.integers(0, 2**32))
    def same(seed):
        random = np.random.default_rng(seed)
        arrays, data = _stack([_example(random) for _ in range(3)])
        states = jmpscale.ScalerState(*arrays, config=SCALER.config)
        results = {way: run(states, data) for way, run in ways.items()}
        want = jax.tree.map(_bits, results["eager"])
        for way, result in results.items():
            assert jax.tree.map(_bits, result) == want, (way, result, results["eager"])

    same()
