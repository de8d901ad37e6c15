"""One shard of one leaf on one device overflows: every device skips that step, whatever the layout and the mode."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

import jmpscale
from jmpscale.testing import assert_replicated

import pages
from cases import some_of_all

# Each layout: the mesh, and the partition of four leaves, in float16, bfloat16, float32 and float32.
LAYOUTS = {
    "fully sharded": ({"data": 8}, [Spec("data"), Spec(None, "data"), Spec("data"), Spec("data")]),
    "tensor parallel": ({"model": 8}, [Spec(None, "model"), Spec("model"), Spec("model"), Spec()]),
    "data and tensor parallel": (
        {"data": 4, "model": 2},
        [Spec("model"), Spec(None, "model"), Spec(), Spec("model")],
    ),
    "fully sharded and tensor parallel": (
        {"data": 4, "model": 2},
        [Spec("data", "model"), Spec("model"), Spec("data"), Spec()],
    ),
    "three axes": (
        {"data": 2, "fsdp": 2, "model": 2},
        [Spec(("data", "fsdp"), "model"), Spec("fsdp"), Spec(None, "model"), Spec("model", "fsdp")],
    ),
    "experts": ({"expert": 4, "data": 2}, [Spec("expert"), Spec("expert", None), Spec(), Spec("expert")]),
}
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float32]
MODES = ["auto", "explicit", "shard_map", "unchecked"]
EACH_MODE = [("three axes", mode) for mode in MODES]


def make_mesh(shape, axis_type=AxisType.Auto):
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(axis_type,) * len(shape))


def put(tree, mesh, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def replicate(tree, mesh):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, Spec())), tree)


def bits(tree):
    """Returns what each device holds of each array, as bytes."""
    return [[np.asarray(s.data).tobytes() for s in x.addressable_shards] for x in jax.tree.leaves(tree)]


def _functional_step(carry, grads, loss, axis_name=None, traces=None):
    traces.append(1)
    params, scaler = carry
    grads, finite = jmpscale.unscale_and_check(scaler, grads, axis_name=axis_name)

    def descend(params):
        return jax.tree.map(lambda p, g: p - g.astype(p.dtype), params, grads)

    params = jmpscale.apply_if(finite, descend, params)
    return params, jmpscale.update(scaler, finite, loss=loss, axis_name=axis_name)


def _wrapper_step(carry, grads, loss, axis_name=None, traces=None):
    traces.append(1)
    params, scaler = carry
    tx = jmpscale.with_loss_scaling(optax.scale(-1.0), axis_name=axis_name)
    updates, state = tx.update(grads, tx.init(params)._replace(scaler=scaler), params, value=loss)
    return jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates), state.scaler


def _build(layout, mode, step_fn=_functional_step):
    """Returns a jitted step, the mesh, the specs and a list that grows with each trace, of a layout in a mode."""
    shape, specs = LAYOUTS[layout]
    traces = []
    mesh = make_mesh(shape, AxisType.Explicit if mode == "explicit" else AxisType.Auto)
    step = functools.partial(step_fn, axis_name=tuple(shape) if mode == "unchecked" else None, traces=traces)
    if mode in ("shard_map", "unchecked"):

        def local(carry, grads, loss, step=step):
            return step(carry, grads, loss[0])

        carry_specs = (specs, Spec())
        step = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(carry_specs, specs, Spec(tuple(shape))),
            out_specs=carry_specs,
            check_vma=mode == "shard_map",
        )
    return jax.jit(step), mesh, specs, traces


def _plant(array, device, value):
    """Puts a value into the first element of what one device holds, and so of its replicas."""
    index = array.sharding.devices_indices_map(array.shape)[device]
    place = tuple(part.indices(size)[0] for part, size in zip(index, array.shape, strict=True))
    host = np.array(array)
    host[place] = value
    return jax.device_put(host, array.sharding)


@pytest.mark.parametrize(("layout", "mode"), some_of_all(LAYOUTS, MODES, default=EACH_MODE))
def test_an_overflow_in_one_shard_skips_the_step_everywhere(layout, mode):
    step, mesh, specs, traces = _build(layout, mode)
    with jax.set_mesh(mesh):
        params = put([jnp.ones((16, 16), jnp.float32)] * 4, mesh, specs)
        scaler = replicate(jmpscale.dynamic(2.0**10), mesh)
        grads = put([jnp.ones((16, 16), dtype) for dtype in DTYPES], mesh, specs)
        loss = jnp.ones(8) if mode in ("shard_map", "unchecked") else jnp.float32(1)
        loss = put(loss, mesh, Spec(tuple(mesh.axis_names)) if loss.shape else Spec())
        moved, after = step((params, scaler), grads, loss)
        assert all(a != b for a, b in zip(bits(moved), bits(params), strict=True))
        expected = 2.0**10
        carry = params, scaler
        devices = list(mesh.devices.flat)
        for leaf in range(4):
            for device in (devices[0], devices[4], devices[-1]):
                for value in (np.inf, np.nan):
                    bad = list(grads)
                    bad[leaf] = _plant(grads[leaf], device, value)
                    carry = step(carry, bad, loss)
                    assert_replicated(carry[1])
                    expected = max(expected / 2, 1.0)
                    assert float(carry[1].loss_scale) == expected
                    assert bits(carry[0]) == bits(params)
        assert int(carry[1].skipped) == 24
        assert len(traces) == 1
        assert_replicated(after)


@pytest.mark.parametrize("step_fn", [_functional_step, _wrapper_step], ids=["loss=", "value="])
@pytest.mark.parametrize(
    ("layout", "mode"),
    some_of_all(
        LAYOUTS, ["shard_map", "unchecked"], default=[("three axes", "shard_map"), ("three axes", "unchecked")]
    ),
)
def test_a_loss_that_is_nan_on_one_device_explains_the_skip_on_all(layout, mode, step_fn):
    step, mesh, specs, _ = _build(layout, mode, step_fn)
    with jax.set_mesh(mesh):
        params = put([jnp.ones((16, 16), jnp.float32)] * 4, mesh, specs)
        grads = put([jnp.ones((16, 16), dtype) for dtype in DTYPES], mesh, specs)
        bad = [_plant(grads[0], mesh.devices.flat[0], np.nan), *grads[1:]]
        for device in (0, 4, 7):
            scaler = replicate(jmpscale.dynamic(2.0**10), mesh)
            loss = put(jnp.ones(8).at[device].set(jnp.nan), mesh, Spec(tuple(mesh.axis_names)))
            kept, skipped = step((params, scaler), bad, loss)
            assert_replicated(skipped)
            assert [x.item() for x in jax.tree.leaves(skipped)] == [2.0**10, 0, 1, 1, 1, 2]
            assert bits(kept) == bits(params)
            _, fine = step((params, scaler), grads, loss)
            assert_replicated(fine)
            assert [x.item() for x in jax.tree.leaves(fine)] == [2.0**10, 1, 1, 0, 0, 0]


@pytest.mark.once
@pytest.mark.parametrize(
    ("layout", "mode"),
    some_of_all(LAYOUTS, MODES, default=[("fully sharded", "explicit"), ("experts", "shard_map")]),
)
def test_a_scan_over_steps_is_the_steps_one_by_one(layout, mode):
    step, mesh, specs, _ = _build(layout, mode)
    word = np.array([0, 1, 0, 0, 1, 1, 0], bool)

    def run(carry, grads, bad, loss):
        def one(carry, overflow):
            chosen = jax.tree.map(lambda good, bad: jnp.where(overflow, bad, good), grads, bad)
            carry = step(carry, chosen, loss)
            return carry, carry[1].loss_scale

        return jax.lax.scan(one, carry, jnp.asarray(word))

    with jax.set_mesh(mesh):
        carry = put([jnp.ones((16, 16), jnp.float32)] * 4, mesh, specs), replicate(jmpscale.dynamic(2.0**10), mesh)
        grads = put([jnp.ones((16, 16), dtype) for dtype in DTYPES], mesh, specs)
        bad = [_plant(grads[0], mesh.devices.flat[5], np.inf), *grads[1:]]
        local = mode in ("shard_map", "unchecked")
        loss = put(jnp.ones(8) if local else jnp.ones(()), mesh, Spec(tuple(mesh.axis_names)) if local else Spec())
        scanned, scales = jax.jit(run)(carry, grads, bad, loss)
        for overflow in word:
            carry = step(carry, bad if overflow else grads, loss)
    assert_replicated((scanned[1], scales))
    assert scales.tolist() == [2.0**n for n in (10, 9, 9, 9, 8, 7, 7)]
    assert bits(scanned) == bits(carry)


def test_in_a_scan_over_steps_the_devices_stay_together():
    mesh = make_mesh({"data": 4, "model": 2})
    word = np.array([1, 1, np.inf, 1, 1, np.nan, np.inf, 1, 1, 1, 1], np.float32)
    faults = np.ones((len(word), 4, 2), np.float32)
    faults[np.arange(len(word)), np.arange(len(word)) % 4, np.arange(len(word)) % 2] = word

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(Spec(), Spec(None, "data", "model")),
        out_specs=(Spec(), Spec("data", "model"), Spec()),
    )
    def run(scaler, faults):
        def one(carry, fault):
            w, scaler = carry
            grads, finite = jmpscale.unscale_and_check(scaler, scaler.loss_scale * fault)
            w = jmpscale.apply_if(finite, lambda w: w - grads, w)
            return (w, jmpscale.update(scaler, finite)), scaler.loss_scale

        w = jax.lax.full_like(faults[0], 20.0)
        (w, scaler), scales = jax.lax.scan(one, (w, scaler), faults)
        return scaler, w, scales

    scaler, w, scales = run(jmpscale.dynamic(2.0**10, growth_interval=3), faults)
    assert_replicated((scaler, scales))
    np.testing.assert_array_equal(w, np.full((4, 2), 12.0))
    np.testing.assert_array_equal(scales, 2.0 ** np.array([10, 10, 10, 9, 9, 9, 8, 7, 7, 7, 8]))


def test_all_finite_with_zero_size_shards():
    """Devices that hold nothing of a leaf still take part in the reduction (pytorch#99174)."""
    mesh = make_mesh({"stage": 8})

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(Spec("stage"), Spec("stage")), out_specs=Spec())
    def check(layer, empty):
        return jmpscale.all_finite({"layer": layer, "none": empty, "absent": None})

    empty = jnp.zeros((8, 0))
    assert check(jnp.ones((8, 3)), empty)
    for stage in range(8):
        assert not check(jnp.ones((8, 3)).at[stage, 1].set(jnp.inf), empty)


