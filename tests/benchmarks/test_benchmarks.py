"""The benchmarks compare methods that do the same work, and read compiled programs correctly. Nothing is timed."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jmpscale.__main__ as demonstration
from benchmarks import __main__ as main
from benchmarks import architecture, demonstration_pictures, diagnosis_picture, programs, record, steps, timing
from benchmarks.traffic import communicated_bytes, moved_bytes

from bits import assert_equal_bits

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion")]


def train(name, **settings):
    try:
        run, _ = timing.build(steps.make_job(steps.mlp(1, 8, 4), **settings), steps.METHODS[name])
    except ImportError as error:
        pytest.skip(str(error))
    run.start()
    for _ in range(3):
        run()
    return run


@pytest.fixture(scope="module")
def bare_losses():
    with jax.numpy_dtype_promotion("standard"):
        return train("bare").losses


@pytest.mark.parametrize("name", steps.METHODS)
def test_method_trains_like_bare_and_skips_an_overflow(name, bare_losses):
    run = train(name)
    np.testing.assert_allclose(run.losses, bare_losses, rtol=1e-5)
    params, opt_state, _ = jax.tree.map(np.asarray, run.state)
    run.batch = run.batch * jnp.inf
    run()
    if name in steps.UNGUARDED:
        assert np.isnan(jax.tree.leaves(run.state)[0]).all()
    else:
        inner = [optax.tree.get(tree, "inner_state", tree) for tree in (opt_state, run.state[1])]
        assert_equal_bits((params, inner[0]), (run.state[0], inner[1]))


@pytest.mark.parametrize("name", ["functional, norm as check", "optax wrapper", "optax apply_if_finite"])
def test_float16_gradients_train_float32_weights(name, bare_losses):
    run = train(name, compute=jnp.float16, grads=jnp.float16)
    assert {leaf.dtype for leaf in jax.tree.leaves(run.state[0])} == {np.dtype(np.float32)}
    np.testing.assert_allclose(run.losses, bare_losses, rtol=1e-2)


def test_cases_compare_with_every_library_at_a_tiny_size():
    pytest.importorskip("mpx")
    _, settings, methods, _ = main.OTHERS["sgd"]
    with jax.numpy_rank_promotion("allow"):
        figures = main.measure({"tiny": (functools.partial(steps.mlp, 1, 8, 4), settings, methods, 0.0)})["tiny"]
    assert set(figures) == set(methods) > {"clipped", *steps.PEERS}


def test_lora_adapters_start_without_effect_and_are_all_that_is_trained():
    sizes = {"layers": 1, "width": 8, "heads": 2, "vocabulary": 16, "length": 8, "batch": 2}
    loss_fn, adapters, (frozen, tokens) = steps.transformer(**sizes, rank=2)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        loss, grads = jax.jit(jax.value_and_grad(loss_fn))(adapters, (frozen, tokens))
        np.testing.assert_allclose(loss, jax.jit(steps.transformer(**sizes)[0])(frozen, tokens), rtol=1e-6)
    shapes = [(n, 2) for n in (8, 8, 8, 32)] + [(2, n) for n in (24, 8, 32, 8)]
    assert sorted(x.shape for x in grads[0].values()) == sorted(shapes)
    assert np.any(grads[0]["qkv_b"])


def test_record_adds_results_with_the_command_and_the_machine(tmp_path):
    path = tmp_path / "results" / "times.json"
    about = record.about("benchmarks", "cpu")
    assert about["command"].startswith("python -m benchmarks")
    assert (about["device"], about["versions"]["jax"]) == ("cpu", jax.__version__)
    assert about["load"] >= 0
    record.add(path, {"one": 1, "other": 2})
    record.add(path, {"one": 3})
    assert record.read(path) == {"one": 3, "other": 2}
    assert record.read(tmp_path / "none.json") == {}


def test_require_same_work_raises_if_a_loss_differs():
    timing.require_same_work({"one": [3.0, 2.0], "other": [3.0, 2.0]})
    with pytest.raises(RuntimeError, match="lazy skipped"):
        timing.require_same_work({"lazy": [3.0, 3.0, 2.0]})
    with pytest.raises(RuntimeError, match="different work"):
        timing.require_same_work({"one": [3.0, 2.0], "other": [3.0, 2.0], "third": [3.0, 1.0]})


def test_interleave_and_summarize_give_times_and_ratios():
    times = timing.interleave({"a": lambda: None, "b": lambda: sum(range(2000))}, 0.0)
    assert {len(rounds) for rounds in times.values()} == {7}
    summary = timing.summarize({"a": np.array([1.0, 2.0, 8.0]), "b": np.array([2.0, 2.0, 4.0])}, "b")
    assert (summary["a"]["ms"], summary["a"]["ratio"], summary["b"]["ratio"]) == (2000.0, 1.0, 1.0)
    assert "bare_ratio" not in summary["a"]
    summary = timing.summarize({"bare": np.array([1.0, 2.0, 4.0]), "a": np.array([3.0, 4.0, 4.0])}, "a")
    assert (summary["a"]["bare_ratio"], summary["bare"]["bare_ratio"]) == (2.0, 1.0)


PROGRAM = programs.parse("""HloModule jit_step

