"""grad_report: its counts are exact and the same on every device, and an unused report costs nothing."""

import dataclasses
import functools
import time

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import inject

import hlo
from cases import some

NAMES = ("nan", "inf", "zero", "underflow", "subnormal")
VALUES = np.array(
    [1.0, -3.0, 0.0, -0.0, 2.0**-24, -(2.0**-14), 2.0**-25, 1e-40, 6e-5, 65504.0, 7e4, np.inf, -np.inf, np.nan]
)


def _reference(x, loss_scale=1.0):
    """Counts in float64, where every float32 value times every scale used here is exact."""
    x = np.asarray(x)
    values = np.concatenate([x.real.ravel(), x.imag.ravel()]) if np.iscomplexobj(x) else x.ravel()
    m = np.abs(values.astype(np.float64)) * loss_scale
    counts = np.isnan(m), np.isinf(m), m == 0, (m > 0) & (m < 2.0**-24), (m >= 2.0**-24) & (m < 2.0**-14)
    return np.max(m, initial=0.0), [int(c.sum()) for c in counts]


def _assert_equals_reference(report, leaves, loss_scale=1.0):
    for i, leaf in enumerate(leaves):
        largest, counts = _reference(leaf, loss_scale)
        np.testing.assert_equal(np.float32(largest), np.float32(report.max_abs[i]))
        assert [int(getattr(report, name)[i]) for name in NAMES] == counts, report.paths[i]


@pytest.fixture(params=["CPU, several devices", "CPU, one device", "default form"])
def reduction(request, monkeypatch):
    """The form of the reductions, which depends on the platform and on the number of devices."""
    if request.param == "CPU, one device":
        monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    if request.param == "default form":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    jmpscale._report._leaf_statistics.clear_cache()
    yield
    jmpscale._report._leaf_statistics.clear_cache()


def _wide(x):
    return np.asarray(x) if jnp.iscomplexobj(x) else np.asarray(x.astype(jnp.float32))


@pytest.mark.usefixtures("reduction")
@pytest.mark.parametrize(
    "dtype",
    some(["float16", "bfloat16", "float32", "complex64", "float8_e5m2"], default=["float16", "float32", "complex64"]),
)
def test_grad_report_is_exact(dtype):
    leaves = [jnp.asarray(np.resize(VALUES, size)).astype(dtype) for size in (0, 1, 10, 14, 4097)]
    leaves.append(jnp.asarray(np.resize(VALUES, (3, 5, 7))).astype(dtype))
    report = jax.jit(jmpscale.grad_report)(leaves)
    _assert_equals_reference(report, [_wide(x) for x in leaves])
    assert not report.finite


@pytest.mark.usefixtures("reduction")
def test_grad_report_is_the_same_eager_jitted_and_vmapped(variant):
    leaves = [jnp.asarray(VALUES, jnp.float32), jnp.asarray(VALUES[:10], jnp.float16).reshape(2, 5)]
    _assert_equals_reference(variant(jmpscale.grad_report)(leaves), [_wide(x) for x in leaves])
    assert variant(jmpscale.grad_report)(leaves[1:]).finite == jmpscale.all_finite(leaves[1:])


@pytest.mark.usefixtures("x64", "reduction")
def test_grad_report_of_float64_leaves_is_exact():
    leaves = [jnp.array([1e300, 1e-300, 0.0, 1.0]), jnp.ones(3, jnp.float16)]
    report = jmpscale.grad_report(leaves)
    assert report.max_abs.tolist() == [1e300, 1.0]
    assert report.underflow.tolist() == [1, 0]
    assert report.zero.tolist() == [1, 0]
    tiny = jnp.array([2.0**-139, 2.0**-138, 2.0**-129, 2.0**-128])
    report = jmpscale.grad_report(tiny, scaler=jmpscale.static(2.0**114))
    assert (report.underflow.tolist(), report.subnormal.tolist()) == ([1], [2])


@pytest.mark.usefixtures("reduction")
def test_grad_report_finds_a_nan_at_any_position():
    bad = [np.nan, -np.nan, np.inf, -np.inf]
    leaves = [jnp.ones(4097).at[place].set(value) for place in (0, 2048, 4096) for value in bad]
    report = jax.jit(jmpscale.grad_report)([*leaves, jnp.ones(3)])
    np.testing.assert_equal(np.asarray(report.max_abs), np.array([*np.abs(bad)] * 3 + [1.0], np.float32))
    assert (report.nan + report.inf).tolist() == [1] * 12 + [0]
    assert not report.finite


