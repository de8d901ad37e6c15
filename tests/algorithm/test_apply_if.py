"""apply_if and optax_step: a skipped step changes nothing, in the branch on CPU and in the select elsewhere.

Tests with the fixture `api` also run with `with_loss_scaling`, which has the same gate.
"""

import collections
import functools
import pickle
import re

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmpscale

import compiling
import meshes
from bits import assert_equal_bits

FULL = pytest.mark.full
PARAMS = {"w": jnp.arange(6.0).reshape(2, 3) / 7, "b": jnp.array([-0.0, 3.0, 1e-3])}
GRADS = {"w": jnp.full((2, 3), 0.25), "b": jnp.array([1.0, -2.0, 0.5])}
TX = optax.sgd(lambda count: 0.1 / (count + 1), momentum=0.9)  # its state has arrays and a scalar count


def _grads(factor=1.0):
    return GRADS | {"b": GRADS["b"] * factor}


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


APIS = {"functional": _functional, "wrapper": _wrapper, "max_norm": functools.partial(_wrapper, max_norm=1.0)}


@pytest.fixture(params=["functional", *(pytest.param(name, marks=FULL) for name in ("wrapper", "max_norm"))])
def api(request, standard_promotion):
    """Creates the state of an optimizer, and the function `step(params, opt_state, grads)`."""
    return APIS[request.param]


def _plain(api):
    """Returns the transformation that applies the same steps and skips none."""
    return optax.chain(optax.clip_by_global_norm(1.0), TX) if api is APIS["max_norm"] else TX


def _inner(opt_state):
    """Returns the part of an optimizer state that a skipped step does not change."""
    return opt_state.inner_state if isinstance(opt_state, jmpscale.WithLossScalingState) else opt_state


@pytest.fixture
def branch(platform, request):
    return platform == "cpu" and not request.config.getoption("--default-form")


# An applied step equals optax, and a skipped step changes nothing


@pytest.mark.usefixtures("platform")
def test_step_equals_optax_or_changes_no_bit(api):
    opt_state, step = api(TX)
    step, plain = jax.jit(step), _plain(api)
    for bad in (np.inf, np.nan):
        skipped = step(PARAMS, opt_state, GRADS | {"b": jnp.array([1.0, bad, 2.0])})
        assert_equal_bits((PARAMS, _inner(opt_state)), (skipped[0], _inner(skipped[1])))
    params, opt_state = step(PARAMS, opt_state, GRADS)
    updates, plain_state = jax.jit(plain.update)(GRADS, plain.init(PARAMS), PARAMS)
    chex.assert_trees_all_close(params, optax.apply_updates(PARAMS, updates), rtol=1e-6)
    chex.assert_trees_all_close(jax.tree.leaves(_inner(opt_state)), jax.tree.leaves(plain_state), rtol=1e-6)


def test_step_traces_update_once_and_runs_it_on_a_skip_only_without_a_branch(api, branch):
    traces, calls = [], []

    def update(updates, state, params=None):
        traces.append(None)
        jax.debug.callback(lambda: calls.append(None))
        return updates, state

    opt_state, step = api(optax.GradientTransformation(lambda _: optax.EmptyState(), update))
    step = jax.jit(step)
    for factor, expected in ((np.inf, 0 if branch else 1), (1.0, 1 if branch else 2)):
        step(PARAMS, opt_state, _grads(factor))
        jax.effects_barrier()
        assert (len(traces), len(calls)) == (1, expected)


def test_skipped_step_outside_jit_does_not_call_update(api):
    """Outside jit the gate is a Python `if`, so the update may read values."""
    seen = []

    def update(updates, state, params=None):
        seen.append(float(updates[0]))
        return updates, state

    params = jnp.ones(2)
    opt_state, step = api(optax.GradientTransformation(lambda _: optax.EmptyState(), update), params)
    skipped, opt_state = step(params, opt_state, jnp.array([1.0, np.nan]))
    assert_equal_bits(params, skipped)
    assert seen == []
    step(params, opt_state, jnp.array([0.5, 0.0]))
    assert seen == [0.5]


