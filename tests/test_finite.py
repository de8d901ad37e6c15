"""all_finite is exact for every dtype, size and position of the bad value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.sharding import PartitionSpec as Spec

import jmpscale
from jmpscale._finite import use_variadic_reduce

from cases import some_of_all

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]
FLOAT8 = [jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.float8_e4m3b11fnuz]
COMPLEX = [jnp.complex64, jnp.complex128]
EACH_DTYPE = [jnp.dtype(dtype).name for dtype in (*FLOATS, *FLOAT8, *COMPLEX)]
SIZES = [7, 1, 4_095, 4_096, 4_097, 1_000_000]


@functools.cache
def _checker(platform):
    return jax.jit(lambda tree: jmpscale.all_finite(tree))  # one program for each platform


@pytest.fixture
def check(platform):
    """The jitted check, in its form for CPU and in its default form."""
    return _checker(platform)


def _bad_values(dtype):
    values = [np.nan, -np.nan, np.inf, -np.inf]
    if jnp.dtype(dtype) in map(jnp.dtype, FLOAT8):
        return [np.nan]  # infinity converts to NaN, or does not exist
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values += [complex(0, np.nan), complex(0, -np.inf), complex(np.inf, 1)]
    return values


@pytest.mark.parametrize(
    ("dtype", "size"),
    some_of_all(
        EACH_DTYPE,
        SIZES,
        default=[*((dtype, SIZES[0]) for dtype in EACH_DTYPE), *(("float32", size) for size in SIZES[1:])],
    ),
)
@pytest.mark.usefixtures("x64")
def test_one_bad_value_first_in_the_middle_or_last_is_seen(dtype, size, check):
    good = np.ones(size, dtype)
    assert check(good)
    for place in {0, size // 2, size - 1}:
        for value in _bad_values(dtype):
            bad = good.copy()
            bad[place] = value
            assert not check(bad), (value, place)


@pytest.mark.parametrize("size", [4_096, 65_536])
def test_many_nans_are_seen_where_a_reduce_max_would_lose_them(size, check):
    for count in (1, 17, size // 2, size - 1):
        bad = np.ones(size, np.float32)
        bad[-count:] = np.nan
        assert not check(bad), count


@pytest.mark.parametrize("count", [1, 8, 9, 17])
def test_a_bad_leaf_is_seen_in_any_position(count, check):
    leaves = [np.float32(1)] * count
    assert check(leaves)
    for place in range(count):
        assert not check([*leaves[:place], np.float32(np.nan), *leaves[place + 1 :]]), place


@pytest.mark.parametrize("count", [300, pytest.param(4_100, marks=pytest.mark.full)])
def test_one_bad_scalar_among_many_leaves_is_seen(count, check):
    leaves = [np.float32(1)] * count
    assert check(leaves)
    for place in (0, count // 2, count - 1):
        for value in (np.nan, np.inf):
            bad = list(leaves)
            bad[place] = np.float32(value)
            assert not check(bad), (place, value)


@pytest.mark.parametrize("values", [[3e38, 3e38], [3e38, -3e38, 3e38, 3e38], [-3e38] * 5_000])
def test_values_whose_sum_overflows_are_finite(values, check):
    assert check(np.array(values, np.float32))


@pytest.mark.parametrize("tree", [None, {}, [], (), jnp.zeros((0, 3)), {"a": jnp.zeros(0), "b": None}])
def test_nothing_is_finite(tree, variant):
    assert jmpscale.all_finite(tree)


def test_leaves_that_cannot_overflow_are_finite():
    float0 = jax.grad(lambda n: n * 1.0, allow_int=True)(3)
    tree = [jnp.arange(3), jnp.array(True), jax.random.key(0), float0, "name", jnp.tanh, 3, np.int8(3), 1.5]
    assert jmpscale.all_finite(tree)
    assert not jmpscale.all_finite([*tree, float("nan")])


def test_bcoo_is_checked_by_its_data():
    dense = jnp.array([[0.0, 2.0], [jnp.inf, 0.0]])
    assert not jmpscale.all_finite(sparse.BCOO.fromdense(dense))
    assert jmpscale.all_finite(sparse.BCOO.fromdense(jnp.where(jnp.isinf(dense), 1.0, dense)))


@pytest.mark.usefixtures("platform")
def test_all_finite_is_equal_eager_jitted_and_vmapped(variant):
    check = variant(lambda x: jmpscale.all_finite({"a": x, "b": x * 2}))
    assert check(jnp.array([1.0, -0.0]))
    assert not check(jnp.array([1.0, jnp.nan]))
    assert not check(jnp.array([2e38, 1.0])), "2e38 * 2 is infinite in float32"


@pytest.mark.usefixtures("platform")
def test_all_finite_tests_each_example_under_vmap():
    batch = jnp.array([[1.0, 2.0], [jnp.inf, 2.0], [1.0, jnp.nan]])
    np.testing.assert_array_equal(jax.vmap(jmpscale.all_finite)(batch), [True, False, False])


def test_partial_sums_are_refused():
    if jax.__version_info__ < (0, 10):
        pytest.skip("JAX has no type for partial sums inside jit yet")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 2)), Spec(None, "data"))
        y = jax.device_put(jnp.ones((2, 2)), Spec("data", None))

        def check(x, y):
            partial = jnp.einsum("ij,jk->ik", x, y, out_sharding=Spec(None, None, unreduced={"data"}))
            return jmpscale.all_finite({"w": partial})

        with pytest.raises(TypeError, match=r"tree\['w'\] is a partial sum over the mesh axes \['data'\].*reshard"):
            jax.jit(check)(x, y)


def test_use_variadic_reduce_is_false_without_the_cpu_backend(monkeypatch):
    def no_cpu(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "device_count", no_cpu)
    assert not use_variadic_reduce()
