"""The programs that the documentation says to keep in float32 have the errors of its table, and none if they are.

Programs whose contractions have at most 4 elements have none either.
"""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale

from compiling import FAST
from tables import rows

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion_and_ranks")]

DOCS = pathlib.Path(__file__).parents[2] / "docs"
TOLERANCE = 1.05  # the factor by which a rounded number in the table may differ
# With results in float32, part of the error may be float32's own rounding, which depends on the order of a sum.
TOLERANCE_OF_FLOAT32_RESULTS = 1.5


def normal(*shape, mean=0.0, scale=1.0, seed=0):
    return jnp.asarray(mean + scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def angles(positions):
    frequencies = jnp.tile(10000.0 ** -jnp.linspace(0, 1, 16), (2, 1))
    return jnp.cos(positions @ frequencies)


def fourier_features(points, directions):
    return jnp.sin(2 * jnp.pi * points @ directions)


def critic(logits):
    return jax.nn.softmax(logits) @ jnp.linspace(-300.0, 300.0, 601)


def two_hot(probs):
    places = jnp.linspace(-20.0, 20.0, 255)
    return probs @ (jnp.sign(places) * jnp.expm1(jnp.abs(places)))


def masked_ctc(scores):
    logits = jnp.where(jnp.arange(6) == 5, -1e9, scores)
    labels = jnp.array([[1, 2, 1], [2, 1, 2]])
    return optax.ctc_loss(logits, jnp.zeros(scores.shape[:2]), labels, jnp.zeros(labels.shape))


def indices(one_hot):
    return one_hot @ jnp.arange(80_000.0)


def covariance(x):
    return x.T @ x / len(x) - jnp.outer(x.mean(0), x.mean(0))


def gram(x):
    return x.T @ x


def least_squares(x):
    return jnp.linalg.solve(x.T @ x + 1e-3 * jnp.eye(8), x.T @ (x @ jnp.arange(8.0)))


def squared_distances(x):
    squares = jnp.sum(x**2, axis=1)
    return squares[:, None] + squares - 2 * x @ x.T


def cholesky(x):
    kernel = jnp.exp(-squared_distances(x) / 2)
    return jnp.linalg.cholesky(kernel + 1e-3 * jnp.eye(len(x)))


def local_variance(x):
    blur = functools.partial(jax.lax.conv, rhs=jnp.full((1, 1, 5, 5), 0.04), window_strides=(1, 1), padding="VALID")
    return blur(x**2) - blur(x) ** 2


def counts(adjacency):
    return adjacency @ jnp.ones((3001, 2))


def logits(x, weights):
    return x @ weights


def raw_features(x, weights):
    return jnp.tanh(x @ weights)


def normalizer(q, k):
    return q @ (k.T @ jnp.ones((len(k), 1)))


def sums_over_positions(x):
    return jnp.tri(len(x)) @ x


def rotation(angle):
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])


def rotated(points):
    return (points - jnp.array([1.0, 2.0, 3.0])) @ rotation(0.3).T


def projected(points):
    camera = jnp.array([[800.0, 0, 320], [0, 800, 240], [0, 0, 1]])
    image = points @ camera.T
    return image[:, :2] / image[:, 2:]


def chain_of_joints(joint_angles):
    pose = jnp.eye(4)
    for angle in joint_angles:
        pose = pose @ jnp.eye(4).at[:3, :3].set(rotation(angle)).at[:3, 3].set(jnp.array([300.0, 0, 50]))
    return pose[:3, 3]


def nearest_neighbors(x):
    return jnp.mean(jnp.argmin(squared_distances(x) + 1e9 * jnp.eye(len(x)), axis=1) == jnp.arange(len(x)) ^ 1)


def log_mel(powers, filters):
    return jnp.log(powers @ filters + 1e-10)


def log_probabilities(a, b):
    return jnp.log(jnp.exp(a) @ jnp.exp(b).T)


def sampling_grid(transform):
    """The places at which a spatial transformer samples an image."""
    x, y = jnp.meshgrid(jnp.linspace(-1, 1, 32), jnp.linspace(-1, 1, 32))
    return jnp.stack([x, y, jnp.ones_like(x)], axis=-1) @ transform.T


