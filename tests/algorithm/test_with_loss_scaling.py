"""with_loss_scaling applies the steps of any optax optimizer, skips without a change, and clips with max_norm."""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jmpscale

from bits import assert_equal_bits
from tables import names

pytestmark = pytest.mark.usefixtures("standard_promotion")

FULL = pytest.mark.full
RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((8, 4), (8, 2)))
PARAMS = {"w": jnp.asarray(RNG.standard_normal((4, 2)) * 0.5, jnp.float32), "b": jnp.array([0.5, -0.25])}


def _loss(params, dtype=jnp.float32):
    prediction = jnp.tanh(X.astype(dtype) @ params["w"].astype(dtype)) + params["b"].astype(dtype)[None]
    return jnp.mean((prediction.astype(jnp.float32) - Y) ** 2)


# --- an applied step equals inner, and a skip changes nothing ---

# XLA compiles faster without LLVM's optimizations, and rounds products and sums in the same way in different programs.
UNFUSED = {"xla_backend_optimization_level": 0}
each_jit = pytest.mark.parametrize("jit", [jax.jit, lambda fn: fn], ids=["jit", "eager"])


def _unscaled(_, params):
    return jax.value_and_grad(_loss)(params)


def test_with_loss_scaling_equals_inner_bit_for_bit(platform):
    inner = optax.adamw(optax.cosine_decay_schedule(1e-2, 100), weight_decay=0.1)
    tx = jmpscale.with_loss_scaling(inner, jmpscale.dynamic(2.0**16, growth_interval=1))

    def train(tx, value_and_grad):
        @functools.partial(jax.jit, compiler_options=UNFUSED)
        def step(params, opt_state):
            # The barrier keeps XLA from fusing the gradients with different consumers.
            grads = jax.lax.optimization_barrier(value_and_grad(opt_state, params)[1])
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = PARAMS, tx.init(PARAMS)
        for _ in range(3):
            params, opt_state = step(params, opt_state)
        return params, opt_state

    params, opt_state = train(tx, jmpscale.value_and_grad(_loss))
    expected = train(inner, _unscaled)
    if jax.default_backend() == "cpu":
        assert_equal_bits(expected, (params, opt_state.inner_state))
    else:  # XLA rounds products and sums differently in different programs
        chex.assert_trees_all_close(expected, (params, opt_state.inner_state), rtol=1e-6)
    assert opt_state.scaler.loss_scale == 2.0**19


@pytest.mark.filterwarnings("ignore:the parameters are float16:UserWarning")
@pytest.mark.parametrize("dtype", ["float16", *(pytest.param(dtype, marks=FULL) for dtype in ("bfloat16", "float32"))])
def test_with_loss_scaling_changes_nothing_on_a_skip(dtype, platform):
    traces, sgd = [], optax.sgd(1e-2, momentum=0.9)

    def update(*args):
        traces.append(None)
        return sgd.update(*args)

    tx = jmpscale.with_loss_scaling(optax.GradientTransformation(sgd.init, update), jmpscale.dynamic(2.0**8))
    params = jmpscale.cast(PARAMS, dtype)
    params["b"] = params["b"].at[0].set(-0.0)

    @jax.jit
    def step(params, opt_state, factor):
        grads = jmpscale.value_and_grad(lambda params: factor * _loss(params, dtype))(opt_state, params)[1]
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, updates

    opt_state = tx.init(params)
    for bad in (jnp.inf, jnp.nan):
        applied, opt_state, _ = step(params, opt_state, 1.0)
        assert all(x.dtype == dtype for x in jax.tree.leaves(applied))
        assert not np.array_equal(applied["w"], params["w"])
        assert np.isfinite(np.asarray(applied["w"], np.float32)).all()
        params, skipped, updates = step(applied, opt_state, bad)
        assert_equal_bits((applied, opt_state.inner_state), (params, skipped.inner_state))
        assert all((x == 0).all() and np.signbit(x).all() for x in jax.tree.leaves(updates))
        opt_state = skipped
    assert (opt_state.scaler.total_skips, opt_state.scaler.loss_scale, len(traces)) == (2, 2.0**6, 1)