@pytest.mark.parametrize("size", [1, 3, 9, 10, 23])
def test_leaves_that_do_not_divide_evenly(size):
    mesh = make_mesh({"data": 8})

    @jax.jit
    def check(x):
        x = jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, Spec("data")))
        return jmpscale.unscale_and_check(jmpscale.static(4.0), {"w": x})[1]

    with jax.set_mesh(mesh):
        assert check(jnp.ones(size))
        for place in range(size):
            assert not check(jnp.ones(size).at[place].set(jnp.nan))


# --- axis_name ---


def _flag(mesh_shape, axis_name, check_vma, body=None):
    """Returns each device's flag, from values of which device 5's is infinite."""
    mesh = make_mesh(mesh_shape)
    spec = Spec(tuple(mesh_shape))

    def local(x):
        finite = jmpscale.all_finite(x if body is None else body(x), axis_name=axis_name)
        return jnp.broadcast_to(finite, (1,)) if not check_vma else jnp.where(x == x, finite, finite)

    fn = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma))
    return fn(jnp.ones(8).at[5].set(jnp.inf)).tolist()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("axis_name", "expected"),
    [
        ("a", [True, False, True, True, True, False, True, True]),  # devices 1 and 5 share b=1
        ("b", [True] * 4 + [False] * 4),
        (("a", "b"), [False] * 8),
        (("b", "a"), [False] * 8),
        (["a", "b"], [False] * 8),
        ((), [True] * 5 + [False] + [True] * 2),
    ],
)
def test_axis_name_reduces_over_exactly_the_named_axes(axis_name, expected, check_vma):
    assert _flag({"a": 2, "b": 4}, axis_name, check_vma) == expected


