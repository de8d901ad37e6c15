"""An overflow in one shard skips the step on all devices, under every transformation and partition."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import assert_replicated

from bits import assert_equal_bits
from compiling import FAST, count_compilations
from meshes import make_mesh, require_devices
from tables import names, rows

AXES = ("data", "model")
jit = functools.partial(jax.jit, **FAST)
pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning"),
    # Most of these programs take one step.
    pytest.mark.filterwarnings("ignore:the (scaler|optimizer state) is a constant"),
]


def put(tree, mesh, specs):
    """Places arrays on a mesh; `specs` is a prefix of the tree."""

    def place(spec, tree):
        return jax.device_put(tree, NamedSharding(mesh, spec))

    return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, P))


def pmap(fn, axis_name="devices", **options):
    if not hasattr(jax, "pmap"):
        pytest.skip("this version of JAX has no pmap")
    require_devices(8)
    return jax.pmap(fn, axis_name=axis_name, **options)


def untyped(fn, in_specs, out_specs, mesh=None):
    """Maps over the devices without the types that show which values differ between devices."""
    mesh = make_mesh() if mesh is None else mesh
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


# Each function returns the results of one device, under each transformation

GRADS = {
    "a": np.linspace(1, 2, 32, dtype=np.float16).reshape(8, 4),
    "b": np.linspace(-1, 1, 8, dtype=np.float32),
    "c": np.linspace(2, 3, 16, dtype=np.float32).reshape(8, 2),
    "d": np.linspace(1, 9, 32).astype(ml_dtypes.bfloat16).reshape(8, 4),
    "e": np.linspace(3, 4, 8, dtype=np.float32),
    "empty": np.zeros((8, 0), np.float32),
}
SPECS = {"a": P(*AXES), "b": P("data"), "c": P("model"), "d": P(AXES), "e": P(), "empty": P("data")}
ROWS = dict.fromkeys(GRADS, P("data"))
WHOLE = np.float32([3, 4])  # equal on all devices, such as averaged gradients
LOSS = np.linspace(0, 1, 8, dtype=np.float32)  # one value on each device
SCALE = 2.0**4


def _case(whole=WHOLE, loss=LOSS, **faults):
    """Returns the inputs with a value in place of one element of each of the named leaves."""
    grads = {name: x.copy() for name, x in GRADS.items()}
    for name, (index, value) in faults.items():
        grads[name][index] = value
    return grads, whole, loss


CASES = {
    "finite": _case(),
    "inf on the first device": _case(a=((0, 0), np.inf)),
    "nan on one device": _case(c=((5, 1), np.nan), whole=np.float32([3, np.nan])),
    "-inf on the last device": _case(d=((7, 3), -np.inf)),
    "inf on one device, a loss of nan on another": _case(
        b=(3, np.inf), whole=np.float32([np.inf, 4]), loss=np.where(np.arange(8) == 6, np.float32(np.nan), LOSS)
    ),
}


def update_wrapped(grads, loss=None, **options):
    """Returns the updates and the state after the first step of `with_loss_scaling`."""
    tx = jmpscale.with_loss_scaling(optax.trace(0.9), jmpscale.dynamic(SCALE, growth_interval=1), **options)
    return tx.update(grads, tx.init(grads), value=loss)


def call_all(grads, whole, loss, *, axis_name=None, report_axis_name=None, wrapper_options=None):
    """Calls each function; returns the results that are equal on all devices, and the sharded results."""
    scaler = jmpscale.dynamic(SCALE, growth_interval=1)
    finite_here = jmpscale.all_finite(grads, axis_name=())
    unscaled, finite = jmpscale.unscale_and_check(scaler, grads, axis_name=axis_name)

    def descend(params):
        return jax.tree.map(jnp.subtract, params, unscaled)

    def wrapped(grads, **options):
        updates, state = update_wrapped(grads, loss, **options)
        return (state.scaler, state.grad_norm), (updates, state.inner_state)

    wrapper_options = wrapper_options or {"axis_name": axis_name}
    return {
        "all_finite": (jmpscale.all_finite(grads, axis_name=axis_name), ()),
        "unscale_and_check": (finite, unscaled),
        "apply_if": ((), jmpscale.apply_if(finite, descend, jax.tree.map(jnp.ones_like, unscaled))),
        "update": (jmpscale.update(scaler, finite_here, axis_name=axis_name), ()),
        "update, loss": (jmpscale.update(scaler, finite_here, loss=loss, axis_name=axis_name), ()),
        "grad_report": (jmpscale.grad_report(grads, scaler=scaler, axis_name=report_axis_name or axis_name), ()),
        "with_loss_scaling": wrapped(unscaled, **wrapper_options),
        "with_loss_scaling, max_norm": wrapped(unscaled, max_norm=1.0, **wrapper_options),
        "with_loss_scaling, max_norm, averaged": (wrapped({"w": whole}, max_norm=1.0, axis_name=axis_name), ()),
    }


@functools.cache
def _shapes():
    return jax.eval_shape(call_all, *CASES["finite"])


def _under_jit(axis_type):
    mesh = make_mesh(axis_type)
    jitted = jit(call_all)

    def run(*args):
        with jax.set_mesh(mesh):
            return jitted(*put(args, mesh, (SPECS, P(), P(AXES))))

    return run


def _under_shard_map(specs, check_vma=True, **options):
    def spec_of(path, _):
        return specs[path[-1].key]

    out_specs = {
        name: (P(), jax.tree_util.tree_map_with_path(spec_of, sharded)) for name, (_, sharded) in _shapes().items()
    }
    fn = functools.partial(call_all, **options)
    in_specs = (specs, P(), P(AXES))
    return jit(jax.shard_map(fn, mesh=make_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


def _over_rows(mapped, axis_name, shape=(8,)):
    """Maps over the rows of the gradients and of the loss, of which each device holds one."""
    options = {"axis_name": axis_name, "wrapper_options": {"norm_axis_name": axis_name}}
    mapped = mapped(functools.partial(call_all, **options))

    def run(grads, whole, loss):
        grads, loss = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), (grads, loss))
        return {name: join(*out) for name, out in mapped(grads, whole, loss).items()}

    def join(equal, sharded):
        equal, sharded = jax.tree.map(lambda x: np.asarray(x).reshape(8, *x.shape[len(shape) :]), (equal, sharded))
        for x in jax.tree.leaves(equal):
            np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape))
        return jax.tree.map(lambda x: x[0], equal), sharded

    return run


def _vmap_twice(fn):
    inner = jax.vmap(fn, (0, None, 0), axis_name="inner")
    return jit(jax.vmap(inner, (0, None, 0), axis_name="outer"))


TRANSFORMATIONS = {
    "jit, Auto": lambda: _under_jit(AxisType.Auto),
    "jit, Explicit": lambda: _under_jit(AxisType.Explicit),
    # Types show both axes; norm_axis_name repeats one of them.
    "shard_map": lambda: _under_shard_map(SPECS, wrapper_options={"norm_axis_name": "model"}),
    # Gradients are sharded along one axis, and equal along the other.
    "check_vma=False": lambda: _under_shard_map(
        ROWS,
        check_vma=False,
        axis_name=AXES,
        report_axis_name="data",
        wrapper_options={"axis_name": AXES, "norm_axis_name": "data"},
    ),
    "pmap": lambda: _over_rows(functools.partial(pmap, in_axes=(0, None, 0)), "devices"),
    "vmap in vmap": lambda: _over_rows(_vmap_twice, ["inner", "outer"], (4, 2)),
}


@functools.cache
def _results_on_one_device():
    run = jit(call_all)
    return {case: run(*args) for case, args in CASES.items()}


@pytest.mark.parametrize("transformation", names(TRANSFORMATIONS, default=[]))
def test_functions_return_the_results_of_one_device(transformation):
    run = TRANSFORMATIONS[transformation]()
    for case, args in CASES.items():
        results = run(*args)
        assert_replicated({name: equal for name, (equal, _) in results.items()})
        chex.assert_trees_all_close(results, _results_on_one_device()[case], rtol=1e-6)


@pytest.mark.full
def test_one_device_detects_overflow():
    """The results on multiple devices are compared with these results."""
    results = _results_on_one_device().values()
    assert [bool(x["all_finite"][0]) for x in results] == [True, False, False, False, False]
    for function in ("update, loss", "with_loss_scaling"):
        scalers = [jmpscale.get_scaler(x[function]) for x in results]
        assert [float(scaler.loss_scale) for scaler in scalers] == [32, 8, 8, 8, 16]
        assert [int(scaler.last_skip_reason) for scaler in scalers] == [0, 1, 1, 1, 2]


# axis_name selects the devices that decide together


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_finite_reduces_over_axis_name(check_vma):
    """Device 5, counted along both axes, holds an infinity."""
    everywhere = [*range(8)]
    expected = {
        (): [5],
        "data": [1, 3, 5, 7],
        ("model",): [4, 5],
        AXES: everywhere,
        ("model", "data"): everywhere,
        frozenset(AXES): everywhere,
    }

    def local(x):
        summed = jax.lax.psum(x, AXES)  # equal on all devices already
        flags = [jmpscale.all_finite(x, axis_name=names) for names in expected]
        flags += [jmpscale.all_finite(summed, axis_name=names) for names in ("data", AXES)]
        return [jnp.zeros_like(x, bool) | flag for flag in flags]

    x = np.where(np.arange(8) == 5, np.float32(np.inf), 1)
    fn = jax.shard_map(local, mesh=make_mesh(), in_specs=P(AXES), out_specs=P(AXES), check_vma=check_vma)
    overflowed = [np.flatnonzero(~flag).tolist() for flag in jax.jit(fn)(x)]
    assert overflowed == [*expected.values(), everywhere, everywhere]


@pytest.mark.guards
def test_missing_axis_name_warns_of_the_axes_that_are_not_named():
    step = untyped(lambda grads: update_wrapped(grads, norm_axis_name="data")[0], P(AXES), P())
    with pytest.warns(
        UserWarning, match=r"along the mapped axes \('model',\) JAX's types .* Pass axis_name=\('model',\)"
    ):
        jax.eval_shape(step, np.ones(8, np.float32))


MAPPED = {  # maps over the losses of eight devices, and the axes that are named
    "check_vma=False": (lambda fn: untyped(fn, P(AXES), P()), [(), "data", AXES]),
    "pmap": (lambda fn: pmap(fn), [(), "devices"]),
    "vmap": (lambda fn: jax.vmap(fn, axis_name="devices"), [(), "devices"]),
}


@pytest.mark.parametrize("transformation", names(MAPPED, default={"check_vma=False"}))
def test_update_ignores_the_loss_if_an_axis_is_missing(transformation):
    """The gradients overflow on all devices, and the loss is NaN on one device, where the scale would diverge."""
    if transformation == "pmap" and jax.__version_info__ < (0, 10):
        pytest.skip("in this version of JAX pmap does not show its axis")
    map_, axis_names = MAPPED[transformation]
    grads, loss = np.float32([np.inf]), np.where(np.arange(8) == 5, np.float32(np.nan), 1)

    def local(loss):
        updated = [jmpscale.update(jmpscale.dynamic(), False, loss=loss, axis_name=name) for name in axis_names]
        return updated, [update_wrapped(grads, loss, axis_name=name)[1].scaler for name in axis_names]

    results = map_(local)(loss)
    assert_replicated(results)
    for scalers in results:
        reasons = [jmpscale.SkipReason(np.ravel(scaler.last_skip_reason)[0]).name for scaler in scalers]
        assert reasons == ["GRADIENTS"] * (len(axis_names) - 1) + ["LOSS"]
        assert all(np.ptp(scaler.last_skip_reason) == 0 for scaler in scalers)


@pytest.mark.full
def test_empty_axis_name_trains_one_model_on_each_device():
    """Under shard_map the initial scaler does not vary; the results equal the results under vmap."""

    def local(grads, loss):
        return update_wrapped(grads, loss, max_norm=1.0, axis_name=())

    def one(grads, loss):
        return jax.tree.map(lambda x: x[None], local(grads[0], loss[0]))

    grads = np.arange(16, dtype=np.float32).reshape(8, 2)
    grads[3, 1] = np.inf
    args = grads, np.where(np.arange(8) == 3, np.float32(np.nan), 1)
    typed = jax.shard_map(one, mesh=make_mesh(data=8), in_specs=P("data"), out_specs=P("data"))
    expected, results = jax.jit(jax.vmap(local))(*args), jax.jit(typed)(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), results, expected)
    assert np.flatnonzero(results[1].scaler.total_skips).tolist() == [3]


# Other partitions give the same decisions


def test_all_finite_under_vmap_in_shard_map_tests_each_row():
    """Each row has a flag of its own, combined over the devices."""
    x = np.ones((8, 3), np.float32)
    x[5, 1] = np.inf
    options = {"mesh": make_mesh(data=8), "in_specs": P("data"), "out_specs": P()}
    inside = jax.shard_map(jax.vmap(jmpscale.all_finite, 1, axis_name="rows"), **options)
    outside = jax.vmap(jax.shard_map(jmpscale.all_finite, **options), 1, axis_name="rows")
    for fn in (inside, outside):
        assert jax.jit(fn)(x).tolist() == [True, False, True]


def test_functions_under_shard_map_over_one_axis_decide_together():
    """The gradients vary over the mapped axis, and the compiler partitions them along the other."""
    mesh = make_mesh()
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic(4.0))

    def step(grads):
        updates, state = tx.update(grads, tx.init(None))
        return updates, (state.scaler, jmpscale.update(jmpscale.dynamic(4.0), jmpscale.all_finite(grads)))

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P()), axis_names={"data"}))
    finite = np.ones((8, 8), np.float32)
    overflow = np.where(np.arange(64).reshape(8, 8) == 28, np.float32(np.inf), finite)
    for grads, update, scale in ((finite, -1.0, 4.0), (overflow, -0.0, 2.0)):
        with jax.set_mesh(mesh):
            updates, scalers = step(put(grads, mesh, P(*AXES)))
        assert_equal_bits(np.full_like(grads, update), updates)
        assert_replicated(scalers)
        assert [scaler.loss_scale for scaler in scalers] == [scale] * 2


def test_all_finite_accepts_an_uneven_partition():
    sharding = NamedSharding(make_mesh(data=8), P("data"))
    check = jax.jit(lambda x: jmpscale.all_finite(jax.lax.with_sharding_constraint(x * 2, sharding)))
    assert check(np.ones(10, np.float32))
    for place in range(10):
        assert not check(np.where(np.arange(10) == place, np.float32(np.nan), 1))


# Training equals training on one device

BATCH, WIDTH, HIDDEN = 16, 16, 32
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((2, BATCH, WIDTH)).astype(np.float32)
PARAMS = {
    "w1": (rng.standard_normal((WIDTH, HIDDEN)) / 4).astype(np.float32),
    "w2": (rng.standard_normal((HIDDEN, WIDTH)) / 4).astype(np.float32),
}
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
# Added to the gradient of the hidden layer, in a backward pass whose loss is finite.
FAULTS = np.zeros((8, BATCH, HIDDEN), np.float32)
FAULTS[1, 0, 0], FAULTS[3, 8, 16], FAULTS[4, -1, -1], FAULTS[6, 2, 31] = np.inf, np.nan, -np.inf, np.inf
SCALES = [2.0**n for n in (12, 11, 11, 10, 9, 9, 8, 8)]


@jax.custom_vjp
def _add_to_gradient(x, fault):
    return x


_add_to_gradient.defvjp(lambda x, fault: (x, fault), lambda fault, g: (g + fault, jnp.zeros_like(fault)))


def _network_loss(params, x, y, fault):
    return jnp.sum((_add_to_gradient(jnp.tanh(x @ params["w1"]), fault) @ params["w2"] - y) ** 2) / Y.size


def _functional(loss_fn, axis_name=None, reduce=lambda grads: grads, gather=lambda updates: updates):
    def step(carry, x, y, fault):
        params, opt_state, scaler = carry
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, x, y, fault)
        grads = reduce(grads)
        finite = jmpscale.all_finite(grads, axis_name=axis_name)

        def descend(params, opt_state):
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            return optax.apply_updates(params, gather(updates)), opt_state

        params, opt_state = jmpscale.apply_if(finite, descend, params, opt_state)
        return params, opt_state, jmpscale.update(scaler, finite, loss=loss, axis_name=axis_name)

    return step


def _wrapper(loss_fn, axis_name=None, reduce=lambda grads: grads, gather=lambda updates: updates):
    tx = jmpscale.with_loss_scaling(OPTIMIZER, axis_name=axis_name)

    def step(carry, x, y, fault):
        params, inner_state, scaler = carry
        opt_state = tx.init(params)._replace(scaler=scaler, inner_state=inner_state)
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, x, y, fault)
        updates, opt_state = tx.update(reduce(grads), opt_state, params, value=loss)
        return optax.apply_updates(params, gather(updates)), opt_state.inner_state, opt_state.scaler

    return step


def _first_carry():
    return PARAMS, OPTIMIZER.init(PARAMS), jmpscale.dynamic(2.0**12, growth_interval=2)


def _carry_specs(specs, opt_specs=None):
    opt_specs = optax.tree.map_params(
        OPTIMIZER, lambda _, spec: spec, OPTIMIZER.init(PARAMS), opt_specs or specs, transform_non_params=lambda _: P()
    )
    return specs, opt_specs, P()


@functools.cache
def _states_on_one_device():
    step, carry, states = jit(_functional(_network_loss)), _first_carry(), []
    for fault in FAULTS:
        carry = step(carry, X, Y, fault)
        states.append(jax.tree.map(np.asarray, carry))
    assert [state[2].loss_scale for state in states] == SCALES
    return states


def _assert_equal_states(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours[2], theirs[2])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), ours[:2], theirs[:2])


def _check_training(step, mesh, specs, data_specs):
    jitted = jit(step, donate_argnums=0)
    with jax.set_mesh(mesh):
        carry = put(_first_carry(), mesh, specs)
        placed = jax.tree.map(lambda x: (x.sharding, x.ndim), carry)
        for number, (fault, expected) in enumerate(zip(FAULTS, _states_on_one_device(), strict=True)):
            before = jax.tree.map(np.asarray, carry[:2]) if number else carry
            with count_compilations() as compilations:
                carry = jitted(carry, *put((X, Y, fault), mesh, data_specs))
            assert len(compilations) == (number == 0)
            if not number:  # before the state is read for the first time, so nothing else refers to its memory
                assert all(x.is_deleted() for x in jax.tree.leaves(before))
            assert_replicated(carry[2])
            _assert_equal_states(carry, expected)
            if not np.isfinite(fault).all():
                assert_equal_bits(before, carry[:2])
    assert jax.tree.all(jax.tree.map(lambda x, was: x.sharding.is_equivalent_to(*was), carry, placed))


def _gather(w, axis_name, axis):
    return jax.lax.all_gather(w, axis_name, axis=axis, tiled=True)


def _fsdp_loss(params, *data):
    return _network_loss({name: _gather(w, "data", 0) for name, w in params.items()}, *data)


def _fsdp_tensor_parallel_loss(params, x, y, fault):
    w1, w2 = _gather(params["w1"], "data", 0), _gather(params["w2"], "data", 1)
    partial = _add_to_gradient(jnp.tanh(x @ w1), fault) @ w2
    return jnp.sum((jax.lax.psum(partial, "model") - y) ** 2) / Y.size


APIS = {"functional": _functional, "with_loss_scaling": _wrapper}
DATA = (P("data"),) * 3  # the specs of a batch and of its faults
SUM = functools.partial(jax.lax.psum, axis_name="data")
STYLES = {  # the loss on each device, the mesh, the specs of the parameters and of the data, and the options of a step
    "FSDP and tensor parallel": (
        _fsdp_tensor_parallel_loss,
        {"data": 4, "model": 2},
        {"w1": P("data", "model"), "w2": P("model", "data")},
        (P("data"), P("data"), P("data", "model")),
        {},
    ),
    "data parallel, check_vma=False": (
        _network_loss,
        {"data": 8},
        {"w1": P(), "w2": P()},
        DATA,
        {"axis_name": "data", "reduce": SUM},
    ),
    "FSDP, check_vma=False": (_fsdp_loss, {"data": 8}, {"w1": P("data"), "w2": P("data")}, DATA, {"axis_name": "data"}),
}
TRAINING = {f"{style}, {api}": (style, api) for style in STYLES for api in APIS}


# test_random_programs.py trains under jit on Auto and on Explicit axes.
@pytest.mark.parametrize("row", rows(TRAINING, default={"FSDP and tensor parallel, with_loss_scaling"}))
def test_training_under_shard_map_equals_one_device(row):
    style, api = row
    loss_fn, shape, specs, data_specs, options = STYLES[style]
    mesh, specs = make_mesh(**shape), _carry_specs(specs)
    step, check_vma = APIS[api](loss_fn, **options), "check_vma" not in style
    in_specs = (specs, *data_specs)
    step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=check_vma)
    _check_training(step, mesh, specs, data_specs)


@pytest.mark.full
@pytest.mark.parametrize("api", APIS)
def test_training_zero_1_equals_one_device(api):
    """Parameters and gradients are replicated, and the optimizer state is sharded."""

    def gather(updates):
        assert {jax.typeof(x).sharding.spec[0] for x in jax.tree.leaves(updates)} == {"data"}
        return jax.tree.map(lambda x: jax.sharding.reshard(x, P(None, None)), updates)

    mesh = make_mesh(AxisType.Explicit, data=8)
    specs = _carry_specs({"w1": P(), "w2": P()}, {"w1": P("data"), "w2": P("data")})
    _check_training(APIS[api](_network_loss, gather=gather), mesh, specs, DATA)


@pytest.mark.parametrize(
    ("api", "check_vma"),
    [("apply_if", True), ("with_loss_scaling", False)],
    ids=["apply_if", "with_loss_scaling, check_vma=False"],
)
def test_collective_in_the_step_does_not_deadlock(api, check_vma, platform):
    """In the form for CPU a skipped step does not reach the collective, on any device."""
    axis_name = None if check_vma else "data"

    def normalize(grads):
        return grads / jnp.sqrt(jax.lax.psum(jnp.sum(grads**2), "data"))

    inner = optax.stateless(lambda updates, _: normalize(updates))
    tx = jmpscale.with_loss_scaling(inner, jmpscale.dynamic(4.0), axis_name=axis_name)

    def step(grads):
        if api == "with_loss_scaling":
            updates, state = tx.update(grads, tx.init(grads))
            return updates, state.scaler
        finite = jmpscale.all_finite(grads, axis_name=axis_name)
        updates = jmpscale.apply_if(finite, lambda _: normalize(grads), jnp.zeros_like(grads))
        return updates, jmpscale.update(jmpscale.dynamic(4.0), finite)

    mapped = jax.shard_map(
        step, mesh=make_mesh(data=8), in_specs=P("data"), out_specs=(P("data"), P()), check_vma=check_vma
    )
    jitted = jax.jit(mapped)
    np.testing.assert_allclose(jitted(np.full(8, 4, np.float32))[0], 8**-0.5, rtol=1e-6)
    for device in (0, 3, 7):
        updates, scaler = jitted(np.where(np.arange(8) == device, np.float32(np.inf), 4))
        np.testing.assert_array_equal(updates, 0)
        assert_replicated(scaler)
        assert scaler.loss_scale == 2