@pytest.mark.filterwarnings("ignore:the gradients must be float32:UserWarning")
@each_jit
def test_with_loss_scaling_returns_zeros_of_every_kind_on_a_skip(jit):
    tx = jmpscale.with_loss_scaling(optax.identity())
    others = {"number": 3.0, "integer": 3, "fn": jnp.tanh}  # leaves that the step closes over
    grads = {"bad": jnp.array(jnp.nan), "complex": jnp.array(1j), "n": jnp.array(3), "none": None}

    def step(grads, state):
        updates, _ = tx.update(grads | others, state)
        assert updates.pop("fn") is jnp.tanh
        return updates

    zero = jnp.array(-0.0)
    expected = {"bad": zero, "complex": jax.lax.complex(zero, zero), "n": jnp.array(0), "none": None}
    assert_equal_bits(expected | {"number": zero, "integer": jnp.array(0)}, jit(step)(grads, tx.init(grads)))


@each_jit
@pytest.mark.usefixtures("platform")
def test_with_loss_scaling_accepts_updates_of_other_types(jit):
    """The inner optimizer returns, for example, the mean of per-example gradients."""
    inner = optax.stateless(lambda grads, params: jax.tree.map(lambda g: g.mean(0).astype(jnp.bfloat16), grads))
    tx = jmpscale.with_loss_scaling(inner)
    params, grads = jnp.array([1.0, -0.0, 2.0]), jnp.ones((2, 3))
    for factor, expected in ((1.0, params + 1), (jnp.inf, params)):
        updates, _ = jit(tx.update)(grads * factor, tx.init(params), params)
        assert_equal_bits(expected, optax.apply_updates(params, updates))


def test_with_loss_scaling_keeps_leaves_that_are_not_arrays(platform):
    names = {"name": "inner", "fn": jnp.tanh, "size": 3}
    inner = optax.GradientTransformation(
        lambda _: names | {"count": jnp.int32(0)},
        lambda updates, state, params=None: (updates, state | {"count": state["count"] + 1}),
    )
    tx = jmpscale.with_loss_scaling(inner)

    @jax.jit
    def step(grads):
        _, opt_state = tx.update(grads, tx.init(None))
        assert all(opt_state.inner_state[name] is value for name, value in names.items())
        return opt_state.inner_state["count"]

    assert [step(jnp.ones(2) * factor) for factor in (1.0, jnp.inf)] == [1, 0]


def test_with_loss_scaling_passes_zeros_for_nonfinite_gradients(platform, request):
    """Only the form for GPUs and TPUs runs inner on a skipped step."""
    runs = 1 if platform == "cpu" and not request.config.getoption("--default-form") else 3
    seen = []

    def update(updates, state, params=None, *, grad, value):
        jax.debug.callback(lambda *args: seen.append([x.tolist() for x in args]), updates, grad["g"], value)
        return updates, state

    tx = jmpscale.with_loss_scaling(optax.GradientTransformationExtraArgs(lambda _: (), update))

    @jax.jit
    def step(grad):
        return tx.update(grad, tx.init(None), grad={"g": grad, "n": 1}, value=jnp.sum(grad))[0]

    for grad in ([1.0, 2.0], [3.0, jnp.inf], [jnp.nan, 4.0]):
        step(jnp.array(grad))
        jax.effects_barrier()
    assert [call[:2] for call in seen] == [[g, g] for g in ([1.0, 2.0], [3.0, 0.0], [0.0, 4.0])][:runs]
    assert [str(value) for _, _, value in seen] == ["3.0", "inf", "nan"][:runs]


