"""The statistics of grad_report are exact and global on all devices, and its description names the suspect leaf."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jmpscale

import compiling
import meshes
from faults import overflow_backward

COUNTS = ("nan", "inf", "zero", "underflow", "subnormal")
VALUES = np.array(
    [1.0, -3.0, 0.0, -0.0, 2.0**-24, -(2.0**-14), 2.0**-25, 2.0**-126, 6e-5, 65504.0, 7e4, np.inf, -np.inf, np.nan]
)


def _reference(leaf, scale=1.0):
    """Returns the largest magnitude and the counts, computed in float64, in which scaling is exact."""
    leaf = np.asarray(leaf) if jnp.iscomplexobj(leaf) else np.asarray(leaf, np.float64)
    parts = np.concatenate([leaf.real.ravel(), leaf.imag.ravel()]) if np.iscomplexobj(leaf) else leaf.ravel()
    m = np.abs(parts.astype(np.float64)) * scale
    kinds = np.isnan(m), np.isinf(m), m == 0, (m > 0) & (m <= 2.0**-25), (m > 2.0**-25) & (m < 2.0**-14)
    return np.max(m, initial=0.0), [int(kind.sum()) for kind in kinds], parts.size


def _assert_exact(report, leaves, scale=1.0):
    for i, leaf in enumerate(leaves):
        largest, counts, size = _reference(leaf, scale)
        with np.errstate(over="ignore"):
            np.testing.assert_equal(np.float32(report.max_abs[i]), np.float32(largest))
        assert [int(getattr(report, name)[i]) for name in COUNTS] == counts, report.paths[i]
        assert report.sizes[i] == size
    assert bool(report.finite) == all(np.isfinite(np.asarray(leaf)).all() for leaf in leaves)


@pytest.fixture(scope="module", params=[pytest.param("one device", marks=pytest.mark.full), "several devices"])
def reductions(request):
    """The form of the reductions on CPU: with one device, a single reduction computes all counts."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "one device":
            patch.setattr(jax, "device_count", lambda *_: 1)
        jax.clear_caches()
        yield
    jax.clear_caches()


# --- statistics are exact ---


@pytest.mark.usefixtures("reductions")
def test_grad_report_is_exact():
    leaves = [np.zeros(0, np.float32), VALUES.astype(np.float32).reshape(2, 7)]
    leaves += [jnp.asarray(VALUES).astype(dtype) for dtype in ("float16", "bfloat16", "float8_e5m2", "complex64")]
    leaves += [np.where(np.arange(4097) == 2048, -np.nan, 1).astype(np.float32)]  # XLA's maximum on CPU loses this NaN
    report = jmpscale.grad_report(leaves)
    _assert_exact(report, leaves)
    assert not report.finite
    assert report.max_abs.dtype == jnp.float32


@pytest.mark.full
@pytest.mark.usefixtures("x64")
def test_grad_report_of_float64_is_exact():
    leaves = [jnp.array([1e300, 1e-300, 0.0, 2.0**-139, 2.0**-138, 2.0**-129, 2.0**-128]), jnp.ones(3, jnp.float16)]
    report = jmpscale.grad_report(leaves)
    assert report.max_abs.tolist() == [1e300, 1.0]
    assert report.underflow.tolist() == [5, 0]
    assert report.underflow.dtype == np.int32
    report = jmpscale.grad_report(leaves, scaler=jmpscale.static(2.0**114))
    assert (report.underflow.tolist(), report.subnormal.tolist()) == ([2, 0], [2, 0])


def test_grad_report_with_a_scale_at_which_float32_overflows_tests_the_gradients():
    report = jmpscale.grad_report(jnp.array([1e10]), scaler=jmpscale.static(2.0**100))
    assert report.finite
    assert report.describe().startswith("All leaves are finite")