@pytest.mark.parametrize(("platform", "reductions"), [("cpu", 2), ("cuda", 12)])
def test_grad_report_reduces_several_counts_together_on_cpu_only(platform, reductions, monkeypatch, request):
    if request.config.getoption("--default-form"):
        pytest.skip("every program has the other form")
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    jmpscale._report._leaf_statistics.clear_cache()
    exported = jax.export.export(jax.jit(jmpscale.grad_report), platforms=[platform])([jnp.ones(8), jnp.ones((4, 4))])
    jmpscale._report._leaf_statistics.clear_cache()
    # The last one is for the flag, over all leaves.
    assert exported.mlir_module().count("stablehlo.reduce(") == reductions + 1


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-10, 2.0**100])
def test_grad_report_with_a_scaler_reports_on_the_scaled_gradients(scale):
    scaler = jmpscale.dynamic(scale, min_scale=2.0**-126, max_scale=2.0**126)
    scaled = jnp.asarray(np.random.default_rng(0).normal(size=1000) * 2.0 ** np.arange(-30, 20).repeat(20), jnp.float32)
    grads, finite = jmpscale.unscale_and_check(scaler, [scaled])
    report = jmpscale.grad_report(grads, scaler=scaler)
    _assert_equals_reference(report, grads, scale)
    assert bool(report.finite) == bool(finite)


@pytest.mark.usefixtures("reduction")
@pytest.mark.parametrize("scale", [2.0**112, 2.0**113, 2.0**114, 2.0**126, 5e37])
def test_grad_report_counts_right_where_the_limits_over_the_scale_are_subnormal(scale):
    scaler = jmpscale.static(scale)
    limits = np.float32([2.0**-24 / scale, 2.0**-14 / scale])
    around = [np.nextafter(limits, np.float32(bound)) for bound in (0, 1)]
    leaf = np.concatenate([limits, *around, np.ldexp(np.float32(1), np.arange(-149, -100)), np.zeros(3, np.float32)])
    _assert_equals_reference(jmpscale.grad_report([leaf], scaler=scaler), [leaf], float(scaler.loss_scale))


def test_grad_report_names_leaves_unambiguously():
    grads = {"a": {"b": jnp.ones(1)}, "a/b": jnp.full(1, jnp.inf), "c": {"d": jnp.ones(1)}}
    report = jmpscale.grad_report(grads)
    assert report.paths == ("['a']['b']", "['a/b']", "c/d")
    assert "the overflow most likely began in ['a/b']." in report.describe()


def test_jax_export_stores_a_program_that_returns_a_report():
    grads = {"layer": [jnp.array([1.0, jnp.inf]), jnp.zeros((2, 3), jnp.float16)]}
    stored = jax.export.export(jax.jit(jmpscale.grad_report))(grads).serialize()
    report, expected = jax.export.deserialize(stored).call(grads), jmpscale.grad_report(grads)
    assert jax.tree.structure(report) == jax.tree.structure(expected)
    assert report.describe() == expected.describe()


def test_grad_report_is_an_output_of_scan_and_vmap():
    grads = jnp.ones((5, 3)).at[2, 1].set(jnp.inf)
    _, stacked = jax.lax.scan(lambda c, g: (c, jmpscale.grad_report({"w": g, "n": 3})), None, grads)
    batch = jax.vmap(lambda g: jmpscale.grad_report({"w": g, "n": 3}))(grads)
    for report in (stacked, batch):
        assert report.inf[:, 0].tolist() == [0, 0, 1, 0, 0]
        assert report.finite.tolist() == [True, True, False, True, True]
        assert report.paths == ("w",)
        with pytest.raises(ValueError, match=r"takes a single report, got a batch of shape \(5,\)"):
            report.describe()
        assert "began in w" in jax.tree.map(lambda x: x[2], report).describe()