def _derivatives(fn):
    """Returns the jitted function of the parameters and the gradients that returns the derivatives of `fn`."""
    tangents = jax.tree.map(jnp.ones_like, (PARAMS, GRADS))
    return jax.jit(lambda *args: (jax.grad(fn, (0, 1))(*args), jax.jvp(fn, args, tangents)[1]))


@pytest.mark.full
@pytest.mark.usefixtures("platform")
def test_step_has_the_derivative_of_optax_or_of_the_identity(api):
    opt_state, step = api(TX)
    plain, plain_state = _plain(api), _plain(api).init(PARAMS)

    def power(params):
        return sum(jnp.sum(x**3) for x in jax.tree.leaves(params))

    def theirs(params, grads):
        return power(optax.apply_updates(params, plain.update(grads, plain_state, params)[0]))

    ours = _derivatives(lambda params, grads: power(step(params, opt_state, grads)[0]))
    chex.assert_trees_all_close(ours(PARAMS, GRADS), _derivatives(theirs)(PARAMS, GRADS), rtol=1e-5)
    found, identity = ours(PARAMS, _grads(np.inf)), _derivatives(lambda params, _: power(params))(PARAMS, GRADS)
    if api is _functional:  # with respect to the gradients apply_if may return NaN (0 * inf), as documented
        found, identity = ((reverse[0], forward) for reverse, forward in (found, identity))
    chex.assert_trees_all_close(found, identity, rtol=1e-5)


# The gate is a branch only on CPU


