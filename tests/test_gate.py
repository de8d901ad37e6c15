"""The gate of both routes: on each platform the same bits, traced once, no sharding lost, Python values around it."""

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
SCALE = 2.0**10
SMALL_STATE, LARGE_STATE = optax.sgd(0.1), optax.adamw(0.1)


def _scaled(factor=1.0):
    return jax.tree.map(lambda g: g * SCALE * factor, GRADS)


def _functional(tx):
    def step(params, opt_state, grads):
        scaler = jmpscale.static(SCALE)
        grads, finite = jmpscale.unscale_and_check(scaler, grads)
        return jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)

    return tx.init(PARAMS), step


def _in_optax(tx, **options):
    tx = jmpscale.with_loss_scaling(tx, jmpscale.static(SCALE), **options)

    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return tx.init(PARAMS), step


ROUTES = {
    "functional": _functional,
    "in optax": _in_optax,
    "max_norm": functools.partial(_in_optax, max_norm=1.0),
}


# Inside optax without `max_norm` most is as with it, and test_optax.py has more on it.
@pytest.fixture(params=["functional", pytest.param("in optax", marks=FULL), "max_norm"])
def route(request):
    return ROUTES[request.param]


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(
    "tx", [pytest.param(SMALL_STATE, marks=FULL, id="small state"), pytest.param(LARGE_STATE, id="large state")]
)
def test_a_step_is_that_of_optax_and_a_skip_leaves_every_bit(route, tx):
    opt_state, step = route(tx)
    step = jax.jit(step)
    for bad in (np.inf, np.nan):
        skipped = step(PARAMS, opt_state, _scaled() | {"b": np.array([1.0, bad, 2.0], np.float32)})
        testing.assert_step_is_noop(PARAMS, skipped[0])
        testing.assert_step_is_noop(_inner(opt_state), _inner(skipped[1]))
    taken = step(PARAMS, opt_state, _scaled())
    clip = [optax.clip_by_global_norm(1.0)] if route is ROUTES["max_norm"] else []
    plain = optax.chain(*clip, tx)
    updates, _ = jax.jit(plain.update)(GRADS, plain.init(PARAMS), PARAMS)
    chex.assert_trees_all_close(taken[0], optax.apply_updates(PARAMS, updates), rtol=3e-7)


def _inner(opt_state):
    return opt_state.inner_state if hasattr(opt_state, "inner_state") else opt_state


def test_the_platform_that_a_program_is_lowered_for_decides(route):
    """A branch for CPU only, in one and the same trace."""
    opt_state, step = route(LARGE_STATE)
    traced = jax.jit(step).trace(PARAMS, opt_state, _scaled())
    for platform, branches in {"cpu": True, "cuda": False, "tpu": False, "rocm": False}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        # A branch on the flag takes it as an integer; the choice of the platform itself is a constant.
        assert bool(re.search(r"convert .*\(tensor<i1>\) -> tensor<i32>", text)) is branches, platform


def test_an_exported_program_holds_the_forms_of_all_its_platforms(route):
    opt_state, step = route(LARGE_STATE)
    flat, treedef = jax.tree.flatten((PARAMS, opt_state, _scaled()))
    run = jax.jit(lambda *flat: jax.tree.leaves(step(*jax.tree.unflatten(treedef, flat))))
    stored = jax.export.export(run, platforms=("cpu", "cuda", "tpu"))(*flat).serialize()
    again = jax.export.deserialize(stored)
    assert again.platforms == ("cpu", "cuda", "tpu")
    chex.assert_trees_all_equal(again.call(*flat), run(*flat))


