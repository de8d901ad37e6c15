"""Real training, sharded in every usual way, equals the same run on one device, overflows included.

One network throughout: `tanh(x @ w1) @ w2`. A fault is a matrix that is added to the gradient of the hidden layer, so
that it strikes the one device that holds this part of it, in a backward pass whose loss is finite.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

import jmpscale
from jmpscale.testing import assert_replicated

import hlo
from cases import some, some_of_all

pytestmark = pytest.mark.usefixtures("standard_promotion")

ROWS, WIDTH, HIDDEN = 16, 16, 32
rng = np.random.default_rng(0)
X = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
Y = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
PARAMS = {
    "w1": (rng.standard_normal((WIDTH, HIDDEN)) / 4).astype(np.float32),
    "w2": (rng.standard_normal((HIDDEN, WIDTH)) / 4).astype(np.float32),
}
OPTIMIZER = optax.chain(optax.sgd(0.1, momentum=0.9))


def _faults():
    """Eight steps; an infinity or NaN in the first, a middle and the last block of the hidden layer's gradient."""
    faults = np.zeros((8, ROWS, HIDDEN), np.float32)
    faults[1, 0, 0], faults[3, 8, 16], faults[4, -1, -1], faults[6, 2, 31] = np.inf, np.nan, -np.inf, np.inf
    return faults


@jax.custom_vjp
def strike(x, fault):
    """Returns x; adds the fault to its gradient."""
    return x


strike.defvjp(lambda x, fault: (x, fault), lambda fault, g: (g + fault, jnp.zeros_like(fault)))


def network_loss(params, x, y, fault):
    return jnp.sum((strike(jnp.tanh(x @ params["w1"]), fault) @ params["w2"] - y) ** 2) / Y.size


def functional_step(loss_fn, axis_name=None, reduce=lambda tree: tree, gather=lambda tree: tree):
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


def wrapper_step(loss_fn, axis_name=None, reduce=lambda tree: tree, gather=lambda tree: tree):
    tx = jmpscale.with_loss_scaling(OPTIMIZER, axis_name=axis_name)

    def step(carry, x, y, fault):
        params, inner_state, scaler = carry
        opt_state = tx.init(params)._replace(scaler=scaler, inner_state=inner_state)
        loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, x, y, fault)
        updates, opt_state = tx.update(reduce(grads), opt_state, params, value=loss)
        return optax.apply_updates(params, gather(updates)), opt_state.inner_state, opt_state.scaler

    return step


def _start():
    params = jax.tree.map(jnp.asarray, PARAMS)
    return params, OPTIMIZER.init(params), jmpscale.dynamic(2.0**12, growth_interval=2)


@functools.cache
def expected():
    """Returns the states after each step on one device."""
    step, carry, states = jax.jit(functional_step(network_loss)), _start(), []
    for fault in _faults():
        carry = step(carry, X, Y, fault)
        states.append(jax.tree.map(np.asarray, carry))
    assert [float(s[2].loss_scale) for s in states] == [2.0**n for n in (12, 11, 11, 10, 9, 9, 8, 8)]
    return states


def carry_specs(param_specs):
    _, opt_state, scaler = _start()
    opt_specs = optax.tree.map_params(
        OPTIMIZER, lambda _, spec: spec, opt_state, param_specs, transform_non_params=lambda _: Spec()
    )
    return param_specs, opt_specs, jax.tree.map(lambda _: Spec(), scaler)