def test_without_axis_name_the_types_decide_and_without_types_each_device_decides_alone():
    assert _flag({"a": 2, "b": 4}, None, True) == [False] * 8
    with pytest.warns(
        UserWarning, match=r"each device decides independently.*\('a', 'b'\).*Pass axis_name=\('a', 'b'\)"
    ):
        assert _flag({"a": 2, "b": 4}, None, False) == [True] * 5 + [False] + [True] * 2


@pytest.mark.parametrize("axis_name", ["a", ("a", "b")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_naming_axes_that_are_already_reduced_changes_nothing(axis_name, check_vma):
    flags = _flag({"a": 2, "b": 4}, axis_name, check_vma, lambda x: jax.lax.psum(x, ("a", "b")))
    assert flags == [False] * 8


def _update_wrapped(**options):
    tx = jmpscale.with_loss_scaling(optax.scale(1.0), **options)
    return tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize("axis_name", ["dta", ("a", "dta")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_misspelt_axis_is_an_error(axis_name, check_vma):
    with pytest.raises(
        ValueError, match=r"axis_name 'dta' is not the name of a mapped axis here\. Use a name given to"
    ):
        _flag({"a": 2, "b": 4}, axis_name, check_vma)
    for call in (
        lambda: jmpscale.unscale_and_check(jmpscale.dynamic(), jnp.ones(2), axis_name="dta"),
        lambda: jmpscale.update(jmpscale.dynamic(), True, axis_name="dta"),
        lambda: _update_wrapped(axis_name="dta"),
        lambda: _update_wrapped(norm_axis_name="dta"),
        lambda: _update_wrapped(max_norm=1.0, norm_axis_name="dta"),
    ):
        with pytest.raises(ValueError, match="axis_name 'dta' is not the name"):
            call()


def test_a_vmap_axis_can_be_named():
    x = jnp.ones(4).at[2].set(jnp.nan)
    alone = jax.vmap(jmpscale.all_finite, axis_name="batch")(x)
    together = jax.vmap(functools.partial(jmpscale.all_finite, axis_name="batch"), axis_name="batch")(x)
    assert alone.tolist() == [True, True, False, True]
    assert together.tolist() == [False] * 4


def test_vmap_inside_shard_map_and_the_other_way_round():
    mesh = make_mesh({"data": 8})
    x = jnp.ones((8, 3)).at[5, 1].set(jnp.inf)
    inside = jax.shard_map(jax.vmap(jmpscale.all_finite), mesh=mesh, in_specs=Spec(None, "data"), out_specs=Spec())
    assert jax.jit(inside)(x.T).tolist() == [True, False, True]
    mapped = jax.vmap(jax.shard_map(jmpscale.all_finite, mesh=mesh, in_specs=Spec("data"), out_specs=Spec()), in_axes=1)
    assert jax.jit(mapped)(x).tolist() == [True, False, True]


def test_under_a_shard_map_over_some_axes_only():
    mesh = make_mesh({"data": 4, "model": 2})

    def step(scaler, grads):
        return jmpscale.update(scaler, jmpscale.unscale_and_check(scaler, grads)[1])

    step = jax.shard_map(
        step, mesh=mesh, in_specs=(Spec(), Spec("data")), out_specs=Spec(), axis_names=frozenset({"data"})
    )
    with jax.set_mesh(mesh):
        for row, column in ((0, 0), (3, 4), (7, 7)):
            grads = put(jnp.ones((8, 8)).at[row, column].set(jnp.inf), mesh, Spec("data", "model"))
            after = jax.jit(step)(jmpscale.dynamic(4.0), grads)
            assert_replicated(after)
            assert after.loss_scale == 2.0


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_step_that_changes_a_sharding_is_refused_by_path(axis_type):
    mesh = make_mesh({"data": 8}, axis_type)

    def step(w, x):
        return jmpscale.apply_if(jnp.array(True), lambda c: {"w": c["w"] - x}, {"w": w})

    if axis_type == AxisType.Auto:
        step = jax.shard_map(step, mesh=mesh, in_specs=(Spec(), Spec("data")), out_specs=Spec())
    with jax.set_mesh(mesh):
        w = put(jnp.ones((1,) if axis_type == AxisType.Auto else (8,)), mesh, Spec())
        x = put(jnp.ones(8), mesh, Spec("data"))
        with pytest.raises(TypeError, match=r"carry\[0\]\['w'\] was float32\[[18]\] and is float32.*reshard it in fn"):
            jax.jit(step)(w, x)


@pytest.mark.parametrize(
    "call",
    [
        lambda grads: jmpscale.unscale(jmpscale.static(1.0), grads),
        lambda grads: jmpscale.unscale_and_check(jmpscale.static(1.0), grads),
        jmpscale.all_finite,
        jmpscale.grad_report,
    ],
    ids=["unscale", "unscale_and_check", "all_finite", "grad_report"],
)
def test_partial_sums_inside_shard_map_are_refused(call):
    if not hasattr(jax.lax, "pcast"):
        pytest.skip("this JAX has no type for partial sums inside shard_map")
    mesh = make_mesh({"data": 8})

    def local(w, x):
        w = jax.lax.pcast(w, ("data",), to="reduced")
        grads = jax.grad(lambda w: (w * x).sum())(w)
        return call({"b": x, "n": jnp.array(3), "w": grads})

    with pytest.raises(TypeError, match=r"tree\['w'\] is a partial sum over the mesh axes \['data'\].*psum"):
        jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(Spec(), Spec("data")), out_specs=Spec()))(1.0, jnp.ones(8))


# --- pmap, and what JAX's types do not show ---


def _pmap(step, **options):
    try:
        return jax.pmap(step, **options)
    except AttributeError:
        pytest.skip("this JAX has no pmap")


@pytest.mark.parametrize("summed", [True, False], ids=["summed gradients", "local sgd"])
def test_pmap(summed):
    def step(params, scaler, grads, loss):
        grads = jax.lax.psum(grads, "devices") if summed else grads
        grads, finite = jmpscale.unscale_and_check(scaler, grads, axis_name="devices")
        params = jmpscale.apply_if(finite, lambda p: p - grads, params)
        return params, jmpscale.update(scaler, finite, loss=loss, axis_name="devices")

    step = _pmap(step, axis_name="devices")
    params = jnp.arange(8.0)
    scaler = jax.tree.map(lambda x: jnp.stack([x] * 8), jmpscale.dynamic(2.0**4))
    moved, after = step(params, scaler, jnp.full(8, 16.0), jnp.ones(8))
    np.testing.assert_array_equal(moved, params - (8 if summed else 1))
    assert_replicated(after)
    for device in (0, 3, 7):
        bad = jnp.full(8, 16.0).at[device].set(jnp.inf)
        kept, skipped = step(params, scaler, bad, jnp.ones(8))
        np.testing.assert_array_equal(kept, params)
        np.testing.assert_array_equal(skipped.loss_scale, 8.0)
        kept, skipped = step(params, scaler, bad, jnp.ones(8).at[7 - device].set(jnp.nan))
        np.testing.assert_array_equal(skipped.loss_scale, 16.0)
        np.testing.assert_array_equal(skipped.last_skip, jmpscale.SkipReason.LOSS)
        assert_replicated(skipped)


@pytest.mark.parametrize("untyped", ["pmap", "check_vma=False"])
def test_without_axis_name_devices_diverge_where_types_do_not_show_it_and_assert_replicated_raises(untyped):
    def step(scaler, grads):
        return jmpscale.update(scaler, jmpscale.unscale_and_check(scaler, grads)[1])

    grads = jnp.ones(8).at[3].set(jnp.inf)
    scaler = jmpscale.dynamic()
    if untyped == "pmap":
        scaler = jax.tree.map(lambda x: jnp.stack([x] * 8), scaler)
        step = _pmap(step, axis_name="devices")
    else:
        mesh = make_mesh({"data": 8})
        step = jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(Spec(), Spec("data")), out_specs=Spec(), check_vma=False)
        )
    # In older versions of JAX pmap does not tell that there is a mesh: assert_replicated is all the help there is.
    expected = contextlib.nullcontext() if untyped == "pmap" and jax.__version_info__ < (0, 10) else _warns()
    with expected:
        after = step(scaler, grads)
    with pytest.raises(
        AssertionError, match=r"tree\.loss_scale differs between devices: .*65536.*32768.*pass axis_name"
    ):
        assert_replicated(after)