@pytest.mark.full
def test_with_loss_scaling_accepts_a_state_without_a_mesh():
    """Gradients of data that is sharded on Auto axes have a mesh in their types, and the initial state has none."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 3)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0, momentum=0.5))

    step, state = jax.jit(lambda x, state: tx.update(x.sum(0), state)[0]), tx.init(jnp.ones(3))
    np.testing.assert_array_equal(step(x, state), [-8.0] * 3)
    step.trace(x, state).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("max_norm", [None, pytest.param(100.0, marks=pytest.mark.full)])
def test_with_loss_scaling_accepts_symbolic_shapes(max_norm):
    """A program may be exported for every batch size."""
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), max_norm=max_norm)
    shapes = jax.ShapeDtypeStruct(jax.export.symbolic_shape("size"), jnp.float32)
    state = tx.init(jnp.ones(1))  # does not depend on the shape
    stored = jax.export.export(jax.jit(lambda g, state: tx.update(g, state)[0]))(shapes, state)
    for n in (1, 3):
        assert stored.call(jnp.full(n, 8.0), state).tolist() == [-8.0] * n
        assert stored.call(jnp.full(n, jnp.inf), state).tolist() == [0.0] * n


# --- extra arguments are read and passed to inner ---


def test_with_loss_scaling_reads_the_loss():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic(1024.0))
    update = jax.jit(tx.update)
    bad = jnp.array(jnp.nan)
    for loss, scale, reason in (
        ({"value": jnp.float32(jnp.nan)}, 1024.0, jmpscale.SkipReason.LOSS),
        ({"value": jnp.float32(1)}, 512.0, jmpscale.SkipReason.GRADIENTS),
        ({}, 512.0, jmpscale.SkipReason.GRADIENTS),
    ):
        _, state = update(bad, tx.init(bad), **loss)
        assert (state.scaler.loss_scale, state.scaler.last_skip_reason) == (scale, reason)
    # All gradients of a loss that is not finite may be finite, because a comparison hides the NaN.
    updates, state = update(jnp.array(2.0), tx.init(bad), value=jnp.float32(jnp.inf))
    assert (updates, state.scaler.loss_scale, state.scaler.total_skips) == (0.0, 1024.0, 1)


ACCEPTED = {  # an update with a function that receives its extra arguments, and the names of these
    "by name": (lambda seen: lambda updates, state, params, *, fn: (updates, seen(fn=fn)), ["fn"]),
    "all": (lambda seen: lambda updates, state, params, **extra: (updates, seen(**extra)), ["value", "fn", "note"]),
    "none": (lambda seen: lambda updates, state, params: (updates, seen()), []),
}
EXTRA_ARGS = {"value": jnp.float32(3), "fn": jnp.tanh, "note": "text"}


@pytest.mark.parametrize("kind", [types.SimpleNamespace, optax.GradientTransformationExtraArgs])
@pytest.mark.parametrize("name", ACCEPTED)
def test_with_loss_scaling_passes_the_arguments_that_inner_accepts(name, kind):
    make_update, expected = ACCEPTED[name]
    extra_args, seen = EXTRA_ARGS, {}
    tx = jmpscale.with_loss_scaling(kind(init=lambda params: None, update=make_update(seen.update)))
    tx.update(jnp.array(1.0), tx.init(None), **extra_args)
    assert list(seen) == expected
    assert all(seen[name] is extra_args[name] for name in expected)


def test_with_loss_scaling_passes_no_arguments_to_a_transformation_without_extra_arguments():
    def update(updates, state, params=None, **extra_args):
        assert not extra_args
        return updates, state

    tx = jmpscale.with_loss_scaling(optax.GradientTransformation(lambda params: None, update))
    tx.update(jnp.array(1.0), tx.init(None), **EXTRA_ARGS)


def test_with_loss_scaling_passes_all_arguments_to_a_decorator_that_reads_some():
    def decorated(updates, state, params=None):
        return updates, state

    @functools.wraps(decorated)
    def update(updates, state, params=None, *, value, **extra):
        seen.update(extra, value=value)
        return decorated(updates, state, params)

    seen = {}
    tx = jmpscale.with_loss_scaling(optax.GradientTransformationExtraArgs(lambda params: None, update))
    tx.update(jnp.array(1.0), tx.init(None), **EXTRA_ARGS)
    assert seen.keys() == EXTRA_ARGS.keys()


# --- max_norm clips and checks ---


def _clip(max_norm, grads, scaler=None):
    tx = jmpscale.with_loss_scaling(optax.identity(), scaler, max_norm=max_norm)
    state = tx.init(grads)
    assert (state.grad_norm, state.grad_norm.dtype, state.grad_norm.shape) == (0.0, jnp.float32, ())
    updates, state = jax.jit(tx.update)(grads, state)
    assert (state.grad_norm.dtype, state.grad_norm.shape) == (jnp.float32, ())
    return updates, state


@pytest.mark.filterwarnings("ignore:the gradients must be float32:UserWarning")
@pytest.mark.parametrize("max_norm", [2.0, pytest.param(1e6, marks=pytest.mark.full)])
def test_max_norm_clips_as_optax_does(max_norm):
    grads = {
        "half": jnp.array([0.5, -3.0], jnp.float16),
        "bfloat16": jnp.array([1.5], jnp.bfloat16),
        "float": jnp.array([[4.0], [2.0]]),
        "complex": jnp.array([1 - 2j, 3j]),
        "none": None,
    }
    updates, state = _clip(max_norm, grads)
    np.testing.assert_allclose(state.grad_norm, np.sqrt(0.25 + 9 + 2.25 + 16 + 4 + 5 + 9), rtol=1e-6)
    clip = optax.clip_by_global_norm(max_norm)
    expected, _ = jax.jit(clip.update)(jmpscale.cast(grads, jnp.float32), clip.init(None))
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, grads)
    chex.assert_trees_all_close(jmpscale.cast(updates, jnp.float32), expected, rtol=4e-3)
    if max_norm == 1e6:
        assert_equal_bits(grads, updates)


def test_max_norm_skips_if_the_norm_is_not_finite(platform):
    tx = jmpscale.with_loss_scaling(optax.identity(), max_norm=1.0)
    update, state = jax.jit(tx.update), tx.init(None)
    updates, applied = update(jnp.array([3.0, 4.0]), state)
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)
    assert (applied.grad_norm, applied.scaler.finite_steps) == (5.0, 1)
    assert update(jnp.array([1.0, 1.8e19]), state)[1].scaler.total_skips == 0
    for bad in (jnp.inf, jnp.nan, 1.9e19):  # the square of 1.9e19 overflows
        updates, skipped = update(jnp.array([1.0, bad]), state)
        assert (skipped.grad_norm, skipped.scaler.total_skips) == (jnp.inf, 1)
        np.testing.assert_array_equal(updates, [0.0, 0.0])


@pytest.mark.full
def test_max_norm_uses_float64_if_a_leaf_does(x64):
    grads = {"a": jnp.array([3e100], jnp.float64), "b": jnp.array([4.0], jnp.float32)}
    updates, state = _clip(1.0, grads)
    assert state.scaler.total_skips == 0
    np.testing.assert_allclose(updates["a"], 1.0, rtol=1e-6)
    assert updates["b"].dtype == jnp.float32


def test_max_norm_without_scaling_only_clips():
    updates, state = _clip(1.0, jnp.array([3.0, 4.0]), jmpscale.disabled())
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)
    assert state.grad_norm == 5.0
    updates, state = _clip(1.0, jnp.array([jnp.nan, 4.0]), jmpscale.disabled())
    assert np.isnan(updates).any()
    assert state.scaler.total_skips == 0


@pytest.mark.parametrize(
    ("options", "own_norm"),
    [
        ({"axis_name": ()}, True),
        ({"axis_name": "data"}, True),
        ({"norm_axis_name": "data"}, False),
        ({"axis_name": (), "norm_axis_name": "data"}, False),
    ],
    ids=["no axis", "axis_name", "norm_axis_name", "norm_axis_name without axis_name"],
)
def test_norm_axis_name_sums_the_squares(options, own_norm):
    parts = jnp.arange(1.0, 5.0).reshape(2, 2)
    tx = jmpscale.with_loss_scaling(optax.identity(), jmpscale.static(1.0), max_norm=1.0, **options)
    updates = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(None))[0], axis_name="data"))(parts)
    norm = np.linalg.norm(parts, axis=1, keepdims=True) if own_norm else np.linalg.norm(parts)
    np.testing.assert_allclose(updates, parts / norm, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "skipped"),
    [
        ({"axis_name": ()}, [[1, 0], [0, 0]]),
        ({"axis_name": "data"}, [[1, 0], [1, 0]]),
        ({"norm_axis_name": "model"}, [[1, 1], [0, 0]]),
        ({"axis_name": "data", "norm_axis_name": "model"}, [[1, 1], [1, 1]]),
    ],
    ids=["no axis", "axis_name", "norm_axis_name", "both"],
)
def test_norm_axis_name_combines_decisions(options, skipped):
    tx = jmpscale.with_loss_scaling(optax.identity(), **options)
    run = jax.vmap(lambda g: tx.update(g, tx.init(None))[1].scaler.total_skips, axis_name="model")
    run = jax.jit(jax.vmap(run, axis_name="data"))
    assert run(jnp.ones((2, 2)).at[0, 0].set(jnp.inf)).tolist() == skipped


FP8 = "_overwrite_with_gradient"


def _fp8_grads(amax, w=0.4):
    """Returns gradients as from Flax's fp8 layers: the norm is 0.5, and one leaf replaces the old value."""
    return {"params": {"w": jnp.array([0.3, w])}, FP8: {"amax_history": jnp.array([amax])}}


