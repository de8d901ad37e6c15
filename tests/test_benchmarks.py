"""The benchmarks compare methods that do the same work, and read compiled programs correctly. Nothing is timed."""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmpscale.testing import assert_step_is_noop

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import autocast, diagnosis_picture, programs, steps, table, timing

import pages

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion")]


def train(name, **settings):
    try:
        run = timing.Run(steps.make_job(steps.mlp(1, 8, 4), **settings), steps.METHODS[name])
    except ImportError as error:
        pytest.skip(str(error))
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
        assert_step_is_noop((params, inner[0]), (run.state[0], inner[1]))


@pytest.mark.parametrize("name", ["functional, norm as check", "optax wrapper", "optax apply_if_finite"])
def test_float16_gradients_train_float32_weights(name, bare_losses):
    run = train(name, compute=jnp.float16, grads=jnp.float16)
    assert {leaf.dtype for leaf in jax.tree.leaves(run.state[0])} == {np.dtype(np.float32)}
    np.testing.assert_allclose(run.losses, bare_losses, rtol=1e-2)


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


def test_traffic_omits_prefetches():
    matrix = 4 * 1024 * 8
    fusion, large_reduce, small_reduce, branch = 2 * matrix, 2 * (matrix + 4), 4 + 28, 2 * matrix
    assert programs.traffic(PROGRAM) == fusion + large_reduce + small_reduce + branch


LOOP = programs.parse("""HloModule jit_scan

%body (t: (f32[12,64,64], f16[64,64])) -> (f32[12,64,64], f16[64,64]) {
  %t = (f32[12,64,64]{2,1,0}, f16[64,64]{1,0}) parameter(0)
  %stack = f32[12,64,64]{2,1,0} get-tuple-element(%t), index=0
  %x = f16[64,64]{1,0} get-tuple-element(%t), index=1
  %gemm = f16[64,64]{1,0} custom-call(%x, %x), custom_call_target="__cublas$gemm"
  %new = f32[12,64,64]{2,1,0} fusion(%stack, %gemm), kind=kLoop, calls=%update
  ROOT %out = (f32[12,64,64]{2,1,0}, f16[64,64]{1,0}) tuple(%new, %gemm)
}

ENTRY %main (s: (f32[12,64,64], f16[64,64])) -> (f32[12,64,64], f16[64,64]) {
  %s = (f32[12,64,64]{2,1,0}, f16[64,64]{1,0}) parameter(0)
  ROOT %while = (f32[12,64,64]{2,1,0}, f16[64,64]{1,0}) while(%s), body=%body, trips={"known_trip_count":{"n":"12"}}
}
""")


def test_traffic_counts_all_iterations_and_one_row_of_stacked_arrays_in_each():
    half, row = 2 * 64 * 64, 4 * 64 * 64
    assert programs.traffic(LOOP) == 12 * (3 * half + (row + half + row))


def test_matmuls_counts_by_element_type():
    assert programs.matmuls(LOOP) == {"f16": 1}
    assert programs.matmuls(PROGRAM) == {}


def test_memory_table_of_the_autocast_guide_shows_the_results():
    rows = {
        "GPT-2 small": ("h100, GPT-2 small", autocast.AUTOCAST),
        "GPT-2 small, sharded over 8 devices": ("h100, GPT-2 small, FSDP", autocast.AUTOCAST),
        "GPT-2 small, scan over layers": ("h100, GPT-2 small, scan", autocast.AUTOCAST),
        "GPT-2 small, scan over layers with `jax.checkpoint`, `dots_saveable`": (
            "h100, GPT-2 small, scan, dots saved",
            autocast.AUTOCAST,
        ),
        "GPT-2 small, scan over layers with `jax.checkpoint`, `dots_with_no_batch_dims_saveable`": (
            "h100, GPT-2 small, scan with remat",
            autocast.AUTOCAST,
        ),
        "ResNet-34": ("h100, ResNet-34", autocast.AUTOCAST),
        "ResNet-34, blocks return float16": ("h100, ResNet-34", autocast.STORED),
        "U-Net": ("h100, U-Net", autocast.AUTOCAST),
        "U-Net, blocks return float16": ("h100, U-Net", autocast.STORED),
        "GPT-2 small with 2 layers, on a T4": ("t4, GPT-2 small, 2 layers", autocast.AUTOCAST),
        "GPT-2 small with 2 layers, on a V100": ("v100, GPT-2 small, 2 layers", autocast.AUTOCAST),
        "U-Net, on a T4": ("t4, U-Net", autocast.AUTOCAST),
        "U-Net, blocks return float16, on a T4": ("t4, U-Net", autocast.STORED),
    }
    results = json.loads(autocast.RESULTS.read_text())
    page = (pages.DOCS / "guides" / "autocast.md").read_text()
    shown = re.findall(r"^\| (\S.*) \| (\d\.\d+) \| (\d\.\d+) \| (\d\.\d+), (\d\.\d+) \|$", page, flags=re.MULTILINE)
    assert [row[0] for row in shown] == list(rows)
    for name, *numbers in shown:
        model, variant = rows[name]
        figures = results[model]["figures"]
        pairs = [(x, key) for x in (variant, autocast.FLOAT32) for key in ("moved_bytes", "temp_bytes")]
        expected = [f"{figures[x][key] / figures[autocast.BY_HAND][key]:.2f}" for x, key in pairs]
        assert numbers == expected, name


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("(f32[2,3]{1,0:T(8,128)(2,1)}, s8[], pred[5])", 30),
        ("bf16[8]", 16),
        ("f8e4m3fn[8]", 8),
        ("s4[8]", 4),
        ("token[]", 0),
        ("u32[]{:S(2)}", 4),
    ],
)
def test_bytes_of_adds_up_the_parts_of_a_type(kind, size):
    assert programs.bytes_of(kind) == size


def test_tables_equal_the_tables_on_the_page():
    page = table.PAGE.read_text()
    assert table.rewrite(page, table.tables(*table.read_results())) == page


def test_picture_of_the_diagnosis_shows_a_program_whose_scale_fits():
    with jax.numpy_rank_promotion("allow"):
        found = diagnosis_picture.diagnosis()
    low, high = found.fitting_scales()
    assert low < found.loss_scale < high
    assert "float16" in {row.dtype for row in found.rows}