def _warns():
    return pytest.warns(
        UserWarning, match=r"each device decides independently.*or axis_name=\(\) if all devices hold the same"
    )


_TX = jmpscale.with_loss_scaling(optax.scale(1.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda s, g: jmpscale.unscale_and_check(s, g)[1],
        lambda s, g: jmpscale.all_finite(g),
        lambda s, g: jmpscale.update(s, True, loss=g.sum()).skipped,
        lambda s, g: _TX.update(g, _TX.init(g))[0].sum(),
        lambda s, g: jmpscale.grad_report(g).finite,
    ],
    ids=["unscale_and_check", "all_finite", "update with a loss", "with_loss_scaling", "grad_report"],
)
def test_a_missing_axis_name_warns_once_at_the_users_line_and_only_where_devices_could_diverge(call):
    mesh = make_mesh({"data": 8})

    def run(call, check_vma):
        step = jax.shard_map(call, mesh=mesh, in_specs=(Spec(), Spec("data")), out_specs=Spec(), check_vma=check_vma)
        return jax.jit(step).lower(jmpscale.dynamic(), jnp.ones(8))

    with _warns() as caught:
        run(call, False)
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, call.__code__.co_firstlineno)]
    run(lambda s, g: jmpscale.update(s, jmpscale.all_finite(g, axis_name="data")).skipped, False)
    run(lambda s, g: jax.lax.psum(call(s, g).astype(jnp.int32), "data"), True)
    jax.jit(call).lower(jmpscale.dynamic(), jnp.ones(8))
    jax.vmap(lambda g: call(jmpscale.dynamic(), g), axis_name="batch")(jnp.ones((2, 3)))