@pytest.mark.parametrize(("max_norm", "factor"), [pytest.param(None, 1.0, marks=pytest.mark.full), (0.25, 0.5)])
def test_with_loss_scaling_neither_counts_nor_clips_fp8_statistics(max_norm, factor):
    tx = jmpscale.with_loss_scaling(optax.identity(), max_norm=max_norm)
    update = jax.jit(tx.update)
    grads = _fp8_grads(1000.0)
    updates, state = update(grads, tx.init(grads))
    np.testing.assert_allclose(updates["params"]["w"], [0.3 * factor, 0.4 * factor], rtol=1e-6)
    assert updates[FP8]["amax_history"] == 1000.0
    assert max_norm is None or state.grad_norm == pytest.approx(0.5)
    for bad in (_fp8_grads(jnp.inf), _fp8_grads(jnp.nan), _fp8_grads(1.0, w=jnp.inf)):
        updates, state = update(bad, tx.init(grads))
        assert state.scaler.total_skips == 1
        assert all((x == 0).all() for x in jax.tree.leaves(updates))


# --- the initial state has its own scaler ---


def test_with_loss_scaling_defaults_to_a_dynamic_scaler():
    tx = jmpscale.with_loss_scaling(optax.adam(1e-3))
    for init in (tx.init, jax.jit(tx.init)):
        assert_equal_bits(jax.tree.map(jnp.asarray, jmpscale.dynamic()), init(PARAMS).scaler)