def place(tree, mesh, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def check_run(step, mesh, specs, data_specs):
    """Runs the eight steps sharded, and compares each state with that of the run on one device."""
    traces = []

    def counted(*args):
        traces.append(1)
        return step(*args)

    jitted = jax.jit(counted, donate_argnums=0)
    with jax.set_mesh(mesh):
        carry = place(_start(), mesh, specs)
        for number, (fault, state) in enumerate(zip(_faults(), expected(), strict=True)):
            before = jax.tree.map(np.asarray, carry[:2])
            carry = jitted(carry, *place((X, Y, fault), mesh, data_specs))
            assert_replicated(carry[2])
            for ours, theirs in zip(*map(jax.tree.leaves, (carry[2], state[2])), strict=True):
                assert ours == theirs, number
            for ours, theirs in zip(*map(jax.tree.leaves, (carry[:2], state[:2])), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6)
            if not np.isfinite(fault).all():
                for ours, theirs in zip(*map(jax.tree.leaves, (carry[:2], before)), strict=True):
                    np.testing.assert_array_equal(ours, theirs)
    assert len(traces) == 1


# --- shard_map: what each device computes ---


def _gather(w, axis, along):
    return jax.lax.all_gather(w, axis, axis=along, tiled=True)


def data_parallel(params, x, y, fault):
    return network_loss(params, x, y, fault)


def fully_sharded(params, x, y, fault):
    return network_loss({name: _gather(w, "data", 0) for name, w in params.items()}, x, y, fault)


def tensor_parallel(params, x, y, fault):
    partial = strike(jnp.tanh(x @ params["w1"]), fault) @ params["w2"]
    return jnp.sum((jax.lax.psum(partial, "model") - y) ** 2) / Y.size


def fully_sharded_and_tensor_parallel(params, x, y, fault):
    return tensor_parallel(
        {"w1": _gather(params["w1"], "data", 0), "w2": _gather(params["w2"], "data", 1)}, x, y, fault
    )


STYLES = {
    "data parallel": (data_parallel, {"data": 8}, {"w1": Spec(), "w2": Spec()}, (Spec("data"),) * 3),
    "fully sharded": (fully_sharded, {"data": 8}, {"w1": Spec("data"), "w2": Spec("data")}, (Spec("data"),) * 3),
    "tensor parallel": (
        tensor_parallel,
        {"model": 8},
        {"w1": Spec(None, "model"), "w2": Spec("model")},
        (Spec(), Spec(), Spec(None, "model")),
    ),
    "fully sharded and tensor parallel": (
        fully_sharded_and_tensor_parallel,
        {"data": 4, "model": 2},
        {"w1": Spec("data", "model"), "w2": Spec("model", "data")},
        (Spec("data"), Spec("data"), Spec("data", "model")),
    ),
    "three axes": (
        fully_sharded_and_tensor_parallel,
        {"replica": 2, "data": 2, "model": 2},
        {"w1": Spec("data", "model"), "w2": Spec("model", "data")},
        (Spec(("replica", "data")), Spec(("replica", "data")), Spec(("replica", "data"), "model")),
    ),
}


APIS = {"functional": functional_step, "wrapper": wrapper_step}


def _mesh(shape, axis_type=AxisType.Auto):
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(axis_type,) * len(shape))


@pytest.mark.parametrize(
    ("style", "api"),
    some_of_all(
        STYLES,
        APIS,
        default=[
            ("data parallel", "functional"),
            ("fully sharded and tensor parallel", "wrapper"),
        ],
    ),
)
def test_under_shard_map_no_axis_is_named(style, api):
    loss_fn, shape, param_specs, data_specs = STYLES[style]
    mesh, specs = _mesh(shape), carry_specs(param_specs)
    step = jax.shard_map(APIS[api](loss_fn), mesh=mesh, in_specs=(specs, *data_specs), out_specs=specs)
    check_run(step, mesh, specs, data_specs)


@pytest.mark.parametrize(
    ("style", "api"),
    some_of_all(
        ["data parallel", "fully sharded"],
        APIS,
        default=[("data parallel", "functional"), ("fully sharded", "wrapper")],
    ),
)
def test_under_shard_map_without_types_the_axis_is_named(style, api):
    loss_fn, shape, param_specs, data_specs = STYLES[style]
    mesh, specs = _mesh(shape), carry_specs(param_specs)
    add = functools.partial(jax.lax.psum, axis_name="data") if style == "data parallel" else lambda tree: tree
    step = APIS[api](loss_fn, axis_name="data", reduce=add)
    step = jax.shard_map(step, mesh=mesh, in_specs=(specs, *data_specs), out_specs=specs, check_vma=False)
    check_run(step, mesh, specs, data_specs)