def invariant_masses(momenta):
    """The squared masses of pairs of particles, from their energies and momenta."""
    metric = jnp.diag(jnp.array([1.0, -1.0, -1.0, -1.0]))
    return jnp.einsum("bni,ij,bmj->bnm", momenta, metric, momenta)


def smoothed(signal):
    return jax.lax.conv(signal, jnp.full((1, 1, 3), 1 / 3), window_strides=(1,), padding="SAME")


def features_of_a_table(columns, frequencies):
    return jnp.cos(columns @ frequencies)


def scalings_of_sinkhorn(x, y):
    """The logarithms of the factors of the columns in the transport plan between two sets of points."""
    kernel = jnp.exp(-5 * jnp.sum((x[:, None] - y[None]) ** 2, axis=-1))
    columns = jnp.ones(len(y))
    for _ in range(20):
        rows_of_plan = 1 / (kernel @ columns + 1e-9)
        columns = 1 / (kernel.T @ rows_of_plan + 1e-9)
    return jnp.log(columns)


PLACES = np.arange(4000, 4128, dtype=np.float32)
PROGRAMS = {  # in the order of the table: the function, and a function that creates its arguments
    "categorical critic": (critic, lambda: [normal(32, 601, scale=2)]),
    "two-hot": (two_hot, lambda: [jnp.zeros((8, 255)).at[:, 127:129].set(0.5)]),
    "masked scores": (masked_ctc, lambda: [normal(2, 10, 6)]),
    "indices": (indices, lambda: [jax.nn.one_hot(jnp.array([5, 2049]), 80_000)]),
    "counts": (counts, lambda: [jnp.ones((4, 3001))]),
    "covariance": (covariance, lambda: [normal(4096, 8, mean=5)]),
    "Gram matrix": (gram, lambda: [4 * jnp.abs(normal(9216, 64))]),
    "normal equations": (least_squares, lambda: [normal(256, 1, seed=1) + normal(256, 8, scale=0.1)]),
    "local variance": (local_variance, lambda: [normal(2, 1, 16, 16, mean=0.8, scale=0.01)]),
    "logits": (logits, lambda: [jnp.full((2, 8), 100.0), jnp.full((8, 2), 100.0)]),
    "raw features": (raw_features, lambda: [normal(64, 8, mean=9e4, scale=2e4), normal(8, 8, scale=1e-5)]),
    "normalizer": (normalizer, lambda: [jnp.abs(normal(16, 32)), jnp.abs(normal(4096, 32, seed=1))]),
    "sums over positions": (sums_over_positions, lambda: [normal(1024, 8, mean=1)]),
    "nearest neighbors": (
        nearest_neighbors,
        lambda: [jnp.repeat(normal(128, 8, mean=30), 2, 0) + normal(256, 8, scale=0.1)],
    ),
    "powers": (log_mel, lambda: [normal(64, 201, scale=1e-4) ** 2, jnp.abs(normal(201, 40)) / 201]),
    "angles: `cos(x @ w)`": (
        features_of_a_table,
        lambda: [normal(64, 6) + jnp.array([2000.0, 0, 0, 0, 0, 0]), normal(6, 128, scale=0.7, seed=1)],
    ),
    "Sinkhorn": (scalings_of_sinkhorn, lambda: [normal(64, 2), normal(64, 2, seed=1)]),
    "probabilities": (log_probabilities, lambda: [normal(8, 16, mean=-12), normal(8, 16, mean=-12, seed=1)]),
}
# Programs whose contractions have at most 4 elements, so that autocast changes nothing.
COORDINATES = {
    "angles": (angles, lambda: [jnp.stack([PLACES, PLACES / 3], axis=1)]),
    "Fourier features": (fourier_features, lambda: [jnp.abs(normal(1024, 2)), normal(2, 64, scale=100)]),
    "squared distances": (squared_distances, lambda: [normal(64, 3, mean=10, scale=0.01)]),
    "Cholesky": (cholesky, lambda: [normal(64, 2)]),
    "rotated": (rotated, lambda: [normal(256, 3, scale=200)]),
    "projected": (projected, lambda: [normal(256, 3) + jnp.array([0, 0, 5.0])]),
    "chain of joints": (chain_of_joints, lambda: [normal(6)]),
    "sampling grid": (sampling_grid, lambda: [jnp.array([[0.9, 0.1, 0.02], [-0.1, 0.9, -0.01]])]),
    "invariant masses": (invariant_masses, lambda: [normal(16, 5, 4, mean=100, scale=30)]),
    "convolution of one channel with a window of 3": (smoothed, lambda: [normal(2, 1, 64, mean=1e5)]),
}