def test_with_loss_scaling_disabled_is_inner():
    params = jmpscale.cast(PARAMS, jnp.float16)
    tx = jmpscale.with_loss_scaling(optax.trace(0.9), jmpscale.disabled())
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(jax.tree.map(lambda x: x * jnp.nan, params), state, params)
    assert all(x.dtype == jnp.float16 and jnp.isnan(x).all() for x in jax.tree.leaves((updates, after.inner_state)))
    assert_equal_bits(jax.tree.map(jnp.asarray, jmpscale.disabled()), after.scaler)


def test_with_loss_scaling_initializes_from_any_parameters():
    """Parameters in float16 are converted, abstract ones as well; leaves that are not numbers are not."""
    tx = jmpscale.with_loss_scaling(optax.identity()._replace(init=lambda params: params))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    params = {
        "half": jnp.ones(2, jnp.float16),
        "numpy": np.ones(2, np.float16),
        "abstract": jax.ShapeDtypeStruct((2,), jnp.float16, sharding=sharding),
        "key": jax.random.key(0),
        "n": jnp.array(3),
        "float": jnp.ones(2),
        "name": "text",
    }
    state = tx.init(params).inner_state
    assert [state[name].dtype for name in ("half", "numpy", "abstract")] == [jnp.float32] * 3
    assert (state["abstract"].shape, state["abstract"].sharding) == ((2,), sharding)
    assert all(state[name] is params[name] for name in ("key", "n", "float", "name"))
    assert tx.init(None).inner_state is None