@pytest.mark.parametrize(
    ("style", "api"),
    some_of_all(
        STYLES, APIS, default=[("fully sharded and tensor parallel", "functional"), ("fully sharded", "wrapper")]
    ),
)
def test_under_jit_with_auto_axes_no_axis_is_named(style, api):
    _, shape, param_specs, data_specs = STYLES[style]
    check_run(APIS[api](network_loss), _mesh(shape), carry_specs(param_specs), data_specs)


def _explicit_loss(params, x, y, fault):
    """The network where every sharding is part of the type: weights are gathered, contractions say what comes out."""
    rows = Spec("data", None) if "data" in jax.typeof(x).sharding.mesh.axis_names else Spec(None, None)
    if "model" in jax.typeof(x).sharding.mesh.axis_names:
        hidden = Spec(rows[0], "model")
        h = jnp.einsum("ij,jk->ik", x, jax.sharding.reshard(params["w1"], Spec(None, "model")), out_sharding=hidden)
        w2 = jax.sharding.reshard(params["w2"], Spec("model", None))
        out = jnp.einsum("ij,jk->ik", strike(jnp.tanh(h), fault), w2, out_sharding=rows)
    else:
        w1, w2 = (jax.sharding.reshard(params[name], Spec(None, None)) for name in ("w1", "w2"))
        out = strike(jnp.tanh(x @ w1), fault) @ w2
    return jnp.sum((out - y) ** 2) / Y.size


@pytest.mark.parametrize(
    ("style", "api"),
    some_of_all(
        [style for style in STYLES if style != "three axes"],
        APIS,
        default=[("fully sharded and tensor parallel", "functional"), ("tensor parallel", "wrapper")],
    ),
)
def test_under_jit_with_explicit_axes_no_axis_is_named(style, api):
    _, shape, param_specs, data_specs = STYLES[style]
    check_run(APIS[api](_explicit_loss), _mesh(shape, AxisType.Explicit), carry_specs(param_specs), data_specs)


@pytest.mark.parametrize("api", some(APIS, default=["wrapper"]))
def test_zero_1_replicated_gradients_and_a_sharded_optimizer_state_with_explicit_axes(api):
    mesh = _mesh({"data": 8}, AxisType.Explicit)
    _, opt_specs, scaler_specs = carry_specs({"w1": Spec("data"), "w2": Spec("data")})
    specs = ({"w1": Spec(), "w2": Spec()}, opt_specs, scaler_specs)

    def gather(updates):
        assert {jax.typeof(x).sharding.spec[0] for x in jax.tree.leaves(updates)} == {"data"}, (
            "sharded, as the state is"
        )
        return jax.tree.map(lambda x: jax.sharding.reshard(x, Spec(None, None)), updates)

    check_run(api(_explicit_loss, gather=gather), mesh, specs, (Spec("data"),) * 3)


# --- layers that live on one device each: pipelines and experts ---


def _pipeline(w, x, fault):
    """Eight stages, each with a layer of its own; its neighbour's output comes through a sum over the stages."""
    for stage in range(8):
        here = jax.lax.axis_index("stage") == stage
        x = jax.lax.psum(jnp.where(here, strike(jnp.tanh(x @ w[0]), fault[0]), 0.0), "stage")
    return jnp.mean(x**2)


def _pipeline_on_one_device(w, x, fault):
    for stage in range(8):
        x = strike(jnp.tanh(x @ w[stage]), fault[stage])
    return jnp.mean(x**2)


def _experts(w, x, fault):
    """Eight experts; every token goes to the one of its number modulo eight."""
    mine = (jnp.arange(ROWS) % 8 == jax.lax.axis_index("stage"))[:, None]
    out = jnp.where(mine, strike(jnp.tanh(x @ w[0]), fault[0]), 0.0)
    return jnp.mean(jax.lax.psum(out, "stage") ** 2)


def _experts_on_one_device(w, x, fault):
    rows = [strike(jnp.tanh(x @ w[e]), fault[e])[e::8] for e in range(8)]
    return sum(jnp.sum(r**2) for r in rows) / x.size


