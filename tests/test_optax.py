"""with_loss_scaling: around the optimizers and wrappers of optax, and where it does not belong."""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jmpscale

from cases import some, some_of_all

pytestmark = pytest.mark.usefixtures("standard_promotion")

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 100), weight_decay=0.1),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "adabelief": lambda: optax.adabelief(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
}


def _loss(params, x, poison=1.0, dtype=jnp.float16):
    y = jnp.tanh(x.astype(dtype) @ params["w"].astype(dtype)) + params["b"][None].astype(dtype)
    return jnp.mean(y.astype(jnp.float32) ** 2) * poison


def _params(dtype=jnp.float32):
    w = np.random.default_rng(0).standard_normal((4, 8)) * 0.5
    return {"w": jnp.asarray(w, dtype), "b": jnp.zeros(8, dtype)}


X = jnp.asarray(np.random.default_rng(1).standard_normal((16, 4)), jnp.float32)


def _make_step(tx, loss=_loss):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, opt_state, poison):
        value, grads = jmpscale.value_and_grad(loss)(opt_state, params, X, poison)
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state, updates

    return step


def _bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_of_all(
        OPTIMIZERS,
        ["float16", "bfloat16", "float32"],
        default=[("adamw", "float16"), ("adafactor", "bfloat16"), ("momentum", "float32")],
    ),
)
def test_with_loss_scaling_steps_and_skips_with_one_compilation(name, dtype):
    tx = jmpscale.with_loss_scaling(OPTIMIZERS[name](), jmpscale.dynamic(2.0**8))
    params, step = _params(dtype), _make_step(tx)
    state = tx.init(params)
    before = _bits(params)
    for _ in range(3):
        params, state, _ = step(params, state, 1.0)
    assert _bits(params)[1] != before[1]
    assert jax.tree.leaves(params)[0].dtype == dtype
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves((params, state)))
    skipped, after, updates = step(params, state, jnp.nan)
    assert _bits(skipped) == _bits(params)
    assert _bits(after.inner_state) == _bits(state.inner_state)
    assert all((x == 0).all() and np.signbit(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(updates))
    assert jmpscale.get_scaler(after).skipped == 1


# Compiled without LLVM's optimizations, which round a product and a sum once in one program and twice in another.
UNFUSED = {"xla_backend_optimization_level": 0}


def _scaled_grad(loss):
    def grad(opt_state, params):
        return jmpscale.value_and_grad(loss)(opt_state, params)[1]

    return grad


def _plain_grad(loss):
    def grad(opt_state, params):
        return jax.grad(loss)(params)

    return grad


@pytest.mark.once
@pytest.mark.parametrize("make_grad", [_plain_grad, _scaled_grad])
@pytest.mark.parametrize("name", some(list(OPTIMIZERS), default=["adamw"]))
def test_with_loss_scaling_equals_the_bare_optimizer_on_finite_steps(name, make_grad, platform):
    """Bit for bit, whether the gradients come from `jax.grad` or from `value_and_grad`: it divides nothing."""
    inner = OPTIMIZERS[name]()
    tx = jmpscale.with_loss_scaling(inner, jmpscale.dynamic(2.0**16, growth_interval=1))

    def loss(params):
        return _loss(params, X, dtype=jnp.float32)

    def program(tx, grad):
        @functools.partial(jax.jit, compiler_options=UNFUSED)
        def step(params, state):
            # The barrier keeps XLA from fusing the gradients with different consumers.
            grads = jax.lax.optimization_barrier(grad(state, params))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, state = _params(), tx.init(_params())
        for _ in range(3):
            params, state = step(params, state)
        return params, state

    params, state = program(tx, make_grad(loss))
    expected = program(inner, _plain_grad(loss))
    assert state.scaler.loss_scale == 2.0**19
    if name == "rmsprop":  # XLA approximates an inverse root in another way in another loop
        chex.assert_trees_all_close((params, state.inner_state), expected, rtol=1e-5)
    else:
        assert _bits((params, state.inner_state)) == _bits(expected)


def test_with_loss_scaling_keeps_parameters_of_negative_zero_on_a_skip():
    tx = jmpscale.with_loss_scaling(optax.adam(1.0))
    params = jnp.array([-0.0, 0.0, 1.0])
    updates, _ = tx.update(jnp.full(3, jnp.nan), tx.init(params), params)
    assert _bits(optax.apply_updates(params, updates)) == _bits(params)


@pytest.mark.parametrize("name", ["value", "loss"])
def test_with_loss_scaling_reads_the_loss_by_either_name(name, platform):
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic(1024.0))
    update = jax.jit(tx.update)
    bad = jnp.array(jnp.nan)
    states = [update(bad, tx.init(bad), **loss)[1] for loss in ({name: jnp.float32(jnp.nan)}, {name: 1.0}, {})]
    found = [(float(state.scaler.loss_scale), int(state.scaler.last_skip)) for state in states]
    assert found == [
        (1024.0, jmpscale.SkipReason.LOSS),
        (512.0, jmpscale.SkipReason.GRADIENTS),
        (512.0, jmpscale.SkipReason.GRADIENTS),
    ]
    # A finite gradient is applied, whatever the loss is.
    updates, state = update(jnp.array(2.0), tx.init(bad), **{name: jnp.float32(jnp.inf)})
    assert updates == -2.0
    assert state.scaler.skipped == 0


