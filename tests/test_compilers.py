"""Steps compiled for H100 and TPU cost no more than the same step with clipping. No such device is needed.

Runs if one of the compilers is installed (the extras `compile-h100` and `compile-tpu`), and is skipped otherwise.
"""

import functools
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import targets

if not (KINDS := [name for name in ("h100", "tpu") if targets.installed(name)]):
    pytest.skip("neither the compiler for H100 nor that for TPU is installed", allow_module_level=True)

from benchmarks import compilers, steps

KIND = KINDS[0]  # one process compiles for one kind
ONE, MANY = {"h100": ("h100", "h100"), "tpu": ("tpu-v5e", "tpu-v5p")}[KIND]
SLACK = {"h100": 0, "tpu": 2**19}[KIND]  # bytes: how the TPU's compiler packs a few MB, with any other scaler too
MORE_KERNELS = 9  # one for each scalar of the state, and with max_norm the factor
METHODS = ("functional", "functional, norm as check", "optax wrapper", "optax wrapper, max_norm", "loss_scaled")
# Large enough that no memory on the chip holds a matrix, and small enough to compile in two seconds.
SHAPE = {"h100": (3, 2048), "tpu": (2, 8192)}[KIND]

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]


@functools.cache
def _mesh(devices):
    return targets.mesh(ONE if devices == 1 else MANY, devices)


@functools.cache
def _figures(method, optimizer, devices):
    layers, width = SHAPE
    if KIND == "tpu" and devices > 8:
        layers = 4  # of two only, the compiler once holds two gathered matrices where it otherwise holds one
    task = targets.abstract(functools.partial(steps.mlp, layers, width, 32 if devices == 1 else 256))
    return compilers.measure(steps.make_job(task, optimizer, compilers.HALF[ONE]), method, _mesh(devices))


@functools.cache
def _embedding_figures(method, devices):
    task = targets.abstract(functools.partial(steps.embedding, 32_000, 1024, 256, 8))
    return compilers.measure(steps.make_job(task), method, _mesh(devices))


@pytest.fixture(params=steps.OPTIMIZERS)
def optimizer(request):
    return request.param


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def _check_costs(ours, clipped):
    assert ours["moved_bytes"] <= 1.01 * clipped["moved_bytes"]
    assert ours["temp_bytes"] <= 1.01 * clipped["temp_bytes"] + SLACK
    assert ours["copies_of_state"] == 0
    if KIND == "h100":  # on a GPU the host decides which branch runs, and waits for the flag
        assert (ours["branches"], ours["loops"]) == (0, 0)
        assert ours["kernels"] <= clipped["kernels"] + MORE_KERNELS


@pytest.mark.parametrize("devices", [1, 8, 1024])
def test_step_costs_no_more_than_clipping(devices, optimizer, method):
    _check_costs(*(_figures(name, optimizer, devices) for name in (method, steps.FLOOR)))


@pytest.mark.parametrize("devices", [1, 8])
def test_embedding_step_costs_no_more_than_clipping(devices, method):
    """The zeros of the check must not be merged with those from which the gradient of a table starts."""
    _check_costs(*(_embedding_figures(name, devices) for name in (method, steps.FLOOR)))


@pytest.mark.parametrize("devices", [8, 1024])
def test_sharded_state_keeps_its_sharding_and_nothing_is_gathered(devices, optimizer, method):
    ours, clipped = (_figures(name, optimizer, devices) for name in (method, steps.FLOOR))
    assert ours["sharded"] > 0
    assert ours["lost"] == 0
    gathers = [sum(n for name, n in x["collectives"].items() if name != "all-reduce") for x in (ours, clipped)]
    assert gathers[0] <= gathers[1]
    assert ours["small_all_reduces"] <= clipped["small_all_reduces"]