@pytest.mark.parametrize(
    ("sharded", "plain"),
    [
        pytest.param(_pipeline, _pipeline_on_one_device, id="pipeline"),
        pytest.param(_experts, _experts_on_one_device, id="experts", marks=pytest.mark.full),
    ],
)
def test_layers_of_which_each_device_holds_one(sharded, plain):
    mesh = _mesh({"stage": 8})

    def make(loss_fn):
        def step(w, scaler, fault):
            loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, w, X, fault)
            finite = jmpscale.all_finite(grads)
            w = jmpscale.apply_if(finite, lambda w: w - 0.1 * grads, w)
            return w, jmpscale.update(scaler, finite, loss=loss)

        return step

    specs = (Spec("stage"), Spec())
    parallel = jax.jit(jax.shard_map(make(sharded), mesh=mesh, in_specs=(*specs, Spec("stage")), out_specs=specs))
    alone = jax.jit(make(plain))
    w = (np.random.default_rng(1).standard_normal((8, WIDTH, WIDTH)) / 4).astype(np.float32)
    ours = theirs = (w, jmpscale.dynamic(2.0**12, growth_interval=2))
    for device in (None, 0, None, 4, 7, None, None):
        fault = np.zeros((8, ROWS, WIDTH), np.float32)
        if device is not None:
            fault[device, device, 3] = np.inf
        ours, theirs = parallel(*ours, fault), alone(*theirs, fault)
        assert_replicated(ours[1])
        for x, y in zip(*map(jax.tree.leaves, (ours[1], theirs[1])), strict=True):
            assert x == y
        np.testing.assert_allclose(ours[0], theirs[0], rtol=2e-4, atol=2e-6)
    assert ours[1].skipped == 3


# --- branches that hold collectives ---


def _clip_across(axis):
    """Clips by the norm over all shards: a collective inside the branch, which a skipped step does not run."""

    def update(updates, state, params=None):
        norm = jnp.sqrt(jax.lax.psum(sum(jnp.sum(g**2) for g in jax.tree.leaves(updates)), axis))
        return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize(
    ("api", "check_vma"),
    some_of_all(APIS, [True, False], default=[("functional", True), ("wrapper", False)]),
)
def test_a_collective_inside_the_branch_does_not_deadlock(api, check_vma):
    mesh = _mesh({"data": 8})
    clip = _clip_across("data")
    tx = jmpscale.with_loss_scaling(clip, axis_name=None if check_vma else "data")

    def step(grads, scaler):
        if api == "wrapper":
            state = tx.init(grads)._replace(scaler=scaler)
            updates, state = tx.update(grads, state)
            return updates, state.scaler
        grads, finite = jmpscale.unscale_and_check(scaler, grads, axis_name=None if check_vma else "data")
        updates = jmpscale.apply_if(finite, lambda _: clip.update(grads, None)[0], jax.tree.map(jnp.zeros_like, grads))
        return updates, jmpscale.update(scaler, finite)

    specs = (Spec("data"), Spec())
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=check_vma))
    scaler = jmpscale.dynamic(4.0)
    updates, after = step(jnp.full(8, 4.0), scaler)
    np.testing.assert_allclose(updates, 8**-0.5, rtol=1e-6)
    for device in (0, 3, 7):
        updates, after = step(jnp.full(8, 4.0).at[device].set(jnp.inf), scaler)
        np.testing.assert_array_equal(updates, 0.0)
        assert_replicated(after)
        assert after.loss_scale == 2.0


# --- what it costs ---

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def _lowered(grads_spec, loss_spec, leaves, mesh):
    def step(scaler, grads, loss):
        tx = jmpscale.with_loss_scaling(optax.scale(-1.0), scaler)
        updates, state = tx.update(grads, tx.init(grads), value=loss[0])
        return updates, state.scaler

    grads_specs = [grads_spec] * leaves
    step = jax.shard_map(step, mesh=mesh, in_specs=(Spec(), grads_specs, loss_spec), out_specs=(grads_specs, Spec()))
    return jax.jit(step).lower(jmpscale.dynamic(), [jnp.ones((8, 8))] * leaves, jnp.ones(8))


def _program(*args):
    return _lowered(*args).compile().as_text()


