"""The statistics of range_report: what they record of a result, and how they combine executions and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jmpscale._statistics import FINITE, INFINITE, NAN, at_step, measure, merge, nothing_like, over_devices

import meshes


@pytest.mark.parametrize("in_half", [True, False])
@pytest.mark.parametrize(
    ("values", "kind"),
    [([1, -2], FINITE), ([0, 0], FINITE), ([1, np.inf], INFINITE), ([1, np.nan], NAN), ([np.nan, -np.inf], NAN)],
    ids=str,
)
def test_measure_returns_the_worst_kind(values, kind, in_half):
    assert measure(jnp.array(values, jnp.float32), in_half).kind == kind


def test_measure_counts_finite_values_by_exponent():
    values = jnp.array([0, -0.0, 1, 1.5, -4, 2.0**-140, 1e38, np.inf, -np.inf, np.nan], jnp.float32)
    found = measure(values, in_half=True).range
    exponents = {127: 2, 129: 1, 253: 1}  # the bits of float32; subnormal numbers count as zeros
    assert {int(i): int(found.counts[i]) for i in np.flatnonzero(found.counts)} == exponents
    assert found.max_abs == np.float32(1e38)
    assert (found.steps.shape, found.smallest) == ((0,), None)


def _executions(*scales, separate=True):
    """Returns the statistics of the iterations of a loop whose result is proportional to these scales."""
    return [
        at_step([measure(jnp.float32(scale) * jnp.arange(1.0, 9.0), in_half=True)], jnp.int32(i), [separate])[0]
        for i, scale in enumerate(scales)
    ]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]], ids=str)
def test_merge_keeps_the_largest_and_the_smallest_execution(order):
    executions = _executions(1, 64, 2.0**-20, 1)
    total = nothing_like(executions[:1])[0]
    for i in order:
        total = merge(total, executions[i])
    found = total.range
    assert (total.kind, found.max_abs, found.steps.tolist()) == (FINITE, 512, [1])
    assert found.counts.sum() == 32
    assert found.smallest.steps.tolist() == [2]
    np.testing.assert_array_equal(found.smallest.counts, executions[2].range.counts)


def test_merge_of_iterations_that_are_not_separate_has_no_smallest():
    first, second = _executions(1, 2, separate=False)
    assert merge(first, second).range.smallest is None


@pytest.mark.parametrize(("count", "exponent"), [(64, 127), (128, 120)])
def test_smallest_exponent_ignores_one_percent_of_the_norm(count, exponent):
    """The small values have 0.8 or 1.5 % of the norm."""
    values = jnp.concatenate([jnp.ones(64), jnp.full(count, 2.0**-7)])
    (statistics,) = at_step([measure(values, in_half=True)], jnp.int32(0), [True])
    assert statistics.range.smallest.exponent == exponent


def test_over_devices_takes_the_extremes_of_all_devices():
    """Device 5 has the largest values, and device 2 the smallest."""
    mesh = meshes.make_mesh(data=8)
    scales = np.ones(8, np.float32)
    scales[[5, 2]] = 64, 2.0**-20

    def local(scale):
        index = jax.lax.axis_index("data")
        (found,) = at_step([measure(scale * jnp.arange(1.0, 9.0), in_half=True)], index, [True])
        return over_devices(found, ("data",))

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False))(scales).range
    assert (found.max_abs, found.steps.tolist(), found.counts.sum()) == (512, [5], 64)
    assert found.smallest.steps.tolist() == [2]


def test_over_devices_names_the_iterations_of_one_device():
    """All devices have equal values, in iterations 1/0, 0/1, 1/0 and so on of two loops."""
    mesh = meshes.make_mesh(data=8)

    def local():
        is_odd = jax.lax.axis_index("data") % 2
        inner = at_step([measure(jnp.arange(1.0, 9.0), in_half=True)], is_odd, [False])
        return over_devices(at_step(inner, 1 - is_odd, [False])[0], ("data",))

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))()
    assert found.range.steps.tolist() == [1, 0]
