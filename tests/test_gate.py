"""The gate, in the functional API and in the optax wrapper: equal bits in both forms, one trace, no lost sharding."""

import functools
import re

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmpscale
from jmpscale import testing

import compilations
import hlo

pytestmark = pytest.mark.usefixtures("standard_promotion")

FULL = pytest.mark.full
P = PartitionSpec
PARAMS = {"w": jnp.arange(6.0).reshape(2, 3) / 7, "b": jnp.array([-0.0, 3.0, 1e-3])}
GRADS = {"w": jnp.full((2, 3), 0.25), "b": jnp.array([1.0, -2.0, 0.5])}
STATELESS, TX = optax.sgd(0.1), optax.adamw(0.1)


def _grads(factor=1.0):
    return jax.tree.map(lambda g: g * factor, GRADS)


def _functional(tx, params=PARAMS):
    def step(params, opt_state, grads):
        finite = jmpscale.all_finite(grads)
        return jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)

    return tx.init(params), step


def _wrapper(tx, params=PARAMS, **options):
    tx = jmpscale.with_loss_scaling(tx, jmpscale.static(2.0**10), **options)

    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return tx.init(params), step


APIS = {
    "functional": _functional,
    "wrapper": _wrapper,
    "max_norm": functools.partial(_wrapper, max_norm=1.0),
}


# Without `max_norm` the wrapper is mostly as with it, and test_optax.py tests it further.
@pytest.fixture(params=["functional", pytest.param("wrapper", marks=FULL), "max_norm"])
def api(request):
    return APIS[request.param]


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(
    "tx", [pytest.param(STATELESS, marks=FULL, id="stateless"), pytest.param(TX, id="with a state")]
)
def test_a_step_is_that_of_optax_and_a_skip_keeps_every_bit(api, tx):
    opt_state, step = api(tx)
    step = jax.jit(step)
    for bad in (np.inf, np.nan):
        skipped = step(PARAMS, opt_state, _grads() | {"b": np.array([1.0, bad, 2.0], np.float32)})
        testing.assert_step_is_noop(PARAMS, skipped[0])
        testing.assert_step_is_noop(_inner(opt_state), _inner(skipped[1]))
    applied = step(PARAMS, opt_state, _grads())
    clip = [optax.clip_by_global_norm(1.0)] if api is APIS["max_norm"] else []
    plain = optax.chain(*clip, tx)
    updates, _ = jax.jit(plain.update)(GRADS, plain.init(PARAMS), PARAMS)
    chex.assert_trees_all_close(applied[0], optax.apply_updates(PARAMS, updates), rtol=3e-7)


def _inner(opt_state):
    return opt_state.inner_state if hasattr(opt_state, "inner_state") else opt_state


def test_the_platform_that_a_program_is_lowered_for_decides(api):
    """One trace holds both forms; only the program for CPU has a branch."""
    opt_state, step = api(TX)
    traced = jax.jit(step).trace(PARAMS, opt_state, _grads())
    for platform, branches in {"cpu": True, "cuda": False, "tpu": False, "rocm": False}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        # A branch on the flag takes it as an integer; the choice of the platform itself is a constant.
        assert bool(re.search(r"convert .*\(tensor<i1>\) -> tensor<i32>", text)) is branches, platform


def test_an_exported_program_holds_the_forms_of_all_its_platforms(api):
    opt_state, step = api(TX)
    flat, treedef = jax.tree.flatten((PARAMS, opt_state, _grads()))
    run = jax.jit(lambda *flat: jax.tree.leaves(step(*jax.tree.unflatten(treedef, flat))))
    stored = jax.export.export(run, platforms=("cpu", "cuda", "tpu"))(*flat).serialize()
    again = jax.export.deserialize(stored)
    assert again.platforms == ("cpu", "cuda", "tpu")
    chex.assert_trees_all_equal(again.call(*flat), run(*flat))