@pytest.mark.parametrize(
    ("leaves", "axes"), some_of_all([1, 10], [("data",), ("data", "model")], default=[(10, ("data", "model"))])
)
def test_one_all_reduce_for_flag_and_loss_whatever_the_number_of_axes(leaves, axes):
    mesh = _mesh({"data": 4, "model": 2})
    program = _program(Spec(axes), Spec(axes), leaves, mesh)
    assert hlo.count(program, *COLLECTIVES) == 1
    assert hlo.count(program, "all-reduce") == 1
    assert "s32[2]" in next(line for line in program.splitlines() if " all-reduce(" in line)


@pytest.mark.parametrize("leaves", some([1, 10, 1_000], default=[1, 10]))
def test_one_all_reduce_whatever_the_number_of_leaves(leaves):
    """In the program as it is handed to the compiler, which adds no collective to what `shard_map` says."""
    program = _lowered(Spec("data"), Spec("data"), leaves, _mesh({"data": 4, "model": 2})).as_text()
    collectives = re.findall(r"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_\w+)", program)
    assert collectives == ["all_reduce"]


def test_no_collective_where_gradients_and_loss_arrive_summed():
    mesh = _mesh({"data": 4, "model": 2})
    assert hlo.count(_program(Spec(), Spec(), 10, mesh), *COLLECTIVES) == 0
    assert hlo.count(_program(Spec("data"), Spec(), 10, mesh), *COLLECTIVES) == 1
    assert hlo.count(_program(Spec(), Spec("data"), 10, mesh), *COLLECTIVES) == 1
    assert hlo.count(_program(Spec("model"), Spec("data"), 10, mesh), *COLLECTIVES) == 1


def _all_reduced_shapes(program):
    lines = [line for line in program.splitlines() if " all-reduce(" in line or " all-reduce-start(" in line]
    return [line.split(" all-reduce")[0].split(" = ")[1] for line in lines]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_under_sharded_jit_nothing_but_flags_is_reduced_and_nothing_moves(axis_type):
    mesh = _mesh({"data": 4, "model": 2}, axis_type)
    specs = [Spec("data", "model"), Spec("model"), Spec(), Spec("data")]

    def step(scaler, grads):
        grads, finite = jmpscale.unscale_and_check(scaler, grads)
        return grads, jmpscale.update(scaler, finite)

    with jax.set_mesh(mesh):
        grads = place([jnp.ones((8, 8))] * 4, mesh, specs)
        program = hlo.compiled(step, jmpscale.dynamic(), grads)
    shapes = _all_reduced_shapes(program)
    assert shapes
    assert all(set(shape) <= set("pred[]s32(), /*index=0123456789{}") for shape in shapes), shapes
    assert not any("[" in shape.replace("[]", "") for shape in shapes), shapes
    assert hlo.count(program, *COLLECTIVES[1:]) == 0


def test_a_scaler_that_is_put_on_the_mesh_is_compiled_for_once():
    mesh = _mesh({"data": 8}, AxisType.Explicit)
    traces = []

    @jax.jit
    def step(scaler, grads):
        traces.append(1)
        return jmpscale.update(scaler, jmpscale.unscale_and_check(scaler, grads)[1])

    with jax.set_mesh(mesh):
        grads = place(jnp.ones(8), mesh, Spec("data"))
        scaler = jax.device_put(jmpscale.dynamic(), NamedSharding(mesh, Spec()))
        for _ in range(3):
            scaler = step(scaler, grads)
    assert len(traces) == 1
    assert {str(jax.typeof(x)) for x in scaler[1:6]} == {"int32[]"}


# --- T-fsdp: the cases of torch's FSDP tests, for ten iterations and two-dimensional meshes ---