def test_with_loss_scaling_passes_extra_arguments_to_inner_unchanged():
    seen = {}

    def update(updates, state, params=None, *, value, value_fn, note):
        seen.update(value=value, value_fn=value_fn, note=note)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = jmpscale.with_loss_scaling(inner, jmpscale.dynamic(4.0))
    value = jnp.float32(3)
    tx.update(jnp.array(1.0), tx.init(jnp.array(1.0)), value=value, value_fn=jnp.tanh, note="text")
    assert seen["value"] is value
    assert seen["value_fn"] is jnp.tanh
    assert seen["note"] == "text"


def test_with_loss_scaling_passes_extra_arguments_to_multi_steps(platform):
    """`optax.MultiSteps` is not a `GradientTransformation`; inside it, `polyak_sgd` requires `value=`."""
    inner = optax.MultiSteps(optax.polyak_sgd(), 2)
    tx = jmpscale.with_loss_scaling(inner)
    grads = params = jnp.ones(2)
    state, expected = tx.init(params), inner.init(params)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(grads, state, params, value=jnp.float32(1))
        want, expected = jax.jit(inner.update)(grads, expected, params, value=jnp.float32(1))
    np.testing.assert_array_equal(updates, want)
    np.testing.assert_array_equal(updates, [-0.5, -0.5])


def _takes_value(updates, state, params, value=0.0):
    return updates * value, state


def _takes_all(updates, state, params, **extra_args):
    return updates * extra_args["value"] * extra_args["other"], state


def _takes_none(updates, state, params):
    return updates, state


@pytest.mark.parametrize(("update", "expected"), [(_takes_value, 3.0), (_takes_all, 6.0), (_takes_none, 1.0)])
def test_with_loss_scaling_passes_to_other_objects_the_arguments_that_they_take(update, expected):
    inner = types.SimpleNamespace(init=lambda params: (), update=update)
    tx = jmpscale.with_loss_scaling(inner)
    updates, _ = tx.update(jnp.array(1.0), tx.init(jnp.array(1.0)), value=jnp.float32(3), other=jnp.float32(2))
    assert updates == expected


def test_with_loss_scaling_without_extra_arguments_and_without_params():
    tx = jmpscale.with_loss_scaling(optax.scale(-1.0), jmpscale.static(2.0))
    updates, _ = tx.update(jnp.array(2.0), tx.init(jnp.array(1.0)))
    assert updates == -2.0


def test_with_loss_scaling_traces_the_inner_update_once(platform):
    traces = []

    def update(updates, state, params=None):
        traces.append(1)
        return updates, state

    tx = jmpscale.with_loss_scaling(optax.GradientTransformation(lambda p: (), update))
    jax.jit(tx.update)(jnp.array(1.0), tx.init(jnp.array(1.0)))
    assert len(traces) == 1


# --- max_norm and grad_norm ---