%fused (p: f32[1024,8]) -> f32[1024,8] {
  %p = f32[1024,8]{1,0} parameter(0)
  ROOT %copy.9 = f32[1024,8]{1,0} copy(%p)
}

%applied (t: (f32[1024,8], f32[])) -> f32[1024,8] {
  %t = (f32[1024,8]{1,0}, f32[]) parameter(0)
  %get-tuple-element.1 = f32[1024,8]{1,0} get-tuple-element(%t), index=0
  ROOT %negate.1 = f32[1024,8]{1,0} negate(%get-tuple-element.1)
}

%skipped (t: (f32[1024,8], f32[])) -> f32[1024,8] {
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
  ROOT %cond.1 = f32[1024,8]{1,0} conditional(%b, %both, %both), true_computation=%applied, false_computation=%skipped
}
""")


def test_programs_counts_copies_collectives_and_kernels():
    assert programs.count(PROGRAM, "conditional") == 1
    assert programs.copies(PROGRAM) == ["f32[1024,8]{1,0}"]  # in the fusion; the other one prefetches
    assert programs.collectives(PROGRAM) == {"all-reduce": 2}
    assert programs.small_all_reduces(PROGRAM) == 1
    assert programs.kernels(PROGRAM) == 5  # a prefetch, a fusion, two all-reduces, and the larger branch


SCALARS = programs.parse("""HloModule jit_update

ENTRY %main (a: f32[1024,8], b: s32[]) -> (f32[], s32[]) {
  %a = f32[1024,8]{1,0:T(8,128)} parameter(0)
  %b = s32[]{:T(128)} parameter(1)
  %one = s32[]{:T(128)} constant(1)
  %copy.1 = s32[]{:T(128)S(6)} copy(%b)
  %add.1 = s32[]{:T(128)} add(%copy.1, %one)
  %sum = f32[]{:T(128)} fusion(%a), kind=kLoop, calls=%fused
  %all-reduce.1 = f32[]{:T(128)} all-reduce(%sum), to_apply=%add
  %negate.1 = f32[1024,8]{1,0:T(8,128)} negate(%a)
  ROOT %both = (f32[], s32[]) tuple(%all-reduce.1, %add.1)
}
""")


def test_programs_counts_operations_on_scalars():
    assert programs.kernels(SCALARS) == 5
    assert programs.scalar_operations(SCALARS) == 2  # the copy and the sum


def test_moved_bytes_omit_prefetches():
    matrix = 4 * 1024 * 8
    fusion, large_reduce, small_reduce, branch = 2 * matrix, 2 * (matrix + 4), 4 + 28, 2 * matrix
    assert moved_bytes(PROGRAM) == fusion + large_reduce + small_reduce + branch


LOOP = programs.parse("""HloModule jit_scan

%store (p.1: f16[64,64], p.0: f32[12,64,64], i.1: s32[]) -> f32[12,64,64] {
  %p.1 = f16[64,64]{1,0} parameter(1)
  %p.0 = f32[12,64,64]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(2)
  %wide = f32[64,64]{1,0} convert(%p.1)
  %row = f32[1,64,64]{2,1,0} bitcast(%wide)
  ROOT %stored = f32[12,64,64]{2,1,0} dynamic-update-slice(%p.0, %row, %i.1)
}