def test_fsdp_found_inf_on_the_first_device_only_ten_iterations():
    """test_sharded_grad_scaler_found_inf (PyTorch 2.13): torch has no floor, so min_scale is 2^-14."""
    mesh = _mesh({"data": 8})
    tx = optax.adam(1e-2)
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(8)}
    specs = {"w": Spec("data"), "b": Spec("data")}
    opt_specs = optax.tree.map_params(tx, lambda _, s: s, tx.init(params), specs, transform_non_params=lambda _: Spec())

    def step(params, opt_state, scaler, fault):
        def loss_fn(p):
            return jnp.sum(strike(p["w"] * 2.0, fault) ** 2) + jnp.sum(p["b"] ** 2)

        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params)
        finite = jmpscale.all_finite(grads)

        def descend(params, opt_state):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = jmpscale.apply_if(finite, descend, params, opt_state)
        return params, opt_state, jmpscale.update(scaler, finite, loss=loss), jax.lax.psum(loss, "data")

    carry_in = (specs, opt_specs, Spec())
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(*carry_in, Spec("data")), out_specs=(*carry_in, Spec())))
    carry = (params, tx.init(params), jmpscale.dynamic(2.0, min_scale=2.0**-14))
    scales, moved = [], []
    for iteration in range(10):
        fault = np.zeros((8, 4), np.float32)
        fault[0, 0] = np.inf if iteration % 2 == 0 else 0.0
        before = np.asarray(carry[0]["w"])
        *carry, _ = sharded(*carry, fault)
        assert_replicated(carry[2])
        scales.append(float(carry[2].loss_scale))
        moved.append(bool((np.asarray(carry[0]["w"]) != before).any()))
    assert scales == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625]
    assert moved == [False, True] * 5


def test_fsdp_scale_keeps_nested_structures():
    """test_grad_scaling (PyTorch 2.13): min_scale 1 does not matter."""
    a, b = jnp.array([8.0]), jnp.array([4.0])
    scaled = jmpscale.scale(jmpscale.dynamic(2.0), [a, (b, a), [b, a]])
    assert jax.tree.map(float, jax.tree.map(lambda x: x[0], scaled)) == [16.0, (8.0, 16.0), [8.0, 16.0]]


@pytest.mark.parametrize("value", [None, np.inf, np.nan])
def test_fsdp_sparse_gradients(value):
    """test_scaling_unscaling_sparse (PyTorch 2.13)."""
    values = jnp.array([16.0, 32.0, 64.0 if value is None else value])
    matrix = sparse.BCOO((values, jnp.array([[0, 2], [1, 0], [1, 2]])), shape=(2, 3))
    out, finite = jmpscale.unscale_and_check(jmpscale.static(2.0), matrix)
    assert finite == (value is None)
    if value is None:
        np.testing.assert_array_equal(out.todense(), matrix.todense() / 2)
    # Duplicates whose sum passes the largest float16 are widened before they are added: deliberately better.
    half = sparse.BCOO(
        (jnp.array([2.0**15, 2.0**15, 1.0], jnp.float16), jnp.array([[1, 0], [1, 0], [1, 2]])), shape=(2, 3)
    )
    out, finite = jmpscale.unscale_and_check(jmpscale.static(2.0), half)
    assert finite
    np.testing.assert_array_equal(out.todense(), [[0, 0, 0], [2.0**15, 0, 0.5]])


@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 4, "model": 2}])
@pytest.mark.parametrize("has_inf", [False, True])
def test_fsdp2_one_element_of_one_local_shard(shape, has_inf):
    """test_gradient_scaler (PyTorch 2.13, FSDP2), which also covers test_inf_gradients_skip_optim_step."""
    mesh = _mesh(shape)
    spec = Spec(*shape)
    tx = jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(2.0))
    with jax.set_mesh(mesh):
        params = place(jnp.ones((8, 8)), mesh, spec)
        grads = np.full((8, 8), 6.0, np.float32)
        grads[2, 1] = np.inf if has_inf else 6.0
        grads = place(jnp.asarray(grads), mesh, spec)
        state = tx.init(params)
        unscaled, finite = jax.jit(jmpscale.unscale_and_check)(state.scaler, grads)
        updates, after = jax.jit(tx.update)(grads, state, params)
    assert bool(finite) is not has_inf
    np.testing.assert_array_equal(unscaled, np.asarray(grads) / 2)
    assert_replicated(after.scaler)
    assert after.scaler.loss_scale == (1.0 if has_inf else 2.0)
    assert optax.tree.get(after, "count") == (0 if has_inf else 1)
    assert (np.asarray(updates) == 0).all() == has_inf