@pytest.mark.usefixtures("reductions")
@pytest.mark.parametrize(
    "scale", [2.0**16, 2.0**-10, 2.0**100, 2.0**112, 1.5 * 2.0**112, 2.0**113, 2.0**114, 5e37, 2.0**126]
)
def test_grad_report_counts_scaled_gradients(scale):
    limits = np.float32([2.0**-25 / scale, 2.0**-14 / scale])
    around = [np.nextafter(limits, np.float32(bound)) for bound in (0, 1)]
    leaf = np.concatenate([limits, *around, np.ldexp(np.float32(1), np.arange(-126, 30)), np.zeros(3, np.float32)])
    leaf = leaf[(leaf == 0) | (leaf >= 2.0**-126)]  # a device may flush smaller ones to zero
    scaler = jmpscale.static(scale)
    report = jmpscale.grad_report([leaf], scaler=scaler)
    _assert_exact(report, [leaf], float(scaler.loss_scale))


@pytest.mark.parametrize(("platform", "expected"), [("cpu", 2 + 1), ("cuda", 12 + 1)])
def test_grad_report_combines_reductions_on_cpu_only(platform, expected, monkeypatch, request):
    """The last reduction computes the flag, over all leaves."""
    if request.config.getoption("--default-form"):
        pytest.skip("every program has the form for GPUs and TPUs")
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    grads = [jnp.ones(8), jnp.ones((4, 4))]
    exported = jax.export.export(jax.jit(jmpscale.grad_report), platforms=[platform])(grads)
    assert exported.mlir_module().count("stablehlo.reduce(") == expected


def test_grad_report_names_leaves_unambiguously():
    one = np.ones(1, np.float32)
    report = jmpscale.grad_report({"a": {"b": one}, "a/b": one, "c": {"d": one}, "n": 3})
    assert report.paths == ("['a']['b']", "['a/b']", "c/d")
    assert jmpscale.grad_report(one).paths == ("grads",)


def test_grad_report_is_an_output_of_an_exported_program():
    grads = {"w": jnp.array([1.0, jnp.inf])}
    stored = jax.export.export(jax.jit(jmpscale.grad_report))(grads).serialize()
    report, expected = jax.export.deserialize(stored).call(grads), jmpscale.grad_report(grads)
    assert jax.tree.structure(report) == jax.tree.structure(expected)
    assert report.describe() == expected.describe()


def test_grad_report_accepts_symbolic_shapes():
    def report_and_totals(x):
        report = jmpscale.grad_report({"x": x})
        return report, report.totals()

    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a,b"), jnp.float32)
    report, totals = jax.export.export(jax.jit(report_and_totals))(shape).call(jnp.zeros((2, 3)).at[1, 1].set(jnp.inf))
    assert float(totals["zero"]) == pytest.approx(5 / 6)
    assert report.describe().splitlines()[2].split() == ["x", "a*b", "inf", "-inf", "0", "1", "5", "0", "0"]


# --- statistics are global on multiple devices ---

LEAVES = {
    "a": np.resize(VALUES, (16, 8)).astype(np.float32),
    "b": np.arange(8, dtype=np.float32),
    "c": np.float32(2.0),
    "d": np.ones((8, 2), np.float32),
}
SPECS = {"a": P("x", "y"), "b": P("y"), "c": P(), "d": P("x", "y")}


@pytest.mark.full
def test_grad_report_is_global_under_shard_map():
    mesh = meshes.make_mesh(x=4, y=2)
    grads = {name: jax.device_put(x, jax.NamedSharding(mesh, SPECS[name])) for name, x in LEAVES.items()}
    mapped = jax.shard_map(jmpscale.grad_report, mesh=mesh, in_specs=(SPECS,), out_specs=P())
    program = jax.jit(mapped).lower(grads).compile()
    report = program(grads)
    _assert_exact(report, list(LEAVES.values()))
    assert float(report.totals()["nan"]) == np.float32(_reference(LEAVES["a"])[1][0] / (128 + 8 + 1 + 16))
    assert compiling.count(program.as_text(), "all-reduce") <= 4, "at most two for each set of axes"


@pytest.mark.parametrize("shapes", [[(8, 0)], [(8, 2), (8, 0)]], ids=["alone", "beside another leaf"])
def test_grad_report_of_a_sharded_leaf_without_values_is_equal_on_all_devices(shapes):
    grads = [np.ones(shape, np.float32) for shape in shapes]
    mapped = jax.shard_map(jmpscale.grad_report, mesh=meshes.make_mesh(x=8), in_specs=P("x"), out_specs=P())
    _assert_exact(jax.jit(mapped)(grads), grads)