@pytest.mark.usefixtures("platform")
def test_the_step_is_traced_once_on_every_platform(api):
    traces = []

    def counted(updates, state, params=None):
        traces.append(None)
        return TX.update(updates, state, params)

    opt_state, step = api(optax.GradientTransformation(TX.init, counted))
    jax.jit(step).lower(PARAMS, opt_state, _grads()).compile()
    assert len(traces) == 1


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("added", [pytest.param(0.0, marks=FULL), np.inf])
def test_derivatives_in_both_modes(api, added):
    """The derivatives of an applied step are those of optax, and of a skipped step those of the identity."""
    opt_state, step = api(TX)
    plain = TX if api is not APIS["max_norm"] else optax.chain(optax.clip_by_global_norm(1.0), TX)

    def ours(params, grads):
        grads = jax.tree.map(lambda g: g + added, grads)
        return sum(jnp.sum(x**3) for x in jax.tree.leaves(step(params, opt_state, grads)[0]))

    def theirs(params, grads):
        updates, _ = plain.update(grads, plain.init(PARAMS), params)
        params = optax.apply_updates(params, updates) if added == 0 else params
        return sum(jnp.sum(x**3) for x in jax.tree.leaves(params))

    # In reverse mode apply_if may return NaN (0 * inf) with respect to the gradients, as documented.
    argnums = (0,) if api is APIS["functional"] and added == np.inf else (0, 1)
    mine, reference = (jax.jit(jax.grad(f, argnums))(PARAMS, GRADS) for f in (ours, theirs))
    chex.assert_trees_all_close(mine, reference, rtol=1e-5, atol=1e-6)
    tangents = jax.tree.map(jnp.ones_like, (PARAMS, GRADS))
    mine, reference = (
        jax.jit(lambda *t, f=f: jax.jvp(f, t[:2], t[2:])[1])(PARAMS, GRADS, *tangents) for f in (ours, theirs)
    )
    np.testing.assert_allclose(mine, reference, rtol=1e-5)


@pytest.mark.usefixtures("platform")
def test_under_vmap_and_scan_each_step_is_gated_by_its_own_flag(api):
    opt_state, step = api(TX)
    grads = jax.tree.map(lambda *x: jnp.stack(x), _grads(), _grads(np.inf), _grads(0.5))

    def after(carry, grads):
        out = step(*carry, grads)
        return out, out

    each = jax.jit(jax.vmap(lambda g: step(PARAMS, opt_state, g)))(grads)
    for i, factor in enumerate((1.0, np.inf, 0.5)):
        one = jax.jit(step)(PARAMS, opt_state, _grads(factor))
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], each), one, rtol=1e-6)
    _, seen = jax.jit(lambda: jax.lax.scan(after, (PARAMS, opt_state), grads))()
    first, second = (jax.tree.map(lambda x, i=i: x[i], (seen[0], _inner(seen[1]))) for i in (0, 1))
    testing.assert_step_is_noop(first, second)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=FULL), AxisType.Explicit], ids=lambda k: k.name)
