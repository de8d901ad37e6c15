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

from benchmarks import gpu, growth, programs, steps, table, timing  # noqa: E402

pytestmark = [
    pytest.mark.full,  # users of the library do not run them
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


@pytest.mark.parametrize("name", ["functional, norm as check", "optax wrapper", "optax apply_if_finite"])
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


PROGRAM = programs.parse("""HloModule jit_step

%fused (p: f32[1024,8]) -> f32[1024,8] {
  %p = f32[1024,8]{1,0} parameter(0)
  ROOT %copy.9 = f32[1024,8]{1,0} copy(%p)
}

%taken (t: (f32[1024,8], f32[])) -> f32[1024,8] {
  %t = (f32[1024,8]{1,0}, f32[]) parameter(0)
  %get-tuple-element.1 = f32[1024,8]{1,0} get-tuple-element(%t), index=0
  ROOT %negate.1 = f32[1024,8]{1,0} negate(%get-tuple-element.1)
}

%kept (t: (f32[1024,8], f32[])) -> f32[1024,8] {
  %t.1 = (f32[1024,8]{1,0}, f32[]) parameter(0)
  ROOT %get-tuple-element.2 = f32[1024,8]{1,0} get-tuple-element(%t.1), index=0
}

ENTRY %main (a: f32[1024,8], b: pred[]) -> f32[1024,8] {
  %a = f32[1024,8]{1,0:T(8,128)} parameter(0)
  %b = pred[] parameter(1)
  %copy-start.1 = (f32[1024,8]{1,0:T(8,128)S(1)}, f32[1024,8]{1,0}, u32[]) copy-start(%a)
  %copy-done.1 = f32[1024,8]{1,0:T(8,128)S(1)} copy-done(%copy-start.1)
  %loop_fusion = f32[1024,8]{1,0} fusion(%copy-done.1), kind=kLoop, calls=%fused
  %sum = f32[] constant(0)
  %all-reduce-start.1 = (f32[1024,8]{1,0}, /*index=1*/f32[]) all-reduce-start(%loop_fusion, %sum), to_apply=%add
  %all-reduce-done.1 = (f32[1024,8]{1,0}, f32[]) all-reduce-done(%all-reduce-start.1)
  %all-reduce.2 = f32[7]{0} all-reduce(%sum), to_apply=%add
  %both = (f32[1024,8]{1,0}, f32[]) tuple(%all-reduce-done.1)
  ROOT %cond.1 = f32[1024,8]{1,0} conditional(%b, %both, %both), true_computation=%taken, false_computation=%kept
}
""")


def test_a_program_is_read_with_its_branches_and_fusions():
    assert programs.count(PROGRAM, "conditional") == 1
    assert programs.copies(PROGRAM) == ["f32[1024,8]{1,0}"]  # that of the fusion; the other fetches into the chip
    assert programs.collectives(PROGRAM) == {"all-reduce": 2}
    assert programs.small_all_reduces(PROGRAM) == 1
    assert programs.kernels(PROGRAM) == 5  # a fetch, a fusion, two all-reduces, and of the branches the dearer one


def test_the_bytes_of_a_program_are_those_that_its_instructions_read_and_write():
    large = 4 * 1024 * 8
    fused, reduced, few, branch = 2 * large, 2 * (large + 4), 4 + 28, 2 * large
    assert programs.traffic(PROGRAM) == fused + reduced + few + branch  # and what is fetched ahead does not count


def test_bytes_are_counted_by_dtype():
    kinds = (
        "(f32[2,3]{1,0:T(8,128)(2,1)}, s8[], pred[5])",
        "bf16[8]",
        "f8e4m3fn[8]",
        "s4[8]",
        "token[]",
        "u32[]{:S(2)}",
    )
    assert [programs.bytes_of(kind) for kind in kinds] == [30, 16, 8, 4, 0, 4]


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


def test_table_on_the_page_is_made_from_the_results():
    text = table.PAGE.read_text()
    measured, compiled = (json.loads(path.read_text()) for path in (table.RESULTS, table.COMPILED))
    assert table.rewrite(text, table.table(measured, compiled)) == text


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="<!-- steps -->"):
        table.rewrite("# a page", "| table |")