@pytest.mark.usefixtures("platform")
def test_the_step_is_traced_once_on_every_platform(route):
    traces = []

    def counted(updates, state, params=None):
        traces.append(None)
        return LARGE_STATE.update(updates, state, params)

    opt_state, step = route(optax.GradientTransformation(LARGE_STATE.init, counted))
    jax.jit(step).lower(PARAMS, opt_state, _scaled()).compile()
    assert len(traces) == 1


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("added", [pytest.param(0.0, marks=FULL), np.inf])
def test_derivatives_in_both_modes(route, added):
    """Of a taken step they are those of optax, of a skipped one those of the identity."""
    opt_state, step = route(LARGE_STATE)
    plain = LARGE_STATE if route is not ROUTES["max_norm"] else optax.chain(optax.clip_by_global_norm(1.0), LARGE_STATE)

    def ours(params, grads):
        grads = jax.tree.map(lambda g: g * SCALE + added, grads)
        return sum(jnp.sum(x**3) for x in jax.tree.leaves(step(params, opt_state, grads)[0]))

    def theirs(params, grads):
        updates, _ = plain.update(grads, plain.init(PARAMS), params)
        params = optax.apply_updates(params, updates) if added == 0 else params
        return sum(jnp.sum(x**3) for x in jax.tree.leaves(params))

    wrong = (0,) if route is ROUTES["functional"] and added == np.inf else (0, 1)  # JAX's own NaN, as documented
    mine, reference = (jax.jit(jax.grad(f, wrong))(PARAMS, GRADS) for f in (ours, theirs))
    chex.assert_trees_all_close(mine, reference, rtol=1e-5, atol=1e-6)
    tangents = jax.tree.map(jnp.ones_like, (PARAMS, GRADS))
    mine, reference = (
        jax.jit(lambda *t, f=f: jax.jvp(f, t[:2], t[2:])[1])(PARAMS, GRADS, *tangents) for f in (ours, theirs)
    )
    np.testing.assert_allclose(mine, reference, rtol=1e-5)


@pytest.mark.usefixtures("platform")
def test_under_vmap_and_scan_each_takes_its_own(route):
    opt_state, step = route(LARGE_STATE)
    grads = jax.tree.map(lambda *x: jnp.stack(x), _scaled(), _scaled(np.inf), _scaled(0.5))

    def after(carry, grads):
        out = step(*carry, grads)
        return out, out

    each = jax.jit(jax.vmap(lambda g: step(PARAMS, opt_state, g)))(grads)
    for i, factor in enumerate((1.0, np.inf, 0.5)):
        one = jax.jit(step)(PARAMS, opt_state, _scaled(factor))
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], each), one, rtol=1e-6)
    _, seen = jax.jit(lambda: jax.lax.scan(after, (PARAMS, opt_state), grads))()
    first, second = (jax.tree.map(lambda x, i=i: x[i], (seen[0], _inner(seen[1]))) for i in (0, 1))
    testing.assert_step_is_noop(first, second)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=FULL), AxisType.Explicit], ids=lambda k: k.name)