%load (p.2: f32[12,64,64], i.2: s32[]) -> f16[64,64] {
  %p.2 = f32[12,64,64]{2,1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  %flat = f32[12,4096]{1,0} bitcast(%p.2)
  %part = f32[1,4096]{1,0} dynamic-slice(%flat, %i.2)
  ROOT %half = f16[64,64]{1,0} convert(%part)
}

%body (t: (f32[12,64,64], s32[])) -> (f32[12,64,64], s32[]) {
  %t = (f32[12,64,64]{2,1,0}, s32[]) parameter(0)
  %stack = f32[12,64,64]{2,1,0} get-tuple-element(%t), index=0
  %i = s32[] get-tuple-element(%t), index=1
  %x = f16[64,64]{1,0} fusion(%stack, %i), kind=kLoop, calls=%load
  %gemm = f16[64,64]{1,0} custom-call(%x, %x), custom_call_target="__cublas$gemm"
  %new = f32[12,64,64]{2,1,0} fusion(%stack, %gemm, %i), kind=kLoop, calls=%store
  ROOT %out = (f32[12,64,64]{2,1,0}, s32[]) tuple(%new, %i)
}

ENTRY %main (s: (f32[12,64,64], s32[])) -> (f32[12,64,64], s32[]) {
  %s = (f32[12,64,64]{2,1,0}, s32[]) parameter(0)
  ROOT %while = (f32[12,64,64]{2,1,0}, s32[]) while(%s), body=%body, trips={"known_trip_count":{"n":"12"}}
}
""")


def test_moved_bytes_count_all_iterations_and_the_slices_of_stacked_arrays():
    half, row, index = 2 * 64 * 64, 4 * 64 * 64, 4
    load, gemm, store = row + index + half, half + half, half + index + row
    assert moved_bytes(LOOP) == 12 * (load + gemm + store)


UNKNOWN_LOOP = LOOP._replace(
    computations=LOOP.computations | {"main": [x._replace(iterations=None) for x in LOOP.computations["main"]]}
)


def test_moved_bytes_require_the_number_of_iterations():
    with pytest.raises(ValueError, match="the loop while has no known_trip_count"):
        moved_bytes(UNKNOWN_LOOP)


def test_communicated_bytes_are_the_results_of_collectives():
    assert communicated_bytes(PROGRAM) == (4 * 1024 * 8 + 4) + 4 * 7
    gather = programs.parse("""HloModule gather

ENTRY %main (a: f16[8]) -> f16[64] {
  %a = f16[8]{0} parameter(0)
  %start = (f16[8]{0}, f16[64]{0}) all-gather-start(%a)
  ROOT %done = f16[64]{0} all-gather-done(%start)
}
""")
    assert communicated_bytes(gather) == 2 * 64


def test_communicated_bytes_count_all_iterations():
    def with_gather(program):
        body = [x._replace(operation="all-gather") if x.name == "gemm" else x for x in program.computations["body"]]
        return program._replace(computations=program.computations | {"body": body})

    assert communicated_bytes(LOOP) == communicated_bytes(UNKNOWN_LOOP) == 0
    assert communicated_bytes(with_gather(LOOP)) == 12 * 2 * 64 * 64
    with pytest.raises(ValueError, match="the loop while has no known_trip_count"):
        communicated_bytes(with_gather(UNKNOWN_LOOP))


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: jax.lax.dynamic_update_slice(x, 2 * x[:1], (3, 0)), id="slice and update"),
        pytest.param(lambda x: jnp.tanh(x[:8] @ x[8:520].T), id="slices and a matmul"),
        pytest.param(lambda x: jnp.sum(x**2) * x, id="whole arrays"),
    ],
)
def test_moved_bytes_agree_with_the_count_of_xla(fn):
    """XLA's count is missing on CUDA, and includes all rows of a table that a fusion gathers from or scatters to."""
    compiled = jax.jit(fn).lower(jax.ShapeDtypeStruct((1024, 512), jnp.float32)).compile()
    counted = moved_bytes(programs.parse(compiled.as_text()))
    assert counted == pytest.approx(compiled.cost_analysis()["bytes accessed"], rel=0.02)


def test_matmuls_counts_by_element_type():
    assert programs.matmuls(LOOP) == {"f16": 1}
    assert programs.matmuls(PROGRAM) == {}


def test_bytes_of_adds_up_the_parts_of_a_type():
    sizes = {"(f32[2,3]{1,0:T(8,128)(2,1)}, s8[], pred[5])": 30, "bf16[8]": 16, "f8e4m3fn[8]": 8}
    sizes |= {"s4[8]": 4, "token[]": 0, "u32[]{:S(2)}": 4}
    assert {kind: programs.bytes_of(kind) for kind in sizes} == sizes


def test_picture_of_the_diagnosis_shows_a_program_whose_scale_fits():
    with jax.numpy_rank_promotion("allow"):
        found = diagnosis_picture.scales()
    low, high = found.fitting_scales
    assert low < found.loss_scale < high
    assert dict(found.scale_errors)[1.0] > 0.1, "the picture shows what happens without loss scaling"
    assert "float16" in {row.dtype for row in found.rows}


def _runs(**losses):
    """Returns runs of the demonstration with constant losses, in the order of its names."""
    unused = dict.fromkeys(demonstration.Trained._fields)
    return {
        name: demonstration.Trained(**unused | {"history": {"loss": np.full(200, loss)}})
        for name, loss in zip(demonstration.RUNS, losses.values(), strict=True)
    }


def test_picture_of_the_parts_shows_the_imports():
    """After a change of the imports, `python -m benchmarks.architecture` draws it again."""
    assert architecture.PICTURE.read_text() == architecture.draw(architecture.house())
    assert architecture.floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [["c"], ["b"], ["a"]]


def test_picture_of_the_losses_is_not_drawn_if_they_do_not_show_its_title():
    figure = demonstration_pictures.losses(_runs(float32=1.7, bfloat16=1.7, float16=3.2, jmpscale=1.71))
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["float32: 1.70", "bfloat16: 1.70", "float16: 3.20", "float16, jmpscale: 1.71"]
    for float16, jmpscale_ in ((1.9, 1.7), (3.2, 1.8), (1.7, 3.2)):
        with pytest.raises(ValueError, match="the final losses do not show"):
            demonstration_pictures.losses(_runs(float32=1.7, bfloat16=1.7, float16=float16, jmpscale=jmpscale_))