def test_step_has_a_branch_only_on_cpu(api, request):
    if request.config.getoption("--default-form"):
        pytest.skip("this run traces only the default form")
    opt_state, step = api(TX)
    traced = jax.jit(step).trace(PARAMS, opt_state, GRADS)
    for platform in ("cpu", "cuda", "rocm", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        # A branch on the flag takes it as an integer; the choice of the platform itself is a constant.
        assert bool(re.search(r"convert .*\(tensor<i1>\) -> tensor<i32>", text)) == (platform == "cpu"), platform


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
def test_exported_step_runs_on_its_platforms():
    opt_state, step = _functional(TX)
    args, treedef = jax.tree.flatten((PARAMS, opt_state, GRADS))
    run = jax.jit(lambda *args: jax.tree.leaves(step(*jax.tree.unflatten(treedef, args))))
    stored = jax.export.deserialize(jax.export.export(run, platforms=("cpu", "cuda", "tpu"))(*args).serialize())
    assert stored.platforms == ("cpu", "cuda", "tpu")
    chex.assert_trees_all_equal(stored.call(*args), run(*args))


# The gate keeps shardings, varying axes and memory spaces


@pytest.mark.parametrize(
    ("platform", "axis_type"),
    [pytest.param("cpu", AxisType.Auto, marks=FULL), ("default", AxisType.Auto), ("cpu", AxisType.Explicit)],
    indirect=["platform"],
)
def test_step_keeps_shardings(api, platform, axis_type):
    mesh = meshes.make_mesh(axis_type)
    shardings = {"w": NamedSharding(mesh, P("data", "model")), "b": NamedSharding(mesh, P("model"))}
    params = jax.device_put({"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}, shardings)
    with jax.set_mesh(mesh):
        opt_state, step = api(TX, params)
        state, grads = (params, opt_state), jax.tree.map(jnp.ones_like, params)
        run = jax.jit(step, donate_argnums=(0, 1)).lower(*state, grads).compile()
        donated = jax.tree.map(jnp.copy, state)
        for was, now in zip(jax.tree.leaves(state), jax.tree.leaves(run(*donated, grads)), strict=True):
            assert now.sharding.is_equivalent_to(was.sharding, now.ndim)
    assert all(x.is_deleted() for x in jax.tree.leaves(donated[0]))
    assert compiling.count(run.as_text(), "all-gather", "all-to-all") == 0


MIXED = (AxisType.Explicit, AxisType.Auto)


@pytest.mark.full
@pytest.mark.parametrize(
    ("axis_types", "spec", "vmapped"),
    [
        pytest.param(MIXED, P("data", "model"), False, id="mixed"),
        pytest.param((AxisType.Explicit,) * 2, P("data", "model"), True, id="explicit-vmap"),
        pytest.param(MIXED, P("data"), True, id="mixed-vmap", marks=FULL),
    ],
)
def test_step_keeps_types_with_explicit_axes(api, axis_types, spec, vmapped):
    """Under vmap the batch is sharded along one axis, and the values of each member along another."""
    meshes.require_devices(8)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=axis_types)
    overflow = np.ones((8, 4), np.float32)
    overflow[3] = np.inf
    with jax.set_mesh(mesh):
        params, grads = jax.device_put((np.ones((8, 4), np.float32), overflow), NamedSharding(mesh, spec))
        opt_state, step = api(TX, params)
        if vmapped:
            _, step = api(TX, jnp.ones(4))
            opt_state, step = jax.vmap(lambda w: api(TX, w)[0])(params), jax.vmap(step)
        after, new_state = jax.jit(step)(params, opt_state, grads)
        assert jax.tree.map(jax.typeof, (after, new_state)) == jax.tree.map(jax.typeof, (params, opt_state))
        assert after.sharding.is_equivalent_to(params.sharding, 2)
        np.testing.assert_array_equal((np.asarray(after) == 1).all(1), np.arange(8) == 3 if vmapped else [True] * 8)


def test_apply_if_accepts_a_flag_that_varies_over_devices():
    """Each device decides independently, even about a value that does not vary before the step."""

    def local(finite):
        count, number = jmpscale.apply_if(finite[0], lambda count, n: (count + 1, n + 1), jnp.int32(0), 5)
        return count[None], number[None]

    run = jax.jit(jax.shard_map(local, mesh=meshes.make_mesh(data=8), in_specs=P("data"), out_specs=P("data")))
    count, number = run(jnp.arange(8) > 3)
    assert count.tolist() == [0] * 4 + [1] * 4
    assert number.tolist() == [5] * 4 + [6] * 4


def _memory_spaces():
    memory = getattr(jax, "memory", None)
    if memory is None or jax.device_put(jnp.ones(()), memory.Space.Host).sharding.memory_kind != "pinned_host":
        pytest.skip("this version of JAX does not move arrays to a memory space")
    return memory.Space.Host, memory.Space.Device


@pytest.mark.usefixtures("platform")
def test_step_keeps_memory_spaces(api):
    """The optimizer state is in host memory, with a scalar count, which a select would move to the device."""
    host, device = _memory_spaces()

    def update(grads, state, params=None):
        updates, state = TX.update(grads, jax.device_put(state, device), params)
        return updates, jax.device_put(state, host)

    opt_state, step = api(optax.GradientTransformation(lambda p: jax.device_put(TX.init(p), host), update))
    step, params = jax.jit(step), PARAMS
    for factor in (1.0, np.inf):
        params, opt_state = step(params, opt_state, _grads(factor))
        assert {x.sharding.memory_kind for x in jax.tree.leaves(_inner(opt_state))} == {"pinned_host"}
    assert int(_inner(opt_state)[1].count) == 1


@pytest.mark.guards
def test_apply_if_raises_if_the_memory_space_changes():
    host, _ = _memory_spaces()
    run = jax.jit(lambda finite, w: jmpscale.apply_if(finite, lambda w: jax.device_put(w, host), w))
    with pytest.raises(TypeError, match=r"carry\[0\] was float32.* and is float32.* memory space"):
        run(True, jnp.ones(2))


# The carry may contain any leaves


def test_apply_if_returns_one_value_or_a_tuple(variant):
    def run(finite, a, b):
        one = jmpscale.apply_if(finite, lambda a: a + 1, a)
        pair = jmpscale.apply_if(finite, lambda pair: (pair[1], pair[0]), (a, b))
        return one, pair, jmpscale.apply_if(finite, lambda a, b: (b, a), a, b)

    one, two = jnp.float32(1), jnp.float32(2)
    assert variant(run)(jnp.array(True), one, two) == (2, (2, 1), (2, 1))
    assert variant(run)(jnp.array(False), one, two) == (1, (1, 2), (1, 2))


Point = collections.namedtuple("Point", ["x", "y"])
ARRAYS = {
    "float32": jnp.array([0x7FC12345, 0xFFC00001, 0x80000000, 1], jnp.uint32).view(jnp.float32),  # NaN, -0.0, 2^-149
    "float16": jnp.array([[1.0, np.inf]], jnp.float16),
    "complex64": jnp.array([1 + 2j, complex(np.nan, -0.0)], jnp.complex64),
    "empty": jnp.zeros((0, 2)),
    "int": jnp.arange(3),
    "bool": jnp.array(True),
    "key": jax.random.key(0),
    "numpy": [np.array([1.0, 2.0], np.float32), np.float32(0.5), np.int8(3), np.bool_(True)],
    "weak": jnp.asarray(3.0),
}
OBJECTS = {
    "numbers": [1.5, -0.0, float("nan"), 1 + 2j, True, 7, 10**400],
    "texts": ["text", b"bytes", np.str_("text"), np.array(["a", "b"]), np.array([None, "a"], object)],
    "types": [jnp.tanh, jnp.float16, np.float32, np.dtype("f2"), Point, object()],
    "float0": np.zeros((2,), jax.dtypes.float0),
    "containers": [[], {}, (), None, Point(None, "x")],
}


@jax.jit
def _change(arrays):
    def change(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(x)[0]
        return ~x if x.dtype == bool else x + jnp.ones((), x.dtype)

    return jax.tree.map(change, arrays)


@pytest.mark.usefixtures("platform")
def test_apply_if_gates_arrays_and_returns_other_objects():
    def assert_same_objects(objects):
        assert jax.tree.structure(objects) == jax.tree.structure(OBJECTS)
        assert all(a is b for a, b in zip(jax.tree.leaves(objects), jax.tree.leaves(OBJECTS), strict=True))

    def fn(arrays, objects):
        assert_same_objects(objects)
        return _change(arrays), objects

    def run(finite, arrays):
        arrays, objects = jmpscale.apply_if(finite, fn, arrays, OBJECTS)
        assert_same_objects(objects)
        return arrays

    for call in (run, jax.jit(run)):
        assert_equal_bits(ARRAYS, call(jnp.array(False), ARRAYS))
        assert_equal_bits(_change(ARRAYS), call(jnp.array(True), ARRAYS))


@pytest.mark.usefixtures("platform")
def test_apply_if_returns_changed_numbers_as_arrays(variant):
    numbers = {"int": 2, "float": 2.5, "complex": 1 + 2j, "bool": True}

    def run(finite, w):
        def fn(w, new):
            return w + 1, {name: not x if name == "bool" else x * 2 for name, x in new.items()}

        return jmpscale.apply_if(finite, fn, w, numbers)[1]

    expected = {True: {"int": 4, "float": 5.0, "complex": 2 + 4j, "bool": False}, False: numbers}
    for finite in (True, False):
        assert variant(run)(jnp.array(finite), jnp.float32(1)) == expected[finite]


@pytest.mark.parametrize("batched", [False, True])
def test_apply_if_changes_numbers_with_disable_jit(batched):
    def run(finite, w):
        return jmpscale.apply_if(finite, lambda w, n: (w + 1, n + 1), w, 3)

    args = (jnp.array([True, False]), jnp.ones((2, 3))) if batched else (jnp.array(False), jnp.ones(3))
    with jax.disable_jit():
        _, number = (jax.vmap(run) if batched else run)(*args)
    assert number.tolist() == [4, 3] if batched else number == 3


@pytest.mark.guards
@pytest.mark.parametrize("new", [1, True, 0j, -0.0, 1.0], ids=repr)
def test_apply_if_distinguishes_numbers_that_are_equal_in_python(new):
    run = jax.jit(lambda finite: jmpscale.apply_if(finite, lambda _: new, 0.0))
    if type(new) is not float:
        with pytest.raises(TypeError, match=r"carry\[0\] was float32\[\] and is"):
            run(True)
    else:
        assert np.signbit(run(True)) == np.signbit(new)
        assert not np.signbit(run(False))


def test_apply_if_ignores_weak_types():
    run = jax.jit(lambda finite, w: jmpscale.apply_if(finite, lambda _: jnp.asarray(2.0), w))
    assert [run(finite, jnp.float32(1)) for finite in (True, False)] == [2, 1]


@pytest.mark.guards
@pytest.mark.parametrize("new", [["word"] * 2, ["word", "a", "word"], "word", [1, 2, 3]], ids=repr)
def test_apply_if_raises_if_an_array_of_strings_changes(new):
    words = np.array(["word"] * 3)
    with pytest.raises(TypeError, match=r"carry\[1\] was array.*Only arrays and Python numbers may change"):
        jmpscale.apply_if(True, lambda w, words: (w, np.array(new)), 1.0, words)


@pytest.mark.parametrize("value", [0.25, float("nan"), 10**400, "text", np.array(["a", "b"])], ids=lambda x: str(x)[:9])
def test_apply_if_returns_the_original_of_an_equal_object(value):
    def fn(w, value):
        return w + 1, pickle.loads(pickle.dumps(value))

    _, after = jmpscale.apply_if(True, fn, 1.0, value)
    assert after is value


# optax_step


def test_optax_step_keeps_leaves_without_an_update():
    model, grads = {"w": jnp.ones(2), "fn": jnp.tanh, "n": 3}, {"w": jnp.ones(2), "fn": None, "n": None}
    step = jmpscale.optax_step(optax.sgd(0.5), grads)
    run = jax.jit(
        lambda finite, w: jmpscale.apply_if(finite, step, model | {"w": w}, (optax.EmptyState(),) * 2)[0]["w"]
    )
    assert run(True, model["w"]).tolist() == [0.5, 0.5]
    assert run(False, model["w"]).tolist() == [1, 1]
    after, _ = step(model, (optax.EmptyState(),) * 2)
    assert after["fn"] is jnp.tanh
    assert after["n"] == 3


def test_optax_step_passes_extra_arguments_to_update():
    tx = optax.GradientTransformationExtraArgs(optax.identity().init, lambda g, s, p=None, *, value: (g * value, s))
    step = jmpscale.optax_step(tx, jnp.float32(1), value=jnp.float32(3))
    assert jmpscale.apply_if(True, step, jnp.float32(1), tx.init(None))[0] == 4


@pytest.mark.guards
@pytest.mark.usefixtures("standard_promotion")
def test_optax_step_requires_a_float32_state_for_float16_parameters():
    """The error names the remedy, and the remedy works."""
    params, tx = {"w": jnp.ones(3, jnp.float16)}, optax.trace(0.9)
    step = jmpscale.optax_step(tx, {"w": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"carry\[1\]\.trace\['w'\] was float16\[3\].*tx\.init\(jmpscale\.cast\(params"):
        jmpscale.apply_if(jnp.array(True), step, params, tx.init(params))
    after, _ = jmpscale.apply_if(jnp.array(True), step, params, tx.init(jmpscale.cast(params, jnp.float32)))
    assert after["w"].dtype == jnp.float16


# --- select_tree ---

OLD = {
    "mean": np.array([-0.0, np.nan, 1.0], np.float32),
    "half": np.array([np.inf], np.float16),
    "count": 3,
    "name": "a",
}
NEW = {
    "mean": np.array([0.0, 2.0, np.inf], np.float32),
    "half": np.array([np.nan], np.float16),
    "count": 4,
    "name": "a",
}


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
@pytest.mark.parametrize("finite", [True, False])
def test_select_tree_returns_one_tree_bit_for_bit(platform, finite, transform):
    names = [name for name in OLD if name != "name"]

    def run(finite, *arrays):
        new, old = (dict(zip(names, values, strict=True)) | {"name": "a"} for values in (arrays[:3], arrays[3:]))
        selected = jmpscale.select_tree(finite, new, old)
        assert selected.pop("name") == "a"
        return selected

    arguments = [jnp.array(finite), *(jnp.asarray(tree[name]) for tree in (NEW, OLD) for name in names)]
    if transform is jax.vmap:
        arguments = [x[None] for x in arguments]
    expected = {name: jnp.asarray((NEW if finite else OLD)[name]) for name in names}
    if transform is jax.vmap:
        expected = jax.tree.map(lambda x: x[None], expected)
    assert_equal_bits(transform(run)(*arguments), expected)


def test_select_tree_has_the_derivatives_of_the_tree_that_it_returns():
    def loss(w, finite):
        return jmpscale.select_tree(finite, w**2, w)

    assert [jax.grad(loss)(3.0, finite) for finite in (True, False)] == [6.0, 1.0]
    assert [jax.jit(jax.grad(loss))(3.0, finite) for finite in (True, False)] == [6.0, 1.0]
