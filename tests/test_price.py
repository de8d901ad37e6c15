"""What a step costs, as far as the program tells, whatever the machine: a guard against drift. Times nothing.

Limits are ratios to the step with clipping, `benchmarks.steps.FLOOR`, in the same version of JAX; they stand a little
above what was measured on JAX 0.7.1, 0.10.2 and 0.12.0.1, whose programs differ.
"""

import functools
import pathlib
import sys

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import steps, timing

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion")]

FEW, MANY = 4, 8  # layers
_build = functools.partial(timing.build, compilations=1)
LIMITS = {  # of instructions for each layer, of bytes of temporary memory
    "functional": (1.0, 0.7),
    "functional, norm as check": (1.0, 0.66),
    "functional, clip in chain": (1.25, 1.01),
    "optax wrapper": (1.25, 0.7),
    "optax wrapper, max_norm": (1.25, 0.64),
    "optax wrapper, clip in chain": (1.5, 1.55),
    "static": (1.0, 0.7),
}


@functools.cache
def _program(name, layers):
    return _build(steps.make_job(steps.mlp(layers, 64, 8)), steps.METHODS[name])[1]


def _instructions_of_a_layer(name):
    return (_program(name, MANY)["instructions"] - _program(name, FEW)["instructions"]) / (MANY - FEW)


@functools.cache
def _instructions_of_a_leaf(name):
    few, many = (_build(steps.make_job(steps.tiny_leaves(n)), steps.METHODS[name])[1] for n in (20, 40))
    return (many["instructions"] - few["instructions"]) / 20


@pytest.mark.parametrize("name", LIMITS)
def test_no_layer_has_more_instructions_than_it_had(name):
    assert _instructions_of_a_layer(name) <= LIMITS[name][0] * _instructions_of_a_layer(steps.FLOOR)


@pytest.mark.parametrize(
    ("name", "limit"), [("functional", 1.17), ("optax wrapper", 1.3), ("optax wrapper, max_norm", 1.36)]
)
def test_no_small_leaf_has_more_instructions_than_it_had(name, limit):
    assert _instructions_of_a_leaf(name) <= limit * _instructions_of_a_leaf(steps.FLOOR)


@pytest.mark.parametrize("name", LIMITS)
def test_no_step_needs_more_temporary_memory_than_it_did(name):
    assert _program(name, MANY)["temp_bytes"] <= LIMITS[name][1] * _program(steps.FLOOR, MANY)["temp_bytes"]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adafactor"])
def test_with_loss_scaling_takes_at_most_one_gradient_more_memory_than_clipping(optimizer):
    """On CPU, where a gradient is in memory both before and after it is unscaled."""
    width = 128  # from which on adafactor factorises its moments
    ours, clipped = (
        _build(steps.make_job(steps.mlp(FEW, width, 8), optimizer), steps.METHODS[name])[1]["temp_bytes"]
        for name in ("optax wrapper", steps.FLOOR)
    )
    assert ours <= clipped + 1.3 * 4 * width**2


def test_disabled_is_the_bare_step():
    measured = ("instructions", "temp_bytes", "collectives")
    for layers in (FEW, MANY):
        assert [_program("disabled", layers)[key] for key in measured] == [
            _program("bare", layers)[key] for key in measured
        ]


@pytest.mark.parametrize(
    "name", ["functional", "functional, norm as check", "optax wrapper", "optax wrapper, max_norm"]
)
def test_steps_are_traced_once_and_on_one_device_nothing_is_communicated(name):
    run, figures = _build(steps.make_job(steps.mlp(1, 8, 4)), steps.METHODS[name])
    for _ in range(3):
        run()
    assert run.traces == 1
    assert figures["collectives"] == 0


@pytest.mark.parametrize("name", ["functional", "optax wrapper", "optax wrapper, max_norm"])
def test_data_parallel_training_communicates_no_more_than_the_step_without_scaling(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    everywhere, divided = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    job = steps.make_job(steps.mlp(FEW, 64, 8))
    job = job._replace(batch=jax.device_put(job.batch, divided))
    bare, ours = (_build(job, steps.METHODS[way], everywhere)[1]["collectives"] for way in ("bare", name))
    assert 0 < ours <= bare
