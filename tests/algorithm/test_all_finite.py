"""all_finite is exact for every dtype, value, size and position, in each form of its program."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmpscale

import compiling
import meshes

EIGHT_BITS = ["e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]
NARROW = [*(np.dtype(getattr(jnp, f"float8_{name}")) for name in EIGHT_BITS), np.dtype("f2"), np.dtype(jnp.bfloat16)]
WIDE = [np.dtype(code) for code in ("f4", "f8", "c8", "c16")]
LARGE = 2**12  # with one CPU device, leaves of this size or larger are reduced by a variadic reduction

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def devices(request, monkeypatch):
    """Makes JAX report this number of CPU devices, on which the form of the program for CPU depends."""
    monkeypatch.setattr(jax, "device_count", lambda *_: request.param)
    jax.clear_caches()  # so that no program of another form is reused
    yield
    jax.clear_caches()


@pytest.fixture
def check(platform, devices):
    return jax.jit(jmpscale.all_finite)


SEVERAL = pytest.param("cpu", 8, id="several-devices")
ONE = pytest.param("cpu", 1, id="one-device", marks=pytest.mark.full)
DEFAULT = pytest.param("default", 8, id="default", marks=pytest.mark.full)
each_form = pytest.mark.parametrize(("platform", "devices"), [SEVERAL, ONE, DEFAULT], indirect=True)


def _unsigned(dtype):
    return np.dtype(f"u{dtype.itemsize}")


def _all_numbers(dtype):
    """Returns every number of a dtype of 8 or 16 bits, with NaN of every payload."""
    return np.arange(2 ** (8 * dtype.itemsize), dtype=_unsigned(dtype)).view(dtype)


def _is_finite(numbers):
    with np.errstate(invalid="ignore"):  # signaling NaN
        return np.isfinite(numbers)


def _part(dtype):
    return np.empty(0, dtype).real.dtype


def _not_finite(dtype, payload, negative):
    """Returns an infinity (payload 0) or a NaN, quiet or signaling; for narrow dtypes the n-th non-finite number."""
    if dtype.kind == "c":
        parts = [_not_finite(_part(dtype), payload // 2, negative), np.ones((), _part(dtype))]
        return np.stack(parts[:: 1 if payload % 2 else -1]).view(dtype)[0]
    if dtype in NARROW:
        numbers = _all_numbers(dtype)
        nonfinite = numbers[~_is_finite(numbers)]
        return nonfinite[(2 * payload + negative) % len(nonfinite)]
    info = ml_dtypes.finfo(dtype)
    bits = ((1 << info.nexp) - 1) << info.nmant | payload % (1 << info.nmant) | negative << (info.bits - 1)
    return np.array(bits, _unsigned(dtype)).view(dtype)


def _finite_values(dtype, shape):
    """Returns numbers over the whole range of a dtype, its extremes first and last."""
    if dtype.kind == "c":
        return _finite_values(_part(dtype), (*shape, 2)).view(dtype)[..., 0]
    count, info = int(np.prod(shape)), ml_dtypes.finfo(dtype)
    extremes = np.array([info.max, info.min, info.smallest_subnormal, info.tiny, -0.0], dtype)
    extremes = extremes[np.isfinite(extremes)]  # e8m0fnu has no zero
    bits = np.random.default_rng(count).integers(2 ** (8 * dtype.itemsize), size=count, dtype=_unsigned(dtype))
    numbers = bits.view(dtype)
    values = np.where(_is_finite(numbers), numbers, extremes[0])
    values[: len(extremes)], values[-len(extremes) :] = extremes[:count], extremes[:count]
    return values.reshape(shape)


# Every value is classified


# The form for one device compares the numbers, and converts them for this purpose. The others use jnp.isfinite.
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(("platform", "devices"), [ONE], indirect=True)
def test_all_finite_classifies_every_narrow_number(dtype, check):
    _check_every_number(dtype, check)


@each_form
def test_all_finite_classifies_every_float16_number(check):
    _check_every_number(np.dtype("f2"), check)


def _check_every_number(dtype, check):
    numbers = _all_numbers(dtype)
    finite, nonfinite = numbers[_is_finite(numbers)], numbers[~_is_finite(numbers)]
    assert check(np.resize(finite, max(LARGE + 67, len(finite))))
    leaf = np.resize(finite, LARGE + 67)

    def plant(args):
        bits, place = args
        bits = jnp.asarray(leaf.view(_unsigned(dtype))).at[place].set(bits)
        return check(jax.lax.bitcast_convert_type(bits, dtype))

    # A loop, because vmap would compile another kind of reduction.
    places = len(leaf) - 1 - np.arange(len(nonfinite)) * 61 % len(leaf)
    assert not jax.jit(lambda *args: jax.lax.map(plant, args))(nonfinite.view(_unsigned(dtype)), places).any()


SHAPES = [(LARGE + 1,), (3, 5), (), (2, 3, 5, 7), (61, 83), (1,)]
TREE = {
    "arrays": [_finite_values(dtype, SHAPES[i % 6]) for i, dtype in enumerate(WIDE + NARROW[3:])],
    "numbers": (1.5, 2j, np.float16(65504), np.float64(1e300)),
    "empty": [np.zeros((3, 0), np.float32), None, (), {}],
}
LEAVES, TREEDEF = jax.tree.flatten(TREE)
PLACES = [i for i, leaf in enumerate(LEAVES) if np.size(leaf)]


@each_form
def test_all_finite_detects_any_nonfinite_element_of_a_tree(check):
    assert check(TREE)

    @hypothesis.settings(max_examples=4 * hypothesis.settings.default.max_examples)
    @hypothesis.given(
        st.sampled_from(PLACES),
        st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1),
        st.sampled_from([0, 1, -1]) | st.integers(0, 2**52),  # infinity, signaling NaN, quiet NaN
        st.booleans(),
    )
    def detects(leaf, position, payload, negative):
        nonfinite = np.array(LEAVES[leaf])
        nonfinite.reshape(-1)[round(position * (nonfinite.size - 1))] = _not_finite(nonfinite.dtype, payload, negative)
        assert not check(jax.tree.unflatten(TREEDEF, [*LEAVES[:leaf], nonfinite, *LEAVES[leaf + 1 :]]))

    detects()


@each_form
@pytest.mark.parametrize("values", [[3e38] * 4, [3e38, -3e38] * 2, [-3e38] * 5000], ids=["max", "both", "large"])
def test_all_finite_accepts_values_whose_sum_overflows(values, check):
    assert check(np.array(values, np.float32))


FLOAT0 = np.zeros(2, jax.dtypes.float0)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [],
        {"a": jnp.zeros(0), "b": None},
        [jnp.arange(3), jnp.array(True), np.int8(3), 3, True, 10**400],
        [jax.random.key(0), FLOAT0],
        ["text", np.str_("text"), np.array(["a"]), np.array([None], object), jnp.tanh, jnp.float16, np.dtype("f2")],
    ],
    ids=["none", "list", "empty", "integers", "keys", "objects"],
)
def test_all_finite_ignores_leaves_without_floats(tree):
    assert jmpscale.all_finite(tree)
    for nonfinite in (
        jnp.inf,
        np.float32("nan"),
        float("nan"),
        complex(0, np.inf),
        jnp.array([1.0, np.nan], np.float16),
    ):
        assert not jmpscale.all_finite([tree, nonfinite])


# Every element of every leaf is tested


@each_form
def test_all_finite_detects_many_nans_at_the_end(check):
    """XLA's maximum on CPU loses these NaN values."""
    size = 1_000_000
    assert check(np.ones(size, np.float32))
    for count in (1, 17, size // 2, size - 1):
        assert not check(np.where(np.arange(size) < size - count, np.float32(1), np.float32(np.nan))), count


@each_form
@pytest.mark.parametrize("count", [1, 9, 17, pytest.param(300, marks=pytest.mark.full)])
def test_all_finite_tests_each_leaf(count, check):
    leaves = [np.float32(1)] * count
    assert check(leaves)
    for place in range(count) if count < 20 else (0, count // 2, count - 1):
        assert not check([*leaves[:place], np.float32(np.nan), *leaves[place + 1 :]]), place


# Every kind of program is supported


@each_form
def test_all_finite_tests_each_example_under_vmap(platform, devices):
    batch = np.ones((3, LARGE + 1), np.float32)
    batch[1, -1], batch[2, 0] = np.inf, np.nan
    flags = jax.vmap(jmpscale.all_finite)({"a": batch, "b": np.ones(3, np.float16)})
    assert flags.dtype == bool
    assert flags.tolist() == [True, False, False]


@each_form
def test_all_finite_accepts_symbolic_shapes(platform, devices):
    (size,) = jax.export.symbolic_shape("size")
    stored = jax.export.export(jax.jit(jmpscale.all_finite))(jax.ShapeDtypeStruct((size,), jnp.float32))
    finite = np.ones(LARGE + 1, np.float32)
    assert stored.call(finite)
    assert not stored.call(np.where(finite.cumsum() > LARGE, np.float32(np.nan), finite))


def _no_backend(name):
    raise RuntimeError(f"Unknown backend {name}")


@pytest.mark.parametrize(
    ("device_count", "size", "variadic"),
    [
        (lambda name: {"cpu": 1}[name], LARGE - 1, False),
        (lambda name: {"cpu": 1}[name], LARGE, True),
        (lambda name: {"cpu": 2}[name], LARGE, False),
        (_no_backend, LARGE, False),
    ],
    ids=["small", "large", "large-2-devices", "large-no-cpu"],
)
def test_all_finite_uses_a_variadic_reduction(device_count, size, variadic, monkeypatch, request):
    if request.config.getoption("--default-form"):
        pytest.skip("the form for GPUs and TPUs has no variadic reduction")
    meshes.require_cpu()
    monkeypatch.setattr(jax, "device_count", device_count)
    jax.clear_caches()
    program = compiling.instructions(compiling.compiled(jmpscale.all_finite, np.ones(size, np.float32)))
    jax.clear_caches()
    assert ("reduce (s32[], s32[])" in program) == variadic