# One program on a mesh of eight, with each way to hand the gradients over.
LEAVES = {"a": np.resize(VALUES, (16, 8)).astype(np.float32), "b": np.arange(8, dtype=np.float32), "c": np.float32(2.0)}
SPECS = {"a": P("x", "y"), "b": P("y"), "c": P()}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_grad_report_is_global_under_sharded_jit(kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType[kind],) * 2)
    with jax.set_mesh(mesh):
        placed = {k: jax.device_put(v, jax.NamedSharding(mesh, SPECS[k])) for k, v in LEAVES.items()}
        _assert_equals_reference(jax.jit(jmpscale.grad_report)(placed), list(LEAVES.values()))


def _mapped(fn, **kwargs):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    placed = {k: jax.device_put(v, jax.NamedSharding(mesh, SPECS[k])) for k, v in LEAVES.items()}
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(SPECS,), **kwargs)), placed


@pytest.mark.parametrize("axis_name", [None, ("x", "y"), ()])
def test_grad_report_is_global_under_shard_map_in_two_collectives_per_set_of_axes(axis_name):
    fn, placed = _mapped(functools.partial(jmpscale.grad_report, axis_name=axis_name), out_specs=P())
    if axis_name == ():
        with pytest.raises(ValueError, match="replicated"):  # each device's own report is no global value
            fn(placed)
        return
    report = fn(placed)
    _assert_equals_reference(report, list(LEAVES.values()))
    assert report.describe() == jmpscale.grad_report(LEAVES).describe()
    assert _floats(report.totals()) == _floats(jmpscale.grad_report(LEAVES).totals())
    assert hlo.count(hlo.compiled(fn, placed), "all-reduce") <= 4


def _floats(totals):
    return {name: str(float(value)) for name, value in totals.items()}  # as text, NaN equals NaN


def test_grad_report_counts_all_shards_of_a_leaf_in_its_size():
    grads = {"kernel": jnp.ones((8, 8)).at[5, 2].set(jnp.inf), "bias": jnp.ones(10).at[3].set(jnp.inf)}
    mesh = jax.make_mesh((8,), ("d",))
    specs = {"kernel": P("d"), "bias": P()}
    placed = {name: jax.device_put(x, jax.NamedSharding(mesh, specs[name])) for name, x in grads.items()}
    report = jax.jit(jax.shard_map(jmpscale.grad_report, mesh=mesh, in_specs=(specs,), out_specs=P()))(placed)
    assert report.describe().startswith("2 of 2 leaves are not finite; the overflow most likely began in kernel.")
    assert report.sizes == (10, 64)
    assert float(report.totals()["inf"]) == np.float32(2 / 74)


@pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning")
@pytest.mark.parametrize("mapped", [jax.pmap, jax.vmap], ids=["pmap", "vmap"])
@pytest.mark.parametrize("axis_name", ["d", ()])
def test_grad_report_combines_the_leaves_of_all_devices(mapped, axis_name):
    grads = {"a": jnp.asarray(np.resize(VALUES, (8, 5)), jnp.float32), "b": jnp.zeros((8, 3), jnp.complex64)}
    reports = mapped(lambda g: jmpscale.grad_report(g, axis_name=axis_name), axis_name="d")(grads)
    for device in range(8):
        expected = jmpscale.grad_report(grads if axis_name else jax.tree.map(lambda x, i=device: x[i], grads))
        report = jax.tree.map(lambda x, i=device: x[i], reports)
        assert report.sizes == expected.sizes == ((40, 48) if axis_name else (5, 6))
        assert report.describe() == expected.describe()


def test_grad_report_takes_the_axes_that_types_do_not_show():
    def stacked(grads):
        report = jmpscale.grad_report({"a": grads["a"]}, axis_name=("x", "y"))
        return jax.tree.map(lambda x: x[None], report)

    fn, placed = _mapped(stacked, out_specs=P(("x", "y")), check_vma=False)
    report = jax.device_get(fn(placed))
    for device in range(8):
        _assert_equals_reference(jax.tree.map(lambda x, i=device: x[i], report), [LEAVES["a"]])
    with pytest.raises(ValueError, match="axis_name 'nowhere' is not the name of a mapped axis"):
        _mapped(lambda g: jmpscale.grad_report(g, axis_name="nowhere"), out_specs=P())[0](placed)
    with pytest.warns(UserWarning, match="each device decides independently"):
        _mapped(jmpscale.grad_report, out_specs=P(), check_vma=False)[0].lower(placed)


# The report in a training step of many layers, one of which overflows on its way back.


@jax.custom_vjp
def _faulty(x, fault):
    return x