@pytest.mark.parametrize("scaler", [jmpscale.dynamic(), jmpscale.static(1.0), jmpscale.disabled()])
@pytest.mark.parametrize("norm", [0.5, 5.0])
def test_with_loss_scaling_keeps_the_norm_before_clipping(norm, scaler, platform):
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), scaler, max_norm=1.0)
    grads = {"w": jnp.array([0.6, 0.0]) * norm, "h": jnp.array([0.0, 0.8], jnp.bfloat16) * norm, "n": None}
    state = tx.init(grads)
    assert (state.grad_norm, state.grad_norm.dtype, state.grad_norm.shape) == (0.0, jnp.float32, ())
    updates, state = jax.jit(tx.update)(grads, state)
    assert (state.grad_norm.dtype, state.grad_norm.shape) == (jnp.float32, ())
    np.testing.assert_allclose(state.grad_norm, norm, rtol=2e-3)  # 0.8 in bfloat16
    np.testing.assert_allclose(optax.tree.norm(updates["w"]), 0.6 * min(norm, 1), rtol=2e-3)


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan, 1e30])
def test_with_loss_scaling_keeps_an_infinite_norm_on_a_skip(bad, platform):
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), max_norm=1.0)
    updates, state = jax.jit(tx.update)(jnp.array([1.0, bad]), tx.init(jnp.zeros(2)))
    assert state.grad_norm == jnp.inf
    assert state.scaler.skipped == 1
    np.testing.assert_array_equal(updates, [0.0, 0.0])


def test_with_loss_scaling_keeps_the_norm_in_float32_where_a_gradient_is_float64(x64):
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), max_norm=1.0)
    grads = jnp.array([3.0, 4.0], jnp.float64)
    _, state = jax.jit(tx.update)(grads, tx.init(grads))
    assert (state.grad_norm, state.grad_norm.dtype) == (5.0, jnp.float32)


def test_with_loss_scaling_has_no_norm_without_max_norm():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0))
    state = tx.init(jnp.array(1.0))
    assert state.grad_norm is None
    _, state = tx.update(jnp.array(1.0), state)
    assert state.grad_norm is None
    assert "grad_norm" not in jmpscale.metrics(state)


def test_metrics_of_an_optimizer_state_have_the_norm():
    tx = optax.chain(jmpscale.with_loss_scaling(optax.adam(1e-3), jmpscale.dynamic(8.0), max_norm=1.0))
    grads = jnp.array([3.0, 4.0])
    _, state = tx.update(grads, tx.init(grads))
    metrics = jmpscale.metrics(state)
    assert set(metrics) == {*jmpscale.metrics(jmpscale.dynamic()), "grad_norm"}
    assert (metrics["loss_scale"], metrics["finite_steps"], metrics["grad_norm"]) == (8.0, 1, 5.0)


FP8 = "_overwrite_with_gradient"


def _fp8_grads(amax, w=0.4):
    """What Flax's fp8 layers return: a gradient of norm 0.5, and a value that replaces the old one."""
    return {"params": {"w": jnp.array([0.3, w])}, FP8: {"amax_history": jnp.array([amax])}}


@pytest.mark.parametrize(("max_norm", "factor"), [(None, 1.0), (1.0, 1.0), (0.25, 0.5)])
def test_with_loss_scaling_neither_counts_nor_clips_what_fp8_layers_overwrite(max_norm, factor, platform):
    tx = jmpscale.with_loss_scaling(optax.identity(), max_norm=max_norm)
    grads = _fp8_grads(1000.0)
    updates, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    np.testing.assert_allclose(updates["params"]["w"], [0.3 * factor, 0.4 * factor], rtol=1e-6)
    np.testing.assert_array_equal(updates[FP8]["amax_history"], [1000.0])
    if max_norm:
        np.testing.assert_allclose(state.grad_norm, 0.5, rtol=1e-6)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("grads", [_fp8_grads(jnp.inf), _fp8_grads(jnp.nan), _fp8_grads(1.0, w=jnp.inf)])
def test_with_loss_scaling_checks_what_fp8_layers_overwrite(grads, max_norm, platform):
    tx = jmpscale.with_loss_scaling(optax.identity(), max_norm=max_norm)
    updates, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    assert state.scaler.skipped == 1
    assert all((x == 0).all() for x in jax.tree.leaves(updates))


def test_grad_report_omits_what_fp8_layers_overwrite():
    report = jmpscale.grad_report(_fp8_grads(1000.0), scaler=jmpscale.static(2.0**16))
    assert report.paths == ("params/w",)
    np.testing.assert_allclose(report.max_abs, [0.4 * 2.0**16], rtol=1e-6)


# --- around wrappers of optax, and inside them ---


def test_with_loss_scaling_around_reduce_on_plateau_passes_the_unscaled_loss():
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    tx = jmpscale.with_loss_scaling(inner)
    params, step = _params(), _make_step(tx)
    _, state, _ = step(params, tx.init(params), 1.0)
    np.testing.assert_allclose(optax.tree.get(state, "best_value"), _loss(params, X), rtol=1e-6)


