"""The plots show the values of the arrays: heights, curves and markers are read back from the axes."""

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

import jmpscale
from jmpscale import plots

pytestmark = pytest.mark.once

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def _percentages(ax):
    """Reads the histogram back: for each kind, the sum of the heights of its bars."""
    return {c.get_label().split(" (")[0]: sum(bar.get_height() for bar in c) for c in ax.containers}


GRADS = {
    "w": jnp.array([1e-9, 2.0**-24, 2.0**-15, 2.0**-14]),
    "b": jnp.array([1.0, 0.0, jnp.nan, 7e4]),
    "n": jnp.array(3),
}


def test_exponent_histogram_sorts_values_by_kind():
    ax = plots.exponent_histogram(GRADS)
    percentages = _percentages(ax)
    assert percentages == pytest.approx(
        {"underflow in float16": 12.5, "subnormal in float16": 25, "normal in float16": 25, "overflow in float16": 12.5}
    )
    assert ax.get_title() == "not shown: zero 12.5%, infinite 0.0%, NaN 12.5%"
    limits = {round(line.get_xdata()[0], 3) for line in ax.lines}
    assert limits == {-24.0, -14.0, round(np.log2(65504), 3)}


def test_exponent_histogram_shows_values_that_a_scale_preserves():
    percentages = _percentages(plots.exponent_histogram(GRADS, scaler=jmpscale.static(2.0**16)))
    assert percentages == pytest.approx(
        {"preserved by the loss scale": 37.5, "normal in float16": 12.5, "overflow in float16": 25}
    )
    half = jnp.array([2.0**-20, 1.0], jnp.float16)
    assert _percentages(plots.exponent_histogram(half, scaler=jmpscale.static(4.0))) == pytest.approx(
        {"subnormal in float16": 50, "normal in float16": 50}
    )


def test_exponent_histogram_counts_both_parts_of_a_complex_number():
    grads = [jnp.array([1 + 1e-9j, 2.0**-15 + 7e4j], jnp.complex64), 1j]
    ax = plots.exponent_histogram(grads)
    sixth = 100 / 6
    assert _percentages(ax) == pytest.approx(
        {
            "underflow in float16": sixth,
            "subnormal in float16": sixth,
            "normal in float16": 2 * sixth,
            "overflow in float16": sixth,
        }
    )
    assert ax.get_title() == "not shown: zero 16.7%, infinite 0.0%, NaN 0.0%"


def test_exponent_histogram_ignores_leaves_that_are_not_gradients():
    others = [np.float32, jnp.float16, np.dtype("f2"), jax.random.key(0), "text", np.str_("text"), jnp.tanh, None, 3]
    assert _percentages(plots.exponent_histogram([GRADS, others])) == _percentages(plots.exponent_histogram(GRADS))


def test_exponent_histogram_states_the_percentages_of_infinities_and_nan():
    grads = jnp.array([1.0, jnp.inf, -jnp.inf, jnp.nan, 0.0])
    for scaler in (None, jmpscale.dynamic()):
        ax = plots.exponent_histogram(grads, scaler=scaler)
        assert ax.get_title() == "not shown: zero 20.0%, infinite 40.0%, NaN 20.0%"
        assert sum(_percentages(ax).values()) == pytest.approx(20)


@pytest.mark.parametrize("grads", [jnp.zeros(3), jnp.full(3, jnp.nan)])
def test_exponent_histogram_of_zeros_or_nan_is_empty(grads):
    assert _percentages(plots.exponent_histogram(grads)) == {}


def test_scale_trajectory_marks_skips_by_reason():
    def step(state, finite):
        state = jmpscale.update(state, finite, loss=jnp.where(state.skipped == 2, jnp.nan, 1.0))
        return state, jmpscale.metrics(state)

    _, history = jax.lax.scan(
        step, jmpscale.dynamic(growth_interval=2), jnp.array([True, False, True, True, False, False])
    )
    ax = plots.scale_trajectory(history)
    curve, overflows, losses = ax.lines
    assert curve.get_ydata().tolist() == [2.0**n for n in (16, 15, 15, 16, 15, 15)]
    assert overflows.get_xdata().tolist() == [2, 5]
    assert losses.get_xdata().tolist() == [6]
    assert [line.get_label() for line in ax.lines[1:]] == [
        "skipped, gradients not finite: 2",
        "skipped, loss not finite: 1",
    ]
    assert (ax.get_yscale(), ax.yaxis.get_transform().base) == ("log", 2)


def test_headroom_names_the_leaves_with_the_least_headroom():
    grads = {"near": jnp.array([[1024.0], [65504.0], [jnp.inf]]), "far": jnp.array([[1.0], [2.0], [0.0]])}
    reports = jax.vmap(jmpscale.grad_report)(grads)
    given = plt.subplots()[1]
    ax = plots.headroom(reports, limit=1, ax=given)
    assert ax is given
    far, near, limit = ax.lines
    np.testing.assert_allclose(near.get_ydata(), [np.log2(65504 / 1024), 0, np.nan])
    np.testing.assert_allclose(far.get_ydata(), [np.log2(65504), np.log2(65504 / 2), np.nan])
    assert near.get_label() == "near"
    assert limit.get_ydata() == [0, 0]
    assert len(plots.headroom(reports).lines) == 3


def test_headroom_names_every_leaf_that_it_shows():
    reports = jax.vmap(jmpscale.grad_report)({"_scale": jnp.ones((3, 1)), "w": {"_0": jnp.ones((3, 1))}})
    names = [text.get_text().strip() for text in plots.headroom(reports).get_legend().get_texts()]
    assert names == ["_scale", "w/_0", "float16 overflows"]


def test_exponent_histogram_stacks_bars_over_their_exponents():
    ax = plots.exponent_histogram(jnp.array([2.0**-3, 8.0, 60_000.0, 65_530.0]))
    kept, overflowing = ([bar for bar in bars if bar.get_height()] for bars in ax.containers)
    assert [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in kept] == [(-3, 0, 25), (3, 0, 25), (15, 0, 25)]
    assert [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in overflowing] == [(15, 25, 25)]
    assert [bar.get_x() for bar in ax.containers[0]] == list(range(-3, 16))
    assert [bar.get_x() for bar in plots.exponent_histogram(jnp.array([8.0])).containers[0]] == [0, 1, 2, 3]


def test_headroom_names_as_many_leaves_as_the_limit():
    reports = jax.vmap(jmpscale.grad_report)([jnp.full((3, 1), 2.0**i) for i in range(9)])
    legends = [plots.headroom(reports, **options).get_legend().get_texts() for options in ({}, {"limit": 2})]
    assert [len(names) for names in legends] == [8 + 1, 2 + 1]  # and the line at which float16 overflows