def test_nothing_loses_its_sharding(api, kind):
    """With and without `out_shardings`; a donated state is reused."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    params = {"w": jnp.ones((8, 16)), "b": jnp.ones(8)}
    placed = {"w": NamedSharding(mesh, P("data", "model")), "b": NamedSharding(mesh, P("model"))}
    params = jax.device_put(params, placed)
    with jax.set_mesh(mesh):
        opt_state, step = api(TX, params)
        grads = jax.tree.map(jnp.ones_like, params)
        given = jax.tree.map(lambda x: x.sharding, (params, opt_state))
        for options in ({}, {"out_shardings": given}):
            state = jax.tree.map(jnp.copy, (params, opt_state))
            run = jax.jit(step, donate_argnums=(0, 1), **options)
            out = run(*state, grads)
            for was, now in zip(jax.tree.leaves((params, opt_state)), jax.tree.leaves(out), strict=True):
                assert now.sharding.is_equivalent_to(was.sharding, now.ndim)
            assert all(x.is_deleted() for x in jax.tree.leaves(state[0]))
            program = hlo.compiled(step, params, opt_state, grads, **options)
            assert hlo.count(program, "all-gather", "all-to-all") == 0


@pytest.mark.usefixtures("platform")
def test_in_shard_map_the_axes_over_which_values_vary_are_kept(api):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    opt_state, step = api(TX)
    varying = jax.tree.map(lambda x: jnp.stack([x] * 8), (PARAMS, _inner(opt_state)))

    def local(varying, bad):
        (params, inner), here = jax.tree.map(lambda x: x[0], varying), jax.lax.axis_index("data") == 3
        state = opt_state._replace(inner_state=inner) if hasattr(opt_state, "inner_state") else inner
        grads = jax.tree.map(lambda g, p: jnp.where(here & bad, jnp.inf, g) + 0 * p, _grads(), params)
        params, state = step(params, state, grads)
        return jax.tree.map(lambda x: x[None], (params, _inner(state)))

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")))
    testing.assert_step_is_noop(varying, run(varying, True))  # on all eight, though one overflowed
    assert not np.array_equal(run(varying, False)[0]["w"], varying[0]["w"])


@pytest.mark.usefixtures("platform")
def test_apply_if_with_a_flag_that_varies_over_devices():
    """Each device decides independently, also about a value that is made inside and does not vary yet."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(finite):
        count, number = jmpscale.apply_if(finite[0], lambda count, n: (count + 1, n + 1), jnp.int32(0), 5)
        return count[None], number[None]

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    count, number = run(jnp.arange(8) > 3)
    assert count.tolist() == [0] * 4 + [1] * 4
    assert number.tolist() == [5] * 4 + [6] * 4


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_with_loss_scaling_trains_an_independent_model_on_each_device(max_norm):
    """The state is made inside, so the optimizer's step count and the scaler do not vary yet."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = jmpscale.with_loss_scaling(TX, jmpscale.dynamic(4.0), axis_name=(), max_norm=max_norm)

    def local(params, grads):
        updates, opt_state = tx.update(grads, tx.init(params), params)
        scale, count = opt_state.scaler.loss_scale, opt_state.inner_state[0].count
        return optax.apply_updates(params, updates), (scale[None], count[None])

    params, grads = jnp.ones((8, 2)), jnp.ones((8, 2)).at[3, 0].set(jnp.inf)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    after, (loss_scale, count) = run(params, grads)
    others = np.arange(8) != 3
    np.testing.assert_array_equal(after[3], params[3])
    assert (after[others] < 1).all()
    np.testing.assert_array_equal(loss_scale, np.where(others, 4.0, 2.0))
    np.testing.assert_array_equal(count, others)


@pytest.mark.usefixtures("platform")
def test_the_gate_keeps_every_memory_space(api):
    """An optimizer state in host memory has a scalar there, its step count. A select would move it to the device."""
    memory = getattr(jax, "memory", None)
    if memory is None or jax.device_put(jnp.ones(()), memory.Space.Host).sharding.memory_kind != "pinned_host":
        pytest.skip("this version of JAX does not move arrays to a memory space")
    host, device = memory.Space.Host, memory.Space.Device

    def update(grads, state, params=None):
        updates, state = TX.update(grads, jax.device_put(state, device), params)
        return updates, jax.device_put(state, host)

    offloaded = optax.GradientTransformation(lambda params: jax.device_put(TX.init(params), host), update)
    opt_state, step = api(offloaded)
    step, params = jax.jit(step), PARAMS
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(_inner(opt_state))]
    assert set(kinds) == {"pinned_host"}
    for factor in (1.0, np.inf):
        params, opt_state = step(params, opt_state, _grads(factor))
        assert [x.sharding.memory_kind for x in jax.tree.leaves(_inner(opt_state))] == kinds
    assert int(_inner(opt_state)[0].count) == 1


MIXED = (AxisType.Explicit, AxisType.Auto)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(
    ("types", "spec"),
    [((AxisType.Explicit,) * 2, P("data", "model")), (MIXED, P("data"))],
    ids=["explicit", "mixed"],
)
def test_under_vmap_on_a_mesh_with_explicit_axes(api, types, spec):
    """The batch is sharded along one axis, and the values inside along another."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    bad = np.ones((8, 4), np.float32)
    bad[3] = np.inf
    with jax.set_mesh(mesh):
        placed = NamedSharding(mesh, spec)
        params, grads = jax.device_put((np.ones((8, 4), np.float32), bad), placed)
        _, step = api(TX, jnp.ones(4))
        opt_state = jax.vmap(lambda w: api(TX, w)[0])(params)
        after, _ = jax.jit(jax.vmap(step))(params, opt_state, grads)
        assert jax.typeof(after) == jax.typeof(params)
        np.testing.assert_array_equal((np.asarray(after) == 1).all(1), np.arange(8) == 3)
        flags = jax.device_put(jnp.arange(8) > 3, NamedSharding(mesh, P("data")))
        count = jax.vmap(lambda flag, w: jmpscale.apply_if(flag, lambda w, n: (w + 1, n + 1), w, 3)[1])
        assert jax.jit(count)(flags, params).tolist() == [3] * 4 + [4] * 4


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_on_a_mesh_with_explicit_and_auto_axes(api, jitted):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=MIXED)
    with jax.set_mesh(mesh):
        params = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("data", "model")))
        opt_state, step = api(TX, params)
        step = jax.jit(step) if jitted else step
        for factor in (0.5, np.inf):
            after, new_state = step(params, opt_state, params * factor)
            assert jax.typeof(after) == jax.typeof(params)
            assert after.sharding.is_equivalent_to(params.sharding, 2)
            assert (np.asarray(after) == 1).all() == (factor == np.inf)
            assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, opt_state)