def test_with_types_jax_itself_refuses_a_state_that_differs():
    mesh = make_mesh({"data": 8})

    def step(scaler, grads):
        return jmpscale.update(scaler, jmpscale.all_finite(grads, axis_name=()), axis_name=())

    with pytest.raises(ValueError, match=r"out_specs|vary|replicat"):
        jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(Spec(), Spec("data")), out_specs=Spec()))(
            jmpscale.dynamic(), jnp.ones(8)
        )


def test_assert_replicated_refuses_what_is_no_array():
    with pytest.raises(TypeError, match=r"tree\['a'\] must be an array, got float"):
        assert_replicated({"a": 1.0})


# --- averaged gradients, where JAX's types do not show what differs ---

UNTYPED = ["pmap", "check_vma=False", "vmap"]


def _map_untyped(how, step, devices, axis_name="batch"):
    """Maps `step` over the first axis of its arguments, of which each device, or batch entry, has one element."""
    if how == "vmap":
        return jax.jit(jax.vmap(step, axis_name=axis_name))
    if how == "pmap":
        return _pmap(step, axis_name=axis_name, devices=jax.devices()[:devices])

    def local(*args):
        out = step(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], out)

    mesh = jax.make_mesh((devices,), (axis_name,), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=Spec(axis_name), out_specs=Spec(axis_name), check_vma=False)
    )