_faulty.defvjp(lambda x, fault: (x, fault), lambda fault, g: (g.at[0, 1].multiply(fault), jnp.zeros(())))


def _loss(params, x, layer):
    for i in range(len(params)):
        dense = params[f"layer_{i}"]
        x = jnp.tanh(x @ dense["kernel"] + dense["bias"])
        x = _faulty(x, jnp.where(i == layer, jnp.float32(jnp.inf), 1.0))
    return jnp.mean(x**2)


@pytest.mark.once
@pytest.mark.parametrize("depth", some([16, 100], default=[16]))
@pytest.mark.parametrize("on", ["one device", "a mesh"])
def test_describe_names_the_layer_whose_backward_pass_overflows(on, depth, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda *_: 8 if on == "a mesh" else 1)
    jmpscale._report._leaf_statistics.clear_cache()
    keys = jax.random.split(jax.random.key(0), depth)
    params = {
        f"layer_{i}": {"kernel": jax.random.normal(k, (4, 4)) / 2, "bias": jnp.full((1, 4), 0.1)}
        for i, k in enumerate(keys)
    }
    batch = jax.random.normal(jax.random.key(1), (8, 4))
    if on == "a mesh":
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        batch = jax.device_put(batch, jax.NamedSharding(mesh, P("data")))
        params = jax.device_put(params, jax.NamedSharding(mesh, P()))

    @jax.jit
    def look(params, batch, layer):
        scaler = jmpscale.dynamic()
        loss, grads = jmpscale.value_and_grad(_loss)(scaler, params, batch, layer)
        return jmpscale.grad_report(grads, scaler=scaler), jmpscale.all_finite(grads), loss

    for layer in (depth // 3, 0, depth - 1):
        report, finite, loss = look(params, batch, layer)
        assert not finite
        assert jnp.isfinite(loss)
        first = report.describe().splitlines()[0]
        assert f" of {2 * depth} leaves are not finite; the overflow most likely began in layer_{layer}/" in first
    report, finite, _ = look(params, batch, -1)
    assert finite
    assert report.describe().startswith(f"All {2 * depth} leaves are finite; the largest magnitude is in layer_")


def test_describe_distinguishes_nan_from_an_overflow():
    grads = inject({"w": jnp.ones(4), "b": jnp.ones(2)}, jnp.nan, path="['w']")
    text = jmpscale.grad_report(grads).describe()
    assert "1 of 2 leaves are not finite; the overflow most likely began in w. All non-finite values are NaN" in text
    assert (
        "All non-finite values are NaN" not in jmpscale.grad_report(grads | {"b": jnp.array([jnp.inf, 1.0])}).describe()
    )


def test_describe_does_not_count_zeros():
    grads = {"relu": jnp.array([jnp.inf] * 3 + [0.0] * 97), "origin": jnp.array([jnp.inf] + [1.0] * 9)}
    assert "the overflow most likely began in origin" in jmpscale.grad_report(grads).describe()


def test_describe_names_no_leaf_if_most_values_are_not_finite():
    grads = {"w": jnp.full(4, jnp.inf), "b": jnp.full(2, jnp.nan)}
    assert "2 of 2 leaves are mostly not finite; a smaller scale shows where" in jmpscale.grad_report(grads).describe()
    assert "the overflow most likely began in w" in jmpscale.grad_report(grads | {"b": jnp.ones(2)}).describe()


def _made_up(max_abs):
    none = jnp.zeros(len(max_abs), jnp.int32)
    paths = tuple(f"params/layer_{i}" for i in range(len(max_abs)))
    return jmpscale.GradReport(
        jnp.array(True), jnp.asarray(max_abs, jnp.float32), none, none, none, none, none, paths, (2,) * len(paths)
    )


def test_describe_of_a_thousand_leaves_is_quick_and_limited(monkeypatch):
    report = _made_up(1.0 + np.arange(1000.0))
    gets = []
    real = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: gets.append(1) or real(x))
    start = time.process_time()
    text = report.describe()
    assert time.process_time() - start < 5, "it takes milliseconds; a quadratic table would take minutes"
    assert len(gets) == 1
    lines = text.splitlines()
    assert len(lines) == 22
    assert [line.split()[0] for line in lines[2:5]] == ["params/layer_999", "params/layer_998", "params/layer_997"]
    assert len(report.describe(limit=1000).splitlines()) == 1002