def test_with_loss_scaling_around_inject_hyperparams():
    tx = jmpscale.with_loss_scaling(
        optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1.0, 0.0, 10))
    )
    params, step = _params(), _make_step(tx)
    state = tx.init(params)
    for poison, rate, count in ((1.0, 1.0, 1), (jnp.nan, 1.0, 1), (1.0, 0.9, 2)):
        params, state, _ = step(params, state, poison)
        np.testing.assert_allclose(state.inner_state.hyperparams["learning_rate"], rate)
        assert state.inner_state.count == count


def test_with_loss_scaling_around_partition():
    tx = jmpscale.with_loss_scaling(
        optax.partition({"a": optax.adam(1e-2), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
        jmpscale.dynamic(2.0**8),
    )
    params, step = _params(), _make_step(tx)
    before, state = _bits(params), tx.init(params)
    params, state, _ = step(params, state, 1.0)
    assert [x == y for x, y in zip(before, _bits(params), strict=True)] == [True, False]
    skipped, _, _ = step(params, state, jnp.inf)
    assert _bits(skipped) == _bits(params)


@pytest.mark.parametrize("as_object", [True, False])
def test_with_loss_scaling_around_multi_steps_skips_only_the_micro_batch_that_overflows(as_object, platform):
    def train(poisons):
        window = optax.MultiSteps(optax.sgd(1.0), 3)
        tx = jmpscale.with_loss_scaling(
            window if as_object else window.gradient_transformation(), jmpscale.dynamic(2.0**8)
        )
        params, step = _params(), _make_step(tx, lambda params, x, weight: jnp.sum(params["w"]) * weight)
        state = tx.init(params)
        for poison in poisons:
            params, state, _ = step(params, state, poison)
        return params, state

    good, _ = train([1.0, 2.0, 3.0])
    mixed, state = train([1.0, jnp.nan, 2.0, jnp.inf, 3.0])
    chex.assert_trees_all_close(mixed, good)
    np.testing.assert_allclose(good["w"], _params()["w"] - 2.0, rtol=1e-6)
    assert jmpscale.get_scaler(state).skipped == 2


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(optax.scale(1.0), tx)], ids=["alone", "chain"])
def test_with_loss_scaling_inside_multi_steps_warns_and_raise_if_stuck_names_the_cause(wrap):
    tx = optax.MultiSteps(wrap(jmpscale.with_loss_scaling(optax.sgd(1.0))), 2).gradient_transformation()
    with pytest.warns(
        UserWarning, match=r"inside optax\.MultiSteps.*Place it outside: with_loss_scaling\(optax\.Multi"
    ):
        state = tx.init(jnp.array(1.0))
    for grad in (jnp.inf, 1.0, 1.0, 1.0, 1.0, 1.0):
        _, state = tx.update(jnp.array(grad), state, jnp.array(1.0))
    assert jmpscale.get_scaler(state).skipped == 3, "every window is skipped, though all later gradients are 1"
    with pytest.raises(FloatingPointError, match=r"gradients that optax\.MultiSteps has accumulated are not finite"):
        jmpscale.raise_if_stuck(state, max_consecutive_skips=2)


def _part_of_masked(tx):
    return optax.masked(tx, {"a": True, "b": False})


def _part_of_partition(tx):
    return optax.partition({"x": tx, "y": optax.identity()}, {"a": "x", "b": "y"})


@pytest.mark.parametrize("part", [_part_of_masked, _part_of_partition])
def test_with_loss_scaling_inside_a_part_does_not_see_an_overflow_in_the_rest(part):
    params = {"a": jnp.array(1.0), "b": jnp.array(1.0)}
    grads = {"a": jnp.array(8.0), "b": jnp.array(jnp.inf)}
    inside = part(jmpscale.with_loss_scaling(optax.sgd(1.0)))
    updates, _ = inside.update(grads, inside.init(params), params)
    assert updates["a"] == -8.0
    assert not jnp.isfinite(updates["b"])
    around = jmpscale.with_loss_scaling(part(optax.sgd(1.0)))
    updates, _ = around.update(grads, around.init(params), params)
    assert (updates["a"], updates["b"]) == (0.0, 0.0)


