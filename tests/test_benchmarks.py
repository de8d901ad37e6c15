"""What the benchmarks compare does the same work, keeps its promises, and is reported as measured. Times nothing."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale.testing import assert_step_is_noop

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import gpu, growth, steps, table, timing  # noqa: E402

pytestmark = [
    pytest.mark.once,
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:jax.interpreters.batching.NotMapped:DeprecationWarning"),  # Equinox, in mpx
]


TASK = steps.mlp(1, 8, 4)


def _train(name, **settings):
    """Takes three steps; skips where the peer is not installed."""
    try:
        run = timing.Run(steps.make_job(TASK, **settings), steps.METHODS[name])
    except ImportError as error:
        pytest.skip(str(error))
    for _ in range(3):
        run()
    return run


@pytest.fixture(scope="module")
def bare_losses():
    with jax.numpy_dtype_promotion("standard"):
        return _train("bare").losses


def _kept(state):
    """What a skipped step must not move: parameters and optimizer state, without counts of skips and the scale."""
    params, opt_state, _ = state
    if isinstance(opt_state, list):  # Keras keeps its own four variables first: two of any optimizer, two of the scale
        opt_state = opt_state[4:]
    return jax.tree.map(np.asarray, (params, optax.tree.get(opt_state, "inner_state", opt_state)))


@pytest.mark.parametrize("name", steps.METHODS)
def test_each_method_walks_the_path_of_the_bare_step_and_skips_an_overflow_if_it_promises_to(name, bare_losses):
    run = _train(name)
    timing.require_same_work({"bare": bare_losses, name: run.losses})
    np.testing.assert_allclose(run.losses, bare_losses, rtol=1e-2 if "Keras" in name else 1e-5)
    before = _kept(run.state)
    run.batch = run.batch * jnp.inf
    run()
    if name in steps.UNGUARDED:
        assert np.isnan(jax.tree.leaves(run.state)[0]).all()
    else:
        assert_step_is_noop(before, _kept(run.state))


@pytest.mark.parametrize("name", ["functional, one read", "in optax", "optax apply_if_finite"])
def test_16_bit_gradients_train_float32_weights(name, bare_losses):
    run = _train(name, compute=jnp.float16, grads=jnp.float16)
    assert {leaf.dtype for leaf in jax.tree.leaves(run.state[0])} == {np.dtype(np.float32)}
    np.testing.assert_allclose(run.losses, bare_losses, rtol=1e-2)


def test_a_method_that_skips_or_does_other_work_is_refused():
    with pytest.raises(RuntimeError, match="lazy skipped"):
        timing.require_same_work({"lazy": [3.0, 3.0, 2.0]})
    with pytest.raises(RuntimeError, match="different work"):
        timing.require_same_work({"one": [3.0, 2.0], "other": [3.0, 2.0], "third": [3.0, 1.0]})


def test_accumulated_micro_batches_make_the_step_of_the_whole_batch(bare_losses):
    job = steps.make_job(TASK)
    run = timing.Run(job, lambda job: growth.accumulate(job, 4, job.tx, jmpscale.dynamic()))
    for _ in range(3):
        run()
    np.testing.assert_allclose(run.losses, bare_losses, rtol=1e-5)


def test_a_turn_of_every_function_belongs_to_every_round():
    taken = timing.interleave({"a": lambda: None, "b": lambda: sum(range(2000))}, 0.0)
    assert {len(times) for times in taken.values()} == {7}
    summary = timing.summarize({"a": np.array([1.0, 2.0, 8.0]), "b": np.array([2.0, 2.0, 4.0])}, "b")
    assert (summary["a"]["ms"], summary["a"]["ratio"], summary["b"]["ratio"]) == (2000.0, 1.0, 1.0)


def test_instructions_and_collectives_are_counted():
    program = """
      %p = f32[8]{0} parameter(0)
      %all-reduce-start.1 = (f32[], f32[]) all-reduce-start(%p), to_apply=%add
      ROOT %fusion.2 = (f32[8]{0}, /*index=1*/f32[]) fusion(%p), kind=kLoop
      %get-tuple-element.3 = f32[8]{0} get-tuple-element(%fusion.2), index=0
    """
    assert timing.instructions(program) == {"instructions": 2, "collectives": 1}


def test_without_a_gpu_nothing_is_measured_and_nothing_claimed(capsys, tmp_path):
    if jax.devices()[0].platform == "gpu":
        pytest.skip("there is a GPU")
    assert gpu.main(tmp_path / "gpu.json", False, dict) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_results_say_where_and_with_what_they_were_measured():
    written = json.loads(table.RESULTS.read_text())
    for part in written.values():
        about = part["about"]
        assert about.keys() >= {"date", "command", "device", "cpu", "cores", "versions"}
        assert about["versions"].keys() >= {"python", "jax", "jaxlib", "optax", "flax", "jmp", "keras"}


def test_the_table_in_the_readme_is_the_one_that_the_results_make():
    text = table.README.read_text()
    assert table.rewrite(text, table.table(json.loads(table.RESULTS.read_text()))) == text


def test_a_readme_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="<!-- benchmark -->"):
        table.rewrite("# a page", "| table |")