def test_nothing_loses_its_sharding(route, kind):
    """Neither with `out_shardings` nor without; a donated state is reused."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    params = {"w": jnp.ones((8, 16)), "b": jnp.ones(8)}
    placed = {"w": NamedSharding(mesh, P("data", "model")), "b": NamedSharding(mesh, P("model"))}
    params = jax.device_put(params, placed)
    with jax.set_mesh(mesh):
        opt_state, step = route(LARGE_STATE)
        inner = LARGE_STATE.init(params)
        moments = {name: jax.device_put(getattr(inner[0], name), placed) for name in ("mu", "nu")}
        inner = (inner[0]._replace(**moments), *inner[1:])
        opt_state = opt_state._replace(inner_state=inner) if hasattr(opt_state, "inner_state") else inner
        grads = jax.tree.map(lambda x: x * SCALE, params)
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
def test_in_shard_map_the_axes_over_which_values_vary_are_kept(route):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    opt_state, step = route(LARGE_STATE)
    varying = jax.tree.map(lambda x: jnp.stack([x] * 8), (PARAMS, _inner(opt_state)))

    def local(varying, bad):
        (params, inner), here = jax.tree.map(lambda x: x[0], varying), jax.lax.axis_index("data") == 3
        state = opt_state._replace(inner_state=inner) if hasattr(opt_state, "inner_state") else inner
        grads = jax.tree.map(lambda g, p: jnp.where(here & bad, jnp.inf, g) + 0 * p, _scaled(), params)
        params, state = step(params, state, grads)
        return jax.tree.map(lambda x: x[None], (params, _inner(state)))

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")))
    testing.assert_step_is_noop(varying, run(varying, True))  # on all eight, though one overflowed
    assert not np.array_equal(run(varying, False)[0]["w"], varying[0]["w"])


@pytest.mark.usefixtures("platform")
def test_a_skipped_step_may_run_and_is_thrown_away(platform):
    """What the documentation says of the two forms: a callback in a skipped step is reached off CPU only."""
    seen = []

    def noisy(w):
        jax.debug.callback(lambda: seen.append(None))
        return w + 1

    w = jax.jit(lambda finite: jmpscale.apply_if(finite, noisy, jnp.zeros(2)))(False)
    jax.effects_barrier()
    chex.assert_trees_all_equal(w, jnp.zeros(2))
    assert len(seen) == (0 if platform == "on CPU" else 1)


@pytest.mark.usefixtures("platform")
def test_python_numbers_that_stay_are_the_same_objects_and_others_become_arrays(variant):
    settings = {"inference": False, "heads": 3, "rate": 0.25, "name": "net", "fn": jnp.tanh, "dtype": jnp.float16}
    seen = {}

    def step(w, settings, count):
        seen.update(settings)
        return w + settings["rate"], settings | {"rate": float("0.25")}, count + 1  # another object that says the same

    def run(w, finite):
        w, after, count = jmpscale.apply_if(finite, step, w, settings, 5)
        assert all(after[name] is value for name, value in settings.items())
        return w, count

    for finite, expected in ((True, (1.25, 6)), (False, (1.0, 5))):
        w, count = variant(run)(jnp.float32(1.0), jnp.array(finite))
        assert (float(w), int(count)) == expected
    assert all(seen[name] is value for name, value in settings.items())


@pytest.mark.parametrize("changed", [1, 1.0, True, -0.0], ids=repr)
def test_a_number_that_is_equal_but_of_other_bits_counts_as_changed(changed):
    """0, 0.0, False and -0.0 are equal in Python, and four different things in a program."""
    same_kind = type(changed) is float

    def run(finite):
        return jmpscale.apply_if(finite, lambda _: changed, 0.0)

    if not same_kind:
        with pytest.raises(TypeError, match="went in as float32"):
            jax.jit(run)(True)
    else:
        assert np.signbit(jax.jit(run)(True)) == np.signbit(changed)
        assert jax.jit(run)(False).tobytes() == np.float32(0.0).tobytes()


def test_outside_jit_it_is_plain_python():
    """Nothing is compiled but what the step itself compiles, and a skip calls nothing."""
    calls = []

    def step(w):
        calls.append(type(w))
        return w + 1 if w.sum() > 0 else w  # no tracer could do this

    w = jnp.ones(2)
    assert jmpscale.apply_if(jnp.array(False), step, w) is w
    assert calls == []
    chex.assert_trees_all_equal(jmpscale.apply_if(jnp.array(True), step, w), w + 1)


def test_eager_training_compiles_once():
    opt_state, step = _in_optax(LARGE_STATE, max_norm=1.0)
    params = PARAMS
    for _ in range(2):  # taken, and skipped
        for factor in (1.0, np.inf):
            params, opt_state = step(params, opt_state, _scaled(factor))
    with compilations.counted() as seen:
        for factor in (1.0, np.inf, 1.0):
            params, opt_state = step(params, opt_state, _scaled(factor))
    assert not seen


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64], ids=lambda d: jnp.dtype(d).name
)
@pytest.mark.parametrize("max_norm", [pytest.param(0.1, marks=FULL), 2.0, 1e6])
def test_max_norm_clips_as_optax_does(dtype, max_norm):
    grads = jax.tree.map(lambda g: (g * (1 + 1j) if dtype == jnp.complex64 else g).astype(dtype), GRADS)
    wide = jax.tree.map(lambda g: g.astype(jnp.float32) if dtype == jnp.float16 else g, grads)
    tx = jmpscale.with_loss_scaling(optax.identity(), jmpscale.static(1.0), max_norm=max_norm)
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    clip = optax.clip_by_global_norm(max_norm)
    expected, _ = jax.jit(clip.update)(wide, clip.init(wide))
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, expected)
    chex.assert_trees_all_close(updates, expected, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6)
    if max_norm == 1e6:
        chex.assert_trees_all_equal(updates, wide)  # what is not clipped is not touched


@pytest.mark.usefixtures("platform")
def test_a_sum_of_squares_beyond_float32_counts_as_an_overflow():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic(2.0), max_norm=1.0)
    largest = jnp.array([1.8e19], jnp.float32)
    for grads, skipped in ((largest, 0), (largest * 1.1, 1)):
        _, state = jax.jit(tx.update)(grads * 2, tx.init(grads))
        assert int(state.scaler.skipped) == skipped


@pytest.mark.usefixtures("platform", "x64")
def test_max_norm_is_taken_in_float64_where_a_leaf_is():
    tx = jmpscale.with_loss_scaling(optax.identity(), jmpscale.static(4.0), max_norm=1.0)
    grads = {"a": jnp.array([3e100], jnp.float64), "b": jnp.array([4.0], jnp.float32)}
    updates, state = jax.jit(tx.update)(jax.tree.map(lambda g: g * 4, grads), tx.init(grads))
    assert int(state.scaler.skipped) == 0
    np.testing.assert_allclose(updates["a"], 1.0, rtol=1e-6)
    assert updates["b"].dtype == jnp.float32


def test_max_norm_is_that_of_all_devices():
    """Where the types tell, each part counts once; under pmap the axes that are named hold parts."""
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

    for axis_name, expected in (("data", norm_of_parts := np.sqrt(np.sum(np.arange(1.0, 17.0) ** 2))), ((), None)):
        tx = jmpscale.with_loss_scaling(optax.identity(), jmpscale.static(1.0), max_norm=1.0, axis_name=axis_name)
        parts = sharded.reshape(8, 2)
        updates = jax.vmap(lambda g, tx=tx: tx.update(g, tx.init(None))[0], axis_name="data")(parts)
        own = np.linalg.norm(parts, axis=1, keepdims=True) if expected is None else norm_of_parts
        np.testing.assert_allclose(updates, parts / own, rtol=1e-6)


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
def test_line_searches_see_unscaled_gradients():
    """By optax's convention `grad=` is the tree of gradients once more; `value_fn` and `value` are the user's own."""

    def fn(p):
        return jnp.sum(100 * (p[1:] - p[:-1] ** 2) ** 2 + (1 - p[:-1]) ** 2)

    inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20))
    ends = []
    for scale in (1.0, 2.0**16):
        tx = jmpscale.with_loss_scaling(inner, jmpscale.static(scale))

        @jax.jit
        def descend(params, opt_state, tx=tx):
            value, grads = jmpscale.scaled_value_and_grad(fn)(opt_state, params)
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


def test_a_donated_scaler_may_be_gone():
    scaler = jmpscale.dynamic()
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), scaler)
    jax.jit(lambda s: jmpscale.update(s, True), donate_argnums=0)(scaler)
    assert scaler.loss_scale.is_deleted()
    assert float(jmpscale.get_scaler(tx.init(jnp.ones(2))).loss_scale) == 2.0**16