@pytest.mark.parametrize("tx", [STATELESS, TX], ids=["stateless", "with a state"])
def test_a_skipped_step_runs_only_in_the_default_form(platform, api, tx):
    """There its result is discarded, but a callback is called."""
    seen = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: seen.append(None))
        return tx.update(updates, state, params)

    opt_state, step = api(optax.GradientTransformation(tx.init, update))
    params, _ = jax.jit(step)(PARAMS, opt_state, _grads(np.inf))
    jax.effects_barrier()
    chex.assert_trees_all_equal(params, PARAMS)
    assert len(seen) == (0 if platform == "cpu" else 1)
    jax.jit(step)(PARAMS, opt_state, _grads())
    jax.effects_barrier()
    assert len(seen) == (1 if platform == "cpu" else 2)


@pytest.mark.usefixtures("platform")
def test_apply_if_keeps_unchanged_python_numbers_and_returns_changed_ones_as_arrays(variant):
    settings = {"inference": False, "heads": 3, "rate": 0.25, "name": "net", "fn": jnp.tanh, "dtype": jnp.float16}
    seen = {}

    def step(w, settings, count):
        seen.update(settings)
        return w + settings["rate"], settings | {"rate": float("0.25")}, count + 1  # another object of the same value

    def run(w, finite):
        w, after, count = jmpscale.apply_if(finite, step, w, settings, 5)
        assert all(after[name] is value for name, value in settings.items())
        return w, count

    for finite, expected in ((True, (1.25, 6)), (False, (1.0, 5))):
        w, count = variant(run)(jnp.float32(1.0), jnp.array(finite))
        assert (float(w), int(count)) == expected
    assert all(seen[name] is value for name, value in settings.items())


@pytest.mark.parametrize("changed", [1, 1.0, True, -0.0], ids=repr)
def test_apply_if_sees_that_an_equal_number_has_another_type_or_sign(changed):
    """0, 0.0, False and -0.0 are equal in Python, but differ in a program."""
    same_kind = type(changed) is float

    def run(finite):
        return jmpscale.apply_if(finite, lambda _: changed, 0.0)

    if not same_kind:
        with pytest.raises(TypeError, match=r"carry\[0\] was float32\[\] and is"):
            jax.jit(run)(True)
    else:
        assert np.signbit(jax.jit(run)(True)) == np.signbit(changed)
        assert jax.jit(run)(False).tobytes() == np.float32(0.0).tobytes()


def test_apply_if_is_a_python_if_outside_jit():
    """fn receives concrete arrays, and a skip does not call it."""
    calls = []

    def step(w):
        calls.append(type(w))
        return w + 1 if w.sum() > 0 else w  # impossible with a tracer

    w = jnp.ones(2)
    assert jmpscale.apply_if(jnp.array(False), step, w) is w
    assert calls == []
    chex.assert_trees_all_equal(jmpscale.apply_if(jnp.array(True), step, w), w + 1)


def test_eager_training_compiles_once():
    opt_state, step = _wrapper(TX, max_norm=1.0)
    params = PARAMS
    for _ in range(2):
        for factor in (1.0, np.inf):
            params, opt_state = step(params, opt_state, _grads(factor))
    with compilations.counted() as seen:
        for factor in (1.0, np.inf, 1.0):
            params, opt_state = step(params, opt_state, _grads(factor))
    assert not seen