def test_totals_of_stacked_reports_are_those_of_each():
    grads = jnp.zeros((3, 2)).at[1, 0].set(jnp.nan).at[2].set(4.0)
    totals = jax.vmap(jmpscale.grad_report)(grads).totals()
    for step in range(3):
        assert _floats({k: v[step] for k, v in totals.items()}) == _floats(jmpscale.grad_report(grads[step]).totals())
    assert totals["zero"].tolist() == [1.0, 0.5, 0.0]


def test_totals_of_more_values_than_an_int32_counts():
    big = dataclasses.replace(_made_up(np.ones(2)), zero=jnp.full(2, 2**30), sizes=(2**31 - 1, 2**31 - 1))
    assert float(big.totals()["zero"]) == 0.5
    leaves = [jax.ShapeDtypeStruct((2**15, 2**15), jnp.float16)] * 2
    assert jax.eval_shape(lambda g: jmpscale.grad_report(g).totals(), leaves)["zero"].dtype == jnp.float32


def test_grad_report_of_a_leaf_of_symbolic_shape():
    def look(x):
        report = jmpscale.grad_report({"x": x, "y": jnp.ones(3)})
        return report, report.totals()

    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a,b"), jnp.float32)
    exported = jax.export.export(jax.jit(look))(shape)
    x = jnp.zeros((2, 3)).at[1, 1].set(jnp.inf)
    report, totals = exported.call(x)
    assert totals["zero"] == np.float32(5 / 9)
    text = report.describe()
    assert "1 of 2 leaves are not finite; the overflow most likely began in x." in text
    assert text.splitlines()[2].split() == ["x", "a*b", "inf", "-inf", "0", "1", "5", "0", "0"]


def test_totals_are_fractions_of_all_values(variant):
    grads = [jnp.array([0.0, 1e-9, 1.0, jnp.inf]), jnp.array([1e-6] * 4)]
    totals = variant(lambda g: jmpscale.grad_report(g).totals())(grads)
    assert {k: float(v) for k, v in totals.items()} == {
        "max_abs": np.inf,
        "nan": 0.0,
        "inf": 1 / 8,
        "zero": 1 / 8,
        "underflow": 1 / 8,
        "subnormal": 4 / 8,
    }
    assert jnp.isnan(jax.jit(lambda r: r.totals()["max_abs"])(_made_up(np.append(np.ones(4100), np.nan))))


def _step(look):
    def step(scaler, params, x):
        scaled = jax.grad(lambda p: jmpscale.scale(scaler, jnp.sum(jnp.tanh(x @ p["w"]) + p["b"])))(params)
        grads, finite = jmpscale.unscale_and_check(scaler, scaled)
        params = jmpscale.apply_if(finite, lambda p: optax.apply_updates(p, grads), params)
        return params, jmpscale.update(scaler, finite), look(grads, scaler)

    arguments = jmpscale.dynamic(), {"w": jnp.ones((32, 16)), "b": jnp.ones((1, 16))}, jnp.ones((8, 32))
    return hlo.compiled(step, *arguments)


def test_an_unused_report_compiles_to_nothing():
    def dropped(grads, scaler):
        jmpscale.grad_report(grads, scaler=scaler).totals()

    assert hlo.instructions(_step(dropped)) == hlo.instructions(_step(lambda *_: None))


def test_report_and_check_share_their_computations():
    kept = hlo.instructions(_step(lambda grads, scaler: jmpscale.grad_report(grads, scaler=scaler)))
    alone = hlo.instructions(_step(lambda *_: None))
    for shared in ("is-finite pred[32,16]", "tanh f32[8,16]", "dot f32[32,16]"):
        assert kept.count(shared) == alone.count(shared) > 0, shared
    assert len(kept) > len(alone)


def test_totals_of_few_values():
    assert _floats(jmpscale.grad_report(jnp.array([0.25])).totals())["max_abs"] == "0.25"
    assert float(jmpscale.grad_report(jnp.zeros(1)).totals()["zero"]) == 1.0
    assert {float(x) for x in jmpscale.grad_report(jnp.zeros(0)).totals().values()} == {0.0}


def test_a_report_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        jmpscale.grad_report(jnp.ones(1)).max_abs = jnp.zeros(1)