def _rows(tree, devices):
    return jax.tree.map(lambda x: jnp.stack([x] * devices), tree)


def _assert_equal_rows(tree):
    for x in map(np.asarray, jax.tree.leaves(tree)):
        np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape))


@pytest.mark.parametrize(
    ("how", "devices"), some_of_all(UNTYPED, [2, 8], default=[("pmap", 2), ("pmap", 8), ("check_vma=False", 8)])
)
def test_with_loss_scaling_clips_averaged_gradients_to_max_norm(how, devices, platform):
    tx = jmpscale.with_loss_scaling(optax.scale(-1.0), max_norm=1.0, axis_name="batch")

    def step(state, grads):
        return tx.update(jax.lax.pmean(grads, "batch"), state)

    grads = jnp.stack([jnp.array([3.0, 4.0]) * 2 * i / (devices - 1) for i in range(devices)])  # on average [3, 4]
    updates, state = _map_untyped(how, step, devices)(_rows(tx.init(jnp.ones(2)), devices), grads)
    np.testing.assert_allclose(state.grad_norm, 5.0, rtol=1e-6)
    np.testing.assert_allclose(updates, _rows(jnp.array([-0.6, -0.8]), devices), rtol=1e-6)
    _assert_equal_rows((updates, state))


def _train_in_the_wrapper(axis_name, max_norm):
    scaler = jmpscale.dynamic(1024.0)
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1, 0.9), scaler, max_norm=max_norm, axis_name=axis_name)

    def step(params, opt_state, x):
        loss, grads = jmpscale.value_and_grad(_loss_of_a_line)(opt_state, params, x)
        updates, opt_state = tx.update(jax.lax.pmean(grads, "batch"), opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return tx.init, step


def _train_by_functions(axis_name, max_norm):
    assert max_norm is None
    tx = optax.sgd(0.1, 0.9)

    def step(params, state, x):
        opt_state, scaler = state
        loss, grads = jmpscale.value_and_grad(_loss_of_a_line)(scaler, params, x)
        grads = jax.lax.pmean(grads, "batch")
        finite = jmpscale.all_finite(grads, axis_name=axis_name)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)
        return params, (opt_state, jmpscale.update(scaler, finite, loss=loss, axis_name=axis_name))

    return lambda params: (tx.init(params), jmpscale.dynamic(1024.0)), step


def _loss_of_a_line(params, x):
    return (x @ params - 1.0) ** 2


CALLS = {
    "optax wrapper, max_norm": (_train_in_the_wrapper, 1.0),
    "optax wrapper": (_train_in_the_wrapper, None),
    "functional API": (_train_by_functions, None),
}
MAPS = [*((how, "batch") for how in UNTYPED), ("pmap", ()), ("check_vma=False", ())]