@pytest.mark.full
@pytest.mark.parametrize("axis_name", ["d", ()], ids=["combined", "separate"])
def test_grad_report_combines_values_along_axis_name(axis_name):
    grads = [np.resize(VALUES, (8, 5)).astype(np.float32), np.zeros((8, 3), np.complex64)]
    reports = jax.vmap(lambda g: jmpscale.grad_report(g, axis_name=axis_name), axis_name="d")(grads)
    for i in range(8):
        report = jax.tree.map(lambda x, i=i: np.asarray(x)[i], reports)
        _assert_exact(report, grads if axis_name else [leaf[i] for leaf in grads])


# --- descriptions name the leaf, and totals are fractions ---


def _report(max_abs, sizes=None, **counts):
    arrays = {name: np.asarray(counts.get(name, np.zeros(len(max_abs))), np.int32) for name in COUNTS}
    paths = tuple(f"layer_{i}" for i in range(len(max_abs)))
    max_abs = np.asarray(max_abs, np.float32)
    return jmpscale.GradReport(
        np.isfinite(max_abs).all(), max_abs, **arrays, paths=paths, sizes=tuple(sizes or [10] * len(max_abs))
    )


INF, NAN = np.inf, np.nan


LINE = "jmpscale.diagnose names the line."
SMALLEST = "leaves are not finite; the fraction of non-finite values is smallest in"
DESCRIBED = {  # the report, its sentence, and the order of the leaves in the table
    "finite": (
        _report([4.0, 9.0, 0.0, 9.1]),
        "All leaves are finite; the largest magnitude is in layer_3.",
        [3, 1, 0, 2],
    ),
    "zero": (
        _report([0.0, 1.0], zero=[10, 0]),
        "All leaves are finite; the largest magnitude is in layer_1.",
        [1, 0],
    ),
    "one": (_report([9.0, INF, 8.0], inf=[0, 1, 0]), f"1 of 3 leaves is not finite: layer_1. {LINE}", [1, 0, 2]),
    "all values of one": (_report([1.0, INF], inf=[0, 10]), f"1 of 2 leaves is not finite: layer_1. {LINE}", [1, 0]),
    "smallest fraction": (
        _report([INF, INF, NAN], inf=[5, 3, 2], nan=[0, 0, 2]),
        f"3 of 3 {SMALLEST} layer_1. {LINE}",
        [1, 2, 0],
    ),
    "zeros do not count": (
        _report([INF, INF], [100, 10], inf=[3, 1], zero=[97, 0]),
        f"2 of 2 {SMALLEST} layer_1. {LINE}",
        [1, 0],
    ),
    "all values": (_report([INF, INF], [1, 1], inf=[1, 1]), f"2 of 2 {SMALLEST} layer_0. {LINE}", [0, 1]),
    "NaN": (_report([1.0, NAN], nan=[0, 1]), f"1 of 2 leaves is not finite: layer_1. {LINE}", [1, 0]),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_describe_has_the_leaves_that_are_not_finite_first(name):
    report, expected, order = DESCRIBED[name]
    sentence, _, *lines = report.describe().splitlines()
    assert sentence == expected
    assert [int(line.split()[0].removeprefix("layer_")) for line in lines] == order


def test_describe_lists_as_many_leaves_as_the_limit(monkeypatch):
    report, device_get, calls = _report(1.0 + np.arange(30.0)), jax.device_get, []
    monkeypatch.setattr(jax, "device_get", lambda x: calls.append(x) or device_get(x))
    assert len(report.describe().splitlines()) == 2 + 20
    assert len(calls) == 1, "the report must be read from the device once"
    assert len(report.describe(limit=2).splitlines()) == 2 + 2
    assert len(report.describe(limit=99).splitlines()) == 2 + 30


def test_describe_shows_values_and_headroom():
    lines = _report([65504.0 / 4, 0.0], underflow=[1, 2], subnormal=[3, 4]).describe().splitlines()
    assert lines[2].split() == ["layer_0", "10", "1.64e+04", "2.0", "0", "0", "0", "1", "3"]
    assert lines[3].split() == ["layer_1", "10", "0", "inf", "0", "0", "0", "2", "4"]
    assert len({len(line) for line in lines[1:]}) == 1


@pytest.mark.full
def test_describe_names_the_layer_whose_backward_pass_overflows():
    def loss_fn(params, x, layer):
        for i, (kernel, bias) in enumerate(params.values()):
            x = overflow_backward(jnp.tanh(x @ kernel + bias), layer == i)
        return jnp.mean(x**2)

    @jax.jit
    def report_of_fault(params, x, layer):
        scaler = jmpscale.static(2.0**16)
        _, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, x, layer)
        return jmpscale.grad_report(grads, scaler=scaler)

    keys = jax.random.split(jax.random.key(0), 3)
    params = {f"layer_{i}": (jax.random.normal(key, (4, 4)) / 2, jnp.full((1, 4), 0.1)) for i, key in enumerate(keys)}
    x = jax.random.normal(jax.random.key(1), (8, 4))
    mesh = meshes.make_mesh(d=8)
    params, x = jax.device_put((params, x), (jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P("d"))))
    for layer in (1, 0, 2):
        sentence = report_of_fault(params, x, layer).describe().splitlines()[0]
        assert re.search(rf"of 6 leaves (is not finite:|are not finite; .* in) layer_{layer}/", sentence)
    assert report_of_fault(params, x, -1).describe().startswith("All leaves are finite")