def test_scaler_with_a_python_number_is_accepted():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic()._replace(loss_scale=1024.0, finite_steps=3))
    state = tx.init(jnp.ones(2))
    new = jax.jit(tx.update)(jnp.ones(2), state)[1]
    chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
    assert jax.tree.map(lambda x: x.weak_type, state.scaler) == jax.tree.map(lambda x: x.weak_type, new.scaler)
    assert (new.scaler.loss_scale, new.scaler.finite_steps) == (1024.0, 4)


def test_with_loss_scaling_copies_its_scaler():
    """The caller may donate the scaler, and each state that is created from the scaler."""
    scaler = jax.tree.map(jnp.asarray, jmpscale.dynamic(8.0))
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), scaler)
    donate = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    donate(scaler)
    for _ in range(2):
        state = tx.init(PARAMS)
        assert state.scaler.loss_scale == 8.0
        donate(state)
        assert all(x.is_deleted() for x in jax.tree.leaves(state.scaler))


def test_init_accepts_masked_nodes_in_the_parameters_of_the_user():
    params = {"w": jnp.ones(2), "frozen": optax.MaskedNode()}
    tx = optax.chain(jmpscale.with_loss_scaling(optax.adamw(0.1, mask={"w": True, "frozen": optax.MaskedNode()})))
    state = tx.init(params)
    _, grads = jmpscale.value_and_grad(lambda params: jnp.sum(params["w"]))(state, params)
    chex.assert_trees_all_equal(grads, {"w": jnp.ones(2), "frozen": optax.MaskedNode()})


# --- every optimizer can be wrapped ---

ALIASES = {
    optax: "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw "
    "novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi",
    contrib: "acprop ademamix adopt cocob dadapt_adamw dog dowg madgrad momo momo_adam muon prodigy "
    "schedule_free_adamw schedule_free_sgd simplified_ademamix",
}
OTHERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(0)),
    "apply_every": lambda: optax.apply_every(2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=2),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.cosine_decay_schedule(1e-2, 3))),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.trace(0.9), lambda step, value, **_: (step > 0) & (value < 10), forward_extra_args=True
    ),
    "ema": lambda: optax.ema(0.9),
    "flatten": lambda: optax.flatten(optax.adam(1e-2)),
    "freeze": lambda: optax.freeze({"w": False, "b": True}),
    "galore": lambda: contrib.galore(1e-2, rank=2, update_proj_gap=2, weight_decay=0.1),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0.0, 3)),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.sgd)(1e-2, momentum=0.9),
    "lbfgs": lambda: optax.lbfgs(),
    "masked": lambda: optax.chain(optax.masked(optax.adam(1e-2), {"w": True, "b": False}), optax.scale(0.5)),
    "mechanize": lambda: contrib.mechanize(optax.adam(1e-2)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("step", optax.adam(1e-2))),
    "partition": lambda: optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, {"w": "a", "b": "b"}),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1)),
    "sam": lambda: contrib.sam(
        optax.adam(1e-2), optax.chain(contrib.normalize(), optax.sgd(0.1)), opaque_mode=True
    ),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10, store_grad=True)
    ),
    "scale_by_zoom_linesearch": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(10)),
    "schedule_free": lambda: contrib.schedule_free(optax.adam(1e-2), learning_rate=1e-2),
    "sophia": lambda: contrib.sophia(1e-2, update_interval=2),
}  # fmt: skip
OPTIMIZERS = OTHERS | {
    name: lambda module=module, name=name: getattr(module, name)(1e-2)
    for module, names in ALIASES.items()
    for name in names.split()
}
# Their states and calls are those of other optimizers in the table; only the arithmetic on arrays differs.
LIKE_OTHERS = {
    *("acprop", "adabelief", "adadelta", "adagrad", "adamax", "adamaxw", "adamw", "adan", "ademamix", "adopt"),
    *("amsgrad", "dowg", "lars", "momo_adam", "nadam", "nadamw", "novograd", "optimistic_gradient_descent", "radam"),
    *("rmsprop", "schedule_free_adamw", "sign_sgd", "signum", "yogi"),
}