@pytest.mark.parametrize(
    ("call", "mapped"), some_of_all(CALLS, MAPS, default=[("optax wrapper, max_norm", mapped) for mapped in MAPS])
)
def test_a_loss_that_is_nan_on_one_device_does_not_make_devices_diverge(call, mapped, platform):
    (make, max_norm), (how, axis_name) = CALLS[call], mapped
    if how == "pmap" and axis_name == () and jax.__version_info__ < (0, 10):
        pytest.skip("here pmap does not show that there is an axis that is not named")
    init, step = make(axis_name, max_norm)
    step, params = _map_untyped(how, step, 8), jnp.zeros(2)
    carry = _rows((params, init(params)), 8)
    x = np.random.default_rng(0).standard_normal((5, 8, 2)).astype(np.float32)
    x[2, 3, 0] = np.nan
    for number, batch in enumerate(x):
        before, carry = carry, step(*carry, batch)
        _assert_equal_rows(carry)
        assert (bits(before[0]) == bits(carry[0])) == (number == 2)
    scaler = jax.tree.map(lambda rows: rows[0], jmpscale.get_scaler(carry[1]))
    assert (scaler.skipped, scaler.finite_steps) == ((1, 4) if axis_name else (1, 2))
    # Where an axis is not named the loss could differ along it, so it does not count as the reason.
    assert scaler.last_skip == (jmpscale.SkipReason.LOSS if axis_name else jmpscale.SkipReason.GRADIENTS)
    assert scaler.loss_scale == (1024.0 if axis_name else 512.0)


# --- parts of a gradient, where JAX's types do not show them: fully sharded parameters, gathered by hand ---


def _fully_sharded_by_hand(shape, max_norm=1.0, **axes):
    """Returns a step on a mesh with the axis "f", along which parameters are sharded, and the specs of its carry."""
    mesh = make_mesh(shape)
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic(1024.0), max_norm=max_norm, **axes)

    def local(w, state, x, fault):
        def loss_fn(w):
            full = jax.lax.all_gather(w, "f", tiled=True)
            return jnp.mean((x @ full) ** 2) / jax.lax.axis_size("f")  # gathering adds the gradients up

        loss, grads = jmpscale.value_and_grad(loss_fn)(state, w)
        grads = (jax.lax.pmean(grads, "b") if "b" in shape else grads) + fault
        updates, state = tx.update(grads, state, w, value=loss)
        return optax.apply_updates(w, updates), state, state.grad_norm[None]

    everywhere = Spec(tuple(shape))
    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(Spec("f"), Spec(), everywhere, Spec("f")),
        out_specs=(Spec("f"), Spec(), everywhere),
        check_vma=False,
    )
    return tx, jax.jit(step), mesh


@pytest.mark.parametrize(
    ("shape", "axes", "loss_counts"),
    [
        ({"b": 4, "f": 2}, {"axis_name": ("b", "f"), "norm_axis_name": "f"}, True),
        ({"b": 4, "f": 2}, {"norm_axis_name": "f"}, False),
        ({"f": 8}, {"norm_axis_name": "f"}, True),
        ({"f": 8}, {"axis_name": "f", "norm_axis_name": ("f",)}, True),
    ],
    ids=["both, both named", "both, parts named", "sharded, parts named", "sharded, both named"],
)
def test_with_loss_scaling_adds_up_the_squares_over_norm_axis_name(shape, axes, loss_counts, platform):
    tx, step, mesh = _fully_sharded_by_hand(shape, **axes)
    w = np.arange(1.0, 9.0, dtype=np.float32)
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    norm = np.linalg.norm(grads)
    warns = contextlib.nullcontext()
    if "b" in shape and "axis_name" not in axes:
        warns = pytest.warns(UserWarning, match=r"along the mapped axes \('b',\)")
    carry, none = (put(w, mesh, Spec("f")), replicate(tx.init(w), mesh)), np.zeros(8, np.float32)
    with warns:
        *carry, norms = step(*carry, x, none)
    np.testing.assert_allclose(norms, np.full(8, norm), rtol=1e-5)
    np.testing.assert_allclose(carry[0], w - grads / norm, rtol=1e-5)
    assert_replicated(tuple(carry))
    for part in (0, 5):  # an infinity in what some devices hold, and a batch that is NaN on one device
        *after, _ = step(*carry, x, none + np.where(np.arange(8) == part, np.inf, 0).astype(np.float32))
        assert bits(after[0]) == bits(carry[0])
        assert_replicated(after[1])
        assert after[1].scaler.loss_scale == 512.0
        bad = x.copy()
        bad[part, 0] = np.nan
        *after, _ = step(*carry, bad, none)
        assert bits(after[0]) == bits(carry[0])
        assert_replicated(after[1])
        assert after[1].scaler.loss_scale == (1024.0 if loss_counts else 512.0)