def test_with_loss_scaling_does_not_call_inner_on_an_eager_skip():
    """So inner may be impossible to trace: outside jit the gate is a Python `if`."""
    calls = []

    def update(updates, state, params=None):
        calls.append(None)
        return (updates / 10 if float(jnp.max(updates)) > 10 else updates), state

    tx = jmpscale.with_loss_scaling(optax.GradientTransformation(lambda _: optax.EmptyState(), update))
    opt_state = tx.init(jnp.ones(2))
    for factor, expected in ((1.0, 1.0), (20.0, 2.0), (np.inf, -0.0), (np.nan, -0.0)):
        updates, opt_state = tx.update(jnp.ones(2) * factor, opt_state)
        testing.assert_step_is_noop(jnp.full(2, expected), updates)
    assert len(calls) == 2
    assert int(opt_state.scaler.skipped) == 2


@pytest.mark.usefixtures("platform")
def test_with_loss_scaling_takes_an_inner_state_with_leaves_that_are_no_arrays():
    def update(updates, state, params=None):
        return updates, state | {"count": state["count"] + 1}

    names = {"name": "inner", "fn": jnp.tanh, "size": 3}
    inner = optax.GradientTransformation(lambda _: names | {"count": jnp.int32(0)}, update)
    tx = jmpscale.with_loss_scaling(inner)

    def run(grads):
        updates, opt_state = tx.update(grads, tx.init(grads))
        assert all(opt_state.inner_state[name] is value for name, value in names.items())
        return updates, opt_state.inner_state["count"]

    for call in (run, jax.jit(run)):
        assert [int(call(jnp.ones(2) * factor)[1]) for factor in (1.0, np.inf)] == [1, 0]


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64], ids=lambda d: jnp.dtype(d).name
)
@pytest.mark.parametrize("max_norm", [pytest.param(0.1, marks=FULL), 2.0, 1e6])
def test_max_norm_clips_as_optax_does(dtype, max_norm):
    grads = jax.tree.map(lambda g: (g * (1 + 1j) if dtype == jnp.complex64 else g).astype(dtype), GRADS)
    tx = jmpscale.with_loss_scaling(optax.identity(), jmpscale.static(4.0), max_norm=max_norm)
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    # optax computes the norm of float16 gradients in float16.
    wide = jax.tree.map(lambda g: g.astype(jnp.float32) if dtype == jnp.float16 else g, grads)
    clip = optax.clip_by_global_norm(max_norm)
    expected, _ = jax.jit(clip.update)(wide, clip.init(wide))
    expected = jax.tree.map(lambda x: x.astype(dtype), expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, expected)
    tolerance = {jnp.float16: 1e-3, jnp.bfloat16: 1e-2}.get(dtype, 1e-6)
    chex.assert_trees_all_close(updates, expected, rtol=tolerance)
    if max_norm == 1e6:
        chex.assert_trees_all_equal(updates, grads)  # nothing is clipped, so no bit changes


@pytest.mark.usefixtures("platform")
def test_a_sum_of_squares_beyond_float32_counts_as_an_overflow():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic(2.0), max_norm=1.0)
    largest = jnp.array([1.8e19], jnp.float32)
    for grads, skipped in ((largest, 0), (largest * 1.1, 1)):
        _, state = jax.jit(tx.update)(grads, tx.init(grads))
        assert int(state.scaler.skipped) == skipped


@pytest.mark.usefixtures("platform", "x64")
def test_max_norm_is_computed_in_float64_if_a_leaf_has_that_dtype():
    tx = jmpscale.with_loss_scaling(optax.identity(), jmpscale.static(4.0), max_norm=1.0)
    grads = {"a": jnp.array([3e100], jnp.float64), "b": jnp.array([4.0], jnp.float32)}
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    assert int(state.scaler.skipped) == 0
    np.testing.assert_allclose(updates["a"], 1.0, rtol=1e-6)
    assert updates["b"].dtype == jnp.float32