def test_with_loss_scaling_first_in_a_chain_passes_zeros_on_when_it_skips(platform):
    tx = optax.chain(jmpscale.with_loss_scaling(optax.identity(), jmpscale.dynamic(4.0)), optax.sgd(1.0))
    update, state = jax.jit(tx.update), tx.init(jnp.array(1.0))
    updates, state = update(jnp.array(8.0), state, jnp.array(1.0))
    assert updates == -8.0
    updates, state = update(jnp.array(jnp.nan), state, jnp.array(1.0))
    assert updates == 0.0
    assert optax.tree.get(state, "loss_scale") == 2.0


# --- leaves, batches, settings ---


def test_with_loss_scaling_leaves_parameters_that_are_not_numbers_alone():
    params = {"w": jnp.ones(2, jnp.float16), "key": jax.random.key(0), "n": jnp.array(3)}
    tx = jmpscale.with_loss_scaling(optax.identity())
    grads = {"w": jnp.ones(2), "key": None, "n": None}
    updates, _ = tx.update(grads, tx.init(params), params)
    chex.assert_trees_all_equal(updates, grads)


def test_with_loss_scaling_returns_zero_for_integers_on_a_skip():
    tx = jmpscale.with_loss_scaling(optax.identity())
    grads = {"a": jnp.array(jnp.nan), "n": jnp.array(3)}
    updates, _ = tx.update(grads, tx.init(grads))
    assert updates["n"] == 0


def test_with_loss_scaling_under_vmap_skips_for_each_member_alone(platform):
    tx = jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(8.0), max_norm=1.0)
    params = jnp.ones(3)
    state = jax.vmap(tx.init)(params)
    updates, state = jax.jit(jax.vmap(tx.update))(jnp.array([1.0, jnp.inf, 1.0]), state, params)
    np.testing.assert_array_equal(updates == 0, [False, True, False])
    np.testing.assert_array_equal(state.scaler.loss_scale, [8.0, 4.0, 8.0])
    np.testing.assert_array_equal(jmpscale.metrics(state)["grad_norm"], [1.0, jnp.inf, 1.0])