# --- one model on each device ---


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_with_loss_scaling_trains_one_model_on_each_device(max_norm, platform):
    """In a typed `shard_map` with `axis_name=()`, and with a state that is created inside."""
    tx = jmpscale.with_loss_scaling(optax.adam(0.1), max_norm=max_norm, axis_name=())
    bare = optax.adam(0.1) if max_norm is None else optax.chain(optax.clip_by_global_norm(max_norm), optax.adam(0.1))

    def train(tx, w, grads):
        state = tx.init(w)
        for g in grads:
            updates, state = tx.update(g, state, w)
            w = optax.apply_updates(w, updates)
        return w, state

    def local(w, grads):
        return jax.tree.map(lambda x: jnp.asarray(x)[None], train(tx, w[0], grads[0]))

    mesh = make_mesh({"data": 8})
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=Spec("data"), out_specs=Spec("data")))
    w = jnp.ones((8, 2))
    # Norms from 1 to 8 and then from 8 to 1: a norm of all devices together would clip by another factor.
    sizes = jnp.stack([jnp.arange(1.0, 9.0), jnp.arange(8.0, 0.0, -1.0)], 1)
    grads = jnp.stack([0.6 * sizes, 0.8 * sizes], -1)
    expected = jax.vmap(functools.partial(train, bare))(w, grads)[0]
    after, state = step(w, grads)
    np.testing.assert_allclose(after, expected, rtol=1e-6)
    after, state = step(w, grads.at[3, 1, 0].set(jnp.inf))
    alone = jax.vmap(functools.partial(train, bare))(w, grads[:, :1])[0]
    np.testing.assert_allclose(after, expected.at[3].set(alone[3]), rtol=1e-6)
    assert state.scaler.skipped.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert optax.tree.get(state.inner_state, "count").tolist() == [2, 2, 2, 1, 2, 2, 2, 2]
    if max_norm is not None:
        np.testing.assert_allclose(state.grad_norm, sizes[:, 1].at[3].set(jnp.inf), rtol=1e-6)


def test_apply_if_applies_one_step_on_each_device(platform):
    """Also to values that do not vary over devices before the step, and to a Python number."""

    def local(flag, x):
        carry = jnp.int32(0), 3, x[0]
        return jax.tree.map(
            lambda x: x[None], jmpscale.apply_if(flag[0], lambda n, m, x: (n + 1, m + 2, x / 2), *carry)
        )

    step = jax.shard_map(local, mesh=make_mesh({"data": 8}), in_specs=Spec("data"), out_specs=Spec("data"))
    flags = np.arange(8) > 3
    n, m, x = jax.jit(step)(flags, jnp.full(8, 4.0))
    assert n.tolist() == [0] * 4 + [1] * 4
    assert m.tolist() == [3] * 4 + [5] * 4
    assert x.tolist() == [4.0] * 4 + [2.0] * 4


# --- the guide ---


@pytest.mark.usefixtures("standard_promotion")
def test_the_guides_example_for_pmap_clips_to_max_norm_and_skips_on_all_devices():
    if not hasattr(jax, "pmap"):
        pytest.skip("this JAX has no pmap")
    page = pages.run("guides/devices", "pmap")
    assert page["opt_state"].scaler.skipped.tolist() == [1] * 8
    assert page["opt_state"].scaler.last_skip.tolist() == [jmpscale.SkipReason.LOSS] * 8
    start = page["replicate"]({"w": jnp.ones((8, 1))})
    moved, state = page["train_step"](start, page["replicate"](page["tx"].init({"w": jnp.ones((8, 1))})), page["x"])
    np.testing.assert_allclose(state.grad_norm, 16 * 8**0.5, rtol=1e-6)
    np.testing.assert_allclose(start["w"] - moved["w"], 0.5 / 8**0.5, rtol=1e-6)
    assert bits(moved) == bits(page["params"])