def test_max_norm_is_that_of_all_devices():
    """Where JAX's types show it each part counts once; otherwise the axes of `norm_axis_name` hold parts."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = jmpscale.with_loss_scaling(optax.identity(), jmpscale.static(1.0), max_norm=1.0)
    sharded, whole = jnp.arange(1.0, 17.0), jnp.array([3.0])
    norm = np.sqrt(np.sum(np.arange(1.0, 17.0) ** 2) + 9)

    def local(sharded, whole):
        updates, _ = tx.update({"s": sharded, "w": whole}, tx.init(None))
        return updates["s"], updates["w"]

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P())))
    program = run.lower(sharded, whole).compile().as_text()
    assert hlo.count(program, "all-reduce") == 1
    np.testing.assert_allclose(run(sharded, whole)[0], sharded / norm, rtol=1e-6)
    np.testing.assert_allclose(run(sharded, whole)[1], whole / norm, rtol=1e-6)

    parts = sharded.reshape(8, 2)
    own_norm, norm_of_parts = np.linalg.norm(parts, axis=1, keepdims=True), np.linalg.norm(parts)
    for options, expected in (
        ({"axis_name": ()}, own_norm),
        ({"axis_name": "data"}, own_norm),
        ({"norm_axis_name": "data"}, norm_of_parts),
        ({"axis_name": (), "norm_axis_name": "data"}, norm_of_parts),
    ):
        tx = jmpscale.with_loss_scaling(optax.identity(), jmpscale.static(1.0), max_norm=1.0, **options)
        updates = jax.vmap(lambda g, tx=tx: tx.update(g, tx.init(None))[0], axis_name="data")(parts)
        np.testing.assert_allclose(updates, parts / expected, rtol=1e-6)


def test_disabled_with_max_norm_only_clips():
    tx = jmpscale.with_loss_scaling(optax.identity(), jmpscale.disabled(), max_norm=1.0)
    updates, _ = jax.jit(tx.update)(jnp.array([3.0, 4.0]), tx.init(None))
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)
    updates, _ = jax.jit(tx.update)(jnp.array([jnp.nan, 4.0]), tx.init(None))
    assert np.isnan(updates).any()


@pytest.mark.parametrize("max_norm", [0, -1.0, np.inf, np.nan])
def test_max_norm_must_be_positive_and_finite(max_norm):
    with pytest.raises(ValueError, match="max_norm must be"):
        jmpscale.with_loss_scaling(optax.identity(), max_norm=max_norm)


@pytest.mark.usefixtures("platform")
def test_line_searches_do_not_depend_on_the_scale():
    """By optax's convention `grad=` is the gradients again; `value` and `value_fn` are the unscaled loss."""

    def fn(p):
        return jnp.sum(100 * (p[1:] - p[:-1] ** 2) ** 2 + (1 - p[:-1]) ** 2)

    inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20))
    ends = []
    for scale in (1.0, 2.0**16):
        tx = jmpscale.with_loss_scaling(inner, jmpscale.static(scale))

        @jax.jit
        def descend(params, opt_state, tx=tx):
            value, grads = jmpscale.value_and_grad(fn)(opt_state, params)
            updates, opt_state = tx.update(grads, opt_state, params, value=value, grad=grads, value_fn=fn)
            return optax.apply_updates(params, updates), opt_state

        params = jnp.array([-1.2, 1.0, 1.0])
        opt_state = tx.init(params)
        for _ in range(20):
            params, opt_state = descend(params, opt_state)
        ends.append(params)
    chex.assert_trees_all_equal(*ends)
    assert fn(ends[0]) < 10


def test_a_transformation_that_changes_the_structure_of_its_state_is_refused():
    tx = jmpscale.with_loss_scaling(optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(1.0)))
    with pytest.raises(TypeError, match=r"inner must return its state with the same structure.*'norm'"):
        jax.jit(tx.update)(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_with_loss_scaling_survives_the_donation_of_its_scaler():
    scaler = jax.tree.map(jnp.asarray, jmpscale.dynamic())
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), scaler)
    jax.jit(lambda s: jmpscale.update(s, True), donate_argnums=0)(scaler)
    assert scaler.loss_scale.is_deleted()
    assert float(jmpscale.get_scaler(tx.init(jnp.ones(2))).loss_scale) == 2.0**16