def table_of_page():
    """Returns the rows of the table: the text of the program, the largest value and the errors of both forms."""
    page = (DOCS / "guides" / "autocast.md").read_text()
    table = re.findall(r"^\| (.*) \| (\S+) \| (\S+) \| (\S+) \|$", page, flags=re.M)
    return [row for row in table if not row[0].startswith(("program", "-"))]


def test_page_has_a_row_for_each_program():
    table = table_of_page()
    assert len(table) == len(PROGRAMS)
    for (text, *_), name in zip(table, PROGRAMS, strict=True):
        assert name in text


@pytest.mark.filterwarnings("ignore:autocast has no effect.*jax_default_matmul_precision")
@pytest.mark.parametrize("name", PROGRAMS)
def test_autocast_has_the_error_on_the_page(name):
    fun, create = PROGRAMS[name]
    args = create()
    _, *row = table_of_page()[list(PROGRAMS).index(name)]
    half_fun, float32_results = jmpscale.autocast(fun), jmpscale.autocast(fun, result_dtype=jnp.float32)
    functions = (fun, half_fun, float32_results)
    expected, *results = (np.asarray(jax.jit(f, **FAST)(*args), np.float64) for f in functions)
    measured = [np.max(np.abs(expected)), *(np.max(np.abs(result - expected)) for result in results)]
    tolerances = TOLERANCE, TOLERANCE, TOLERANCE_OF_FLOAT32_RESULTS
    for shown, value, tolerance in zip(row, measured, tolerances, strict=True):
        if np.isfinite(float(shown)):
            assert float(shown) / tolerance <= value <= float(shown) * tolerance
        else:
            np.testing.assert_equal(value, float(shown))
    with jax.default_matmul_precision("highest"):
        assert "f16" not in str(jax.make_jaxpr(half_fun)(*args))


@pytest.mark.parametrize("program", rows(COORDINATES))
def test_autocast_keeps_coordinates_in_float32(program):
    fun, create = program
    args = create()
    np.testing.assert_array_equal(jax.jit(jmpscale.autocast(fun))(*args), jax.jit(fun)(*args))


@pytest.mark.parametrize(("size", "is_exact"), [(4, True), (5, False)])
def test_autocast_converts_contractions_of_more_than_four_elements(size, is_exact):
    matmul, convolution, ragged = normal(7, size), normal(2, size, 9), normal(2, size, 6)
    programs = {
        "matmul": lambda: matmul @ normal(size, 6, seed=1),
        "batch of matmuls": lambda: jnp.einsum("bij,bjk->bik", convolution.swapaxes(1, 2), ragged),
        "convolution": lambda: jax.lax.conv(convolution, normal(6, size, 1, seed=1), (1,), "SAME"),
        "ragged_dot": lambda: jax.lax.ragged_dot(matmul, ragged, jnp.array([3, 4])),
    }
    for name, fun in programs.items():
        result = jax.jit(jmpscale.autocast(fun), **FAST)()
        assert np.array_equal(result, jax.jit(fun, **FAST)()) == is_exact, name


def test_inner_products_are_recognized_by_shape():
    """With one example, a head with one output is an inner product."""
    weights, x = normal(64, 1), normal(8, 64, seed=1)
    head = jmpscale.autocast(lambda x: x @ weights)
    np.testing.assert_array_equal(head(x[:1]), x[:1] @ weights)
    assert 1e-5 < np.max(np.abs(head(x) - x @ weights)) < 1e-1