def test_totals_are_fractions_of_all_values(variant):
    report = _report([4.0, INF], [4, 12], nan=[0, 1], inf=[0, 2], zero=[1, 2], underflow=[2, 2], subnormal=[1, 4])
    expected = {"nan": 1 / 16, "inf": 2 / 16, "zero": 3 / 16, "underflow": 4 / 16, "subnormal": 5 / 16}
    totals = variant(lambda report: report.totals())(report)
    assert {name: float(value) for name, value in totals.items()} == {"max_abs": INF} | expected


def test_totals_of_stacked_reports_have_an_entry_for_each_step():
    reports = jax.tree.map(lambda *x: np.stack(x), _report([1.0, NAN]), _report([4.0, 2.0], zero=[5, 10]))
    np.testing.assert_array_equal(reports.totals()["max_abs"], [NAN, 4.0])
    np.testing.assert_array_equal(reports.totals()["zero"], [0.0, 0.75])


@pytest.mark.parametrize(
    ("report", "max_abs", "zero"),
    [
        (_report([0.0], [0]), 0.0, 0.0),
        (_report([0.0], [1], zero=[1]), 0.0, 1.0),
        (_report([1.0, 1.0], [2**31 - 1] * 2, zero=[2**30] * 2), 1.0, 0.5),
        (_report(np.append(np.ones(4100), NAN)), NAN, 0.0),
    ],
    ids=["empty", "one-value", "more-than-int32", "nan-among-many-leaves"],
)
def test_totals_are_exact_for_extreme_sizes(report, max_abs, zero):
    totals = report.totals()
    np.testing.assert_equal((float(totals["max_abs"]), float(totals["zero"])), (max_abs, zero))
    assert {value.dtype for value in totals.values()} == {jnp.dtype(jnp.float32)}


@pytest.mark.full
def test_grad_report_costs_nothing_if_unused():
    def step(use, w, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return jmpscale.apply_if(jmpscale.all_finite(grads), lambda w: w - grads, w), use(grads)

    def instructions(use):
        program = compiling.compiled(functools.partial(step, use), jnp.ones((4, 2)), jnp.ones((3, 4)))
        return compiling.instructions(program)

    without, used = instructions(lambda _: None), instructions(jmpscale.grad_report)
    unused = instructions(lambda grads: jmpscale.grad_report(grads).totals() and None)
    assert unused == without
    assert len(used) > len(unused)
    for shared in ("tanh f32[3,2]", "dot f32[4,2]"):
        assert used.count(shared) == unused.count(shared) > 0