def test_with_loss_scaling_and_apply_if_accept_a_state_off_the_mesh_of_the_data():
    """Gradients of data that is sharded on Auto axes have a mesh in their types, and the initial state has none."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 3)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    inner = optax.sgd(1.0, momentum=0.5)
    tx, params = jmpscale.with_loss_scaling(inner), jnp.ones(3)

    @jax.jit
    def step(x):
        grads = x.sum(0)
        updates, state = tx.update(grads, tx.init(params), params)
        finite = jmpscale.all_finite(grads)
        after = jmpscale.apply_if(finite, jmpscale.optax_step(inner, grads), params, inner.init(params))
        return (optax.apply_updates(params, updates), state.inner_state), after

    wrapped, functional = step(x)
    np.testing.assert_array_equal(wrapped[0], [-7.0] * 3)
    chex.assert_trees_all_equal(wrapped, functional)
    step.trace(x).lower(lowering_platforms=("cuda",))


def test_with_loss_scaling_disabled_is_the_inner_transformation():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.disabled())
    updates, state = tx.update(jnp.array(jnp.nan), tx.init(jnp.array(1.0)))
    assert jnp.isnan(updates)
    assert state.scaler.skipped == 0


def test_with_loss_scaling_defaults_to_a_dynamic_scaler_and_its_init_can_be_jitted():
    tx = jmpscale.with_loss_scaling(optax.adam(1e-3))
    assert jmpscale.get_scaler(jax.jit(tx.init)(jnp.ones(2))).config == jmpscale.ScalerConfig()
    shapes = jax.eval_shape(tx.init, jnp.ones(2))
    assert jmpscale.get_scaler(shapes).loss_scale.dtype == jnp.float32


def test_with_loss_scaling_refuses_what_is_not_a_transformation():
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation, got function\. Pass one"):
        jmpscale.with_loss_scaling(optax.adam)
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation, got SimpleNamespace"):
        jmpscale.with_loss_scaling(types.SimpleNamespace(init=optax.adam(1.0).init))


# --- optax_step ---


@pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx)], ids=["alone", "chain"])
def test_optax_step_refuses_a_wrapped_optimizer(around):
    tx, params = around(jmpscale.with_loss_scaling(optax.sgd(1.0))), jnp.array(3.0)
    step = jmpscale.optax_step(tx, jnp.array(1.0))
    with pytest.raises(TypeError, match="tx must not be wrapped in with_loss_scaling"):
        jmpscale.apply_if(jnp.array(True), step, params, tx.init(params))


def test_optax_step_refuses_the_update_of_an_optimizer():
    with pytest.raises(TypeError, match=r"tx must be the optimizer, got the function .* not its update"):
        jmpscale.optax_step(optax.sgd(1.0).update, jnp.array(1.0))
    with pytest.raises(TypeError, match=r"tx must be an optax\.GradientTransformation, got ArrayImpl"):
        jmpscale.optax_step(jnp.array(1.0), optax.sgd(1.0))


# --- get_scaler, replace_scaler ---


def test_get_scaler_and_replace_scaler_in_a_train_state():
    tx = optax.chain(jmpscale.with_loss_scaling(optax.adam(1e-3), jmpscale.dynamic(8.0)))
    state = TrainState.create(apply_fn=lambda x: x, params={"w": jnp.ones(2)}, tx=tx)
    assert jmpscale.get_scaler(state).loss_scale == 8.0
    replaced = jmpscale.replace_scaler(state, jmpscale.static(4.0))
    assert jmpscale.get_scaler(replaced).config.mode == "static"
    chex.assert_trees_all_equal(replaced.params, state.params)


@pytest.mark.parametrize(
    ("tree", "number"), [({"w": 1.0}, 0), ([jmpscale.dynamic(), jmpscale.dynamic()], 2), (None, 0)]
)
def test_get_scaler_and_replace_scaler_need_exactly_one(tree, number):
    for call in (jmpscale.get_scaler, lambda t: jmpscale.replace_scaler(t, jmpscale.dynamic())):
        with pytest.raises(ValueError, match=f"exactly one ScalerState, found {number} in a"):
            call(tree)


def _donate(tree):
    """Runs a program that takes the buffers of a tree for its results."""
    return jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(tree))


def _is_deleted(scaler):
    return [x.is_deleted() for x in jax.tree.leaves(scaler)]


def test_replace_scaler_copies_so_that_both_states_can_be_donated():
    scaler = jax.tree.map(jnp.asarray, jmpscale.dynamic(8.0))
    states = [jmpscale.replace_scaler({"scaler": jmpscale.dynamic()}, scaler) for _ in range(2)]
    for state in states:
        assert _donate(state)["scaler"].loss_scale == 9.0
        assert all(_is_deleted(state["scaler"])), "the test needs a platform on which donation deletes"
    assert not any(_is_deleted(scaler))


def test_with_loss_scaling_copies_so_that_its_scaler_and_its_states_can_be_donated():
    scaler = jax.tree.map(jnp.asarray, jmpscale.dynamic(8.0))
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), scaler)
    _donate(scaler)
    for _ in range(2):
        state = tx.init(jnp.array(1.0))
        assert state.scaler.loss_scale == 8.0
        _donate(state)
        assert all(_is_deleted(state.scaler))


def test_with_loss_scaling_in_an_optimizer_of_flax_nnx():
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    tx = jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(2.0**10), max_norm=1e-3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, poison):
        def loss_fn(model):
            return jnp.mean(model(x) ** 2) * poison

        value_and_grad = jmpscale.value_and_grad(loss_fn, transform=nnx.value_and_grad)
        loss, grads = value_and_grad(optimizer.opt_state, model)
        optimizer.update(model, grads, value=loss)
        return optax.tree.norm(grads)

    kernel = np.asarray(model.kernel[...])
    norm = step(model, optimizer, X, 1.0)
    moved = np.asarray(model.kernel[...])
    assert (moved != kernel).all()
    np.testing.assert_allclose(jmpscale.metrics(optimizer.opt_state)["grad_norm"], norm, rtol=1e-5)
    assert norm > 0.1
    step(model, optimizer, X, jnp.inf)
    np.testing.assert_array_equal(model.kernel[...], moved)
    assert jmpscale.get_scaler(optimizer.opt_state).last_skip == jmpscale.SkipReason.LOSS
    optimizer.opt_state = jmpscale.replace_scaler(
        optimizer.opt_state, jmpscale.dynamic(2.0**10)._replace(loss_scale=jnp.float32(64))
    )
    assert jmpscale.get_scaler(optimizer.opt_state).loss_scale == 64.0
    step(model, optimizer, X, 1.0)
    assert (np.asarray(model.kernel[...]) != moved).all()
    assert jmpscale.get_scaler(optimizer.opt_state).finite_steps == 1