def _extra_args(name, value, grads):
    """Returns the extra arguments of `update` that an optimizer needs, and the loss for all others."""
    match name:
        case "lbfgs" | "scale_by_backtracking_linesearch" | "scale_by_zoom_linesearch":
            return {"value": value, "grad": grads, "value_fn": _loss}
        case "sam":  # bare, it takes no loss
            return {"grad_fn": lambda params, i: jax.grad(_loss)(params)}
        case "sophia":
            return {"obj_fn": _loss}
        case _:
            return {"value": value}


def _train(name, tx, opt_state, value_and_grad, overflows):
    def step(carry, overflow):
        params, opt_state = carry
        value, grads = value_and_grad(opt_state, params)
        grads = jax.tree.map(lambda g: jnp.where(overflow, jnp.inf, g), grads)
        extra_args = _extra_args(name, value, grads)
        if isinstance(tx, jmpscale.LossScalingTransformation):
            extra_args["value"] = value
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (params, opt_state, updates)

    run = jax.jit(lambda opt_state: jax.lax.scan(step, (PARAMS, opt_state), overflows)[1], compiler_options=UNFUSED)
    return jax.tree.map(_key_data, run(opt_state))


def _key_data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in LIKE_OTHERS])
def test_with_loss_scaling_applies_the_steps_of_inner(name):
    inner = OPTIMIZERS[name]()
    tx = jmpscale.with_loss_scaling(inner, jmpscale.static(2.0**16))
    with jax.numpy_rank_promotion("allow"):
        plain = optax.with_extra_args_support(inner)
        *expected, _ = _train(name, plain, plain.init(PARAMS), _unscaled, np.zeros(3, bool))
        scaled, overflows = jmpscale.value_and_grad(_loss), np.array([False, False, True, False])
        params, opt_state, updates = _train(name, tx, tx.init(PARAMS), scaled, overflows)
    trained = params, opt_state.inner_state
    at = jax.tree.map(lambda x: x[np.array([0, 1, 3])], trained)
    chex.assert_trees_all_close(at, tuple(expected), rtol=1e-4, atol=1e-6)
    before, after = (jax.tree.map(lambda x, i=i: x[i], trained) for i in (1, 2))
    assert_equal_bits(before, after)
    assert all((x[2] == 0).all() for x in jax.tree.leaves(updates))
    assert opt_state.scaler.total_skips.tolist() == [0, 0, 1, 1]


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning", "ignore:the parameters are float16:UserWarning")
@pytest.mark.filterwarnings("ignore:max_norm clips the gradients of each micro-batch:UserWarning")
@pytest.mark.parametrize("name", names(OPTIMIZERS, default={"adamw", "sam"}))
def test_with_loss_scaling_keeps_the_types_of_the_state(name):
    """Parameters are float16 and their gradients float32."""
    tx = jmpscale.with_loss_scaling(OPTIMIZERS[name](), max_norm=1.0)
    params = jmpscale.cast(PARAMS, jnp.float16)

    def step(params):
        state = tx.init(params)
        with jax.numpy_rank_promotion("allow"):
            extra_args = _extra_args(name, jnp.float32(1.0), PARAMS) | {"value": jnp.float32(1.0)}
            updates, after = tx.update(PARAMS, state, params, **extra_args)
        return updates, state, after

    updates, state, after = jax.eval_shape(step, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
