"""with_loss_scaling: around every common optimizer and wrapper of optax, and where it does not belong."""

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


def _loss(params, x, poison=1.0):
    y = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16)) + params["b"][None].astype(jnp.float16)
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
        def scaled(params):
            value = loss(params, X, poison)
            return jmpscale.scale(jmpscale.get_scaler(opt_state), value), value

        grads, value = jax.grad(scaled, has_aux=True)(params)
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
def test_three_steps_of_each_optimizer_with_one_compilation(name, dtype):
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


@pytest.mark.once
@pytest.mark.parametrize("name", some(list(OPTIMIZERS), default=["adamw"]))
def test_in_float32_it_equals_the_optimizer_without_scaling(name):
    def loss(params, x, poison):
        return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"][None]) ** 2) * poison

    inner = OPTIMIZERS[name]()
    tx = jmpscale.with_loss_scaling(inner, jmpscale.dynamic(2.0**16, growth_interval=1))
    params = expected = _params()
    state, inner_state, step = tx.init(params), inner.init(params), _make_step(tx, loss)
    for _ in range(3):
        params, state, _ = step(params, state, 1.0)
        updates, inner_state = jax.jit(inner.update)(jax.grad(loss)(expected, X, 1.0), inner_state, expected)
        expected = optax.apply_updates(expected, updates)
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)


def test_negative_zero_parameters_survive_a_skip():
    tx = jmpscale.with_loss_scaling(optax.adam(1.0))
    params = jnp.array([-0.0, 0.0, 1.0])
    updates, _ = tx.update(jnp.full(3, jnp.nan), tx.init(params), params)
    assert _bits(optax.apply_updates(params, updates)) == _bits(params)


def test_value_tells_a_failed_forward_pass_from_an_overflow():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic(1024.0))
    bad = jnp.array(jnp.nan)
    _, with_value = tx.update(bad, tx.init(bad), value=jnp.float32(jnp.nan))
    _, fine_value = tx.update(bad, tx.init(bad), value=jnp.float32(1))
    _, without = tx.update(bad, tx.init(bad))
    found = [(float(s.scaler.loss_scale), int(s.scaler.last_skip)) for s in (with_value, fine_value, without)]
    assert found == [(1024.0, 2), (512.0, 1), (512.0, 1)]


def test_a_bad_value_alone_skips_nothing():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.dynamic(4.0))
    updates, state = tx.update(jnp.array(8.0), tx.init(jnp.array(1.0)), value=jnp.float32(jnp.inf))
    assert updates == -2.0
    assert state.scaler.skipped == 0


def test_extra_arguments_reach_the_inner_transformation_untouched():
    seen = {}

    def update(updates, state, params=None, *, value, value_fn, note):
        seen.update(value=value, value_fn=value_fn, note=note)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = jmpscale.with_loss_scaling(inner, jmpscale.dynamic(4.0))
    tx.update(jnp.array(1.0), tx.init(jnp.array(1.0)), value=jnp.float32(3), value_fn=jnp.tanh, note="text")
    assert seen["value_fn"] is jnp.tanh
    assert seen["note"] == "text"
    assert seen["value"].shape == ()


def test_reduce_on_plateau_reads_the_unscaled_loss():
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    tx = jmpscale.with_loss_scaling(inner)
    params, step = _params(), _make_step(tx)
    state = tx.init(params)
    _, state, _ = step(params, state, 1.0)
    np.testing.assert_allclose(optax.tree.get(state, "best_value"), _loss(params, X), rtol=1e-6)


def test_inner_transformations_without_extra_arguments_and_without_params():
    tx = jmpscale.with_loss_scaling(optax.scale(-1.0), jmpscale.static(2.0))
    updates, _ = tx.update(jnp.array(2.0), tx.init(jnp.array(1.0)))
    assert updates == -1.0


def test_the_inner_update_is_traced_once():
    traces = []

    def update(updates, state, params=None):
        traces.append(1)
        return updates, state

    tx = jmpscale.with_loss_scaling(optax.GradientTransformation(lambda p: (), update))
    jax.jit(tx.update)(jnp.array(1.0), tx.init(jnp.array(1.0)))
    assert len(traces) == 1


def test_clipping_sees_unscaled_gradients():
    tx = jmpscale.with_loss_scaling(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), jmpscale.static(2.0**16)
    )
    grads = jnp.array([3.0, 4.0]) * 2.0**16 / 10
    updates, _ = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates, [-0.3, -0.4], rtol=1e-6)


def test_around_inject_hyperparams():
    tx = jmpscale.with_loss_scaling(
        optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1.0, 0.0, 10))
    )
    params, step = _params(), _make_step(tx)
    state = tx.init(params)
    for poison, rate, count in ((1.0, 1.0, 1), (jnp.nan, 1.0, 1), (1.0, 0.9, 2)):
        params, state, _ = step(params, state, poison)
        np.testing.assert_allclose(state.inner_state.hyperparams["learning_rate"], rate)
        assert state.inner_state.count == count


def test_around_partition():
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


def _micro_batches(tx, poisons, accumulate):
    params, step = _params(), _make_step(tx, lambda p, x, poison: accumulate(p, poison))
    state = tx.init(params)
    for poison in poisons:
        params, state, _ = step(params, state, poison)
    return params, state


def test_around_multi_steps_only_the_bad_micro_batch_is_dropped():
    def loss(params, weight):
        return jnp.sum(params["w"]) * weight

    def make(k):
        return jmpscale.with_loss_scaling(
            optax.MultiSteps(optax.sgd(1.0), k).gradient_transformation(), jmpscale.dynamic(2.0**8)
        )

    good, _ = _micro_batches(make(3), [1.0, 2.0, 3.0], loss)
    mixed, state = _micro_batches(make(3), [1.0, jnp.nan, 2.0, jnp.inf, 3.0], loss)
    chex.assert_trees_all_close(mixed, good)
    np.testing.assert_allclose(good["w"], _params()["w"] - 2.0, rtol=1e-6)
    assert jmpscale.get_scaler(state).skipped == 2


def test_inside_multi_steps_is_wrong_one_overflow_spoils_the_sum_for_good():
    tx = optax.MultiSteps(jmpscale.with_loss_scaling(optax.sgd(1.0)), 2).gradient_transformation()
    state = tx.init(jnp.array(1.0))
    for grad in (jnp.inf, 1.0, 1.0, 1.0, 1.0, 1.0):
        _, state = tx.update(jnp.array(grad), state, jnp.array(1.0))
    assert jmpscale.get_scaler(state).skipped == 3, (
        "every window after the overflow is lost, though its gradients are 1"
    )


def test_inside_masked_is_wrong_the_other_parameters_get_scaled_gradients():
    params = {"a": jnp.array(1.0), "b": jnp.array(1.0)}
    grads = {"a": jnp.array(8.0), "b": jnp.array(8.0)}
    inside = optax.masked(jmpscale.with_loss_scaling(optax.identity(), jmpscale.static(8.0)), {"a": True, "b": False})
    around = jmpscale.with_loss_scaling(optax.masked(optax.identity(), {"a": True, "b": False}), jmpscale.static(8.0))
    wrong, _ = inside.update(grads, inside.init(params), params)
    right, _ = around.update(grads, around.init(params), params)
    assert (wrong["a"], wrong["b"]) == (1.0, 8.0)
    assert (right["a"], right["b"]) == (1.0, 1.0)


def test_inside_one_part_of_partition_is_wrong_an_overflow_in_the_other_part_is_not_seen():
    params = {"a": jnp.array(1.0), "b": jnp.array(1.0)}
    inside = optax.partition(
        {"x": jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.static(8.0)), "y": optax.sgd(1.0)},
        {"a": "x", "b": "y"},
    )
    updates, _ = inside.update({"a": jnp.array(8.0), "b": jnp.array(jnp.inf)}, inside.init(params), params)
    assert updates["a"] == -1.0
    assert not jnp.isfinite(updates["b"])


def test_first_inside_chain_unscales_for_what_follows():
    tx = optax.chain(jmpscale.with_loss_scaling(optax.identity(), jmpscale.dynamic(4.0)), optax.sgd(1.0))
    state = tx.init(jnp.array(1.0))
    updates, state = tx.update(jnp.array(8.0), state, jnp.array(1.0))
    assert updates == -2.0
    updates, state = tx.update(jnp.array(jnp.nan), state, jnp.array(1.0))
    assert updates == 0.0
    assert optax.tree.get(state, "loss_scale") == 2.0


def test_parameters_that_are_no_numbers_are_left_alone():
    params = {"w": jnp.ones(2, jnp.float16), "key": jax.random.key(0), "n": jnp.array(3)}
    tx = jmpscale.with_loss_scaling(optax.identity())
    grads = {"w": jnp.ones(2, jnp.float16), "key": None, "n": None}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["w"].dtype == jnp.float32


def test_integer_updates_are_zero_on_a_skip():
    tx = jmpscale.with_loss_scaling(optax.identity())
    grads = {"a": jnp.array(jnp.nan), "n": jnp.array(3)}
    updates, _ = tx.update(grads, tx.init(grads))
    assert updates["n"] == 0


def test_under_vmap_each_member_skips_alone():
    tx = jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(8.0))
    params = jnp.ones(3)
    state = jax.vmap(tx.init)(params)
    updates, state = jax.vmap(tx.update)(jnp.array([1.0, jnp.inf, 1.0]), state, params)
    np.testing.assert_array_equal(updates == 0, [False, True, False])
    np.testing.assert_array_equal(state.scaler.loss_scale, [8.0, 4.0, 8.0])


def test_disabled_is_the_inner_transformation():
    tx = jmpscale.with_loss_scaling(optax.sgd(1.0), jmpscale.disabled())
    updates, state = tx.update(jnp.array(jnp.nan), tx.init(jnp.array(1.0)))
    assert jnp.isnan(updates)
    assert state.scaler.skipped == 0


def test_the_default_scaler_is_dynamic_and_init_works_under_jit():
    tx = jmpscale.with_loss_scaling(optax.adam(1e-3))
    assert jmpscale.get_scaler(jax.jit(tx.init)(jnp.ones(2))).config == jmpscale.ScalerConfig()
    shapes = jax.eval_shape(tx.init, jnp.ones(2))
    assert jmpscale.get_scaler(shapes).loss_scale.dtype == jnp.float32


def test_multi_steps_itself_and_other_objects():
    tx = jmpscale.with_loss_scaling(optax.MultiSteps(optax.sgd(1.0), 2))
    tx.update(jnp.array(1.0), tx.init(jnp.array(1.0)), jnp.array(1.0))
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation, got function\. Pass one"):
        jmpscale.with_loss_scaling(optax.adam)
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation, got SimpleNamespace"):
        jmpscale.with_loss_scaling(types.SimpleNamespace(init=optax.adam(1.0).init))


# --- get_scaler, replace_scaler ---


def test_the_scaler_is_found_in_a_train_state_and_replaced():
    tx = optax.chain(jmpscale.with_loss_scaling(optax.adam(1e-3), jmpscale.dynamic(8.0)))
    state = TrainState.create(apply_fn=lambda x: x, params={"w": jnp.ones(2)}, tx=tx)
    assert jmpscale.get_scaler(state).loss_scale == 8.0
    replaced = jmpscale.replace_scaler(state, jmpscale.static(4.0))
    assert jmpscale.get_scaler(replaced).config.mode == "static"
    chex.assert_trees_all_equal(replaced.params, state.params)


@pytest.mark.parametrize(
    ("tree", "number"), [({"w": 1.0}, 0), ([jmpscale.dynamic(), jmpscale.dynamic()], 2), (None, 0)]
)
def test_no_scaler_or_several_is_an_error(tree, number):
    for call in (jmpscale.get_scaler, lambda t: jmpscale.replace_scaler(t, jmpscale.dynamic())):
        with pytest.raises(ValueError, match=f"exactly one ScalerState, found {number} in a"):
            call(tree)


def test_flax_nnx_wraps_the_state_and_all_still_works():
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    tx = jmpscale.with_loss_scaling(optax.adam(1e-2), jmpscale.dynamic(2.0**10))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, poison):
        def scaled(model):
            loss = jnp.mean(model(x) ** 2) * poison
            return jmpscale.scale(jmpscale.get_scaler(optimizer.opt_state), loss), loss

        grads, loss = nnx.grad(scaled, has_aux=True)(model)
        optimizer.update(model, grads, value=loss)
        return loss

    kernel = np.asarray(model.kernel[...])
    step(model, optimizer, X, 1.0)
    moved = np.asarray(model.kernel[...])
    assert (moved != kernel).all()
    step(model, optimizer, X, jnp.inf)
    np.testing.assert_array_equal(model.kernel[...], moved)
    assert jmpscale.get_scaler(optimizer.opt_state).last_skip == 2
    optimizer.opt_state = jmpscale.replace_scaler(
        optimizer.opt_state, jmpscale.dynamic(2.0**10)._replace(loss_scale=jnp.float32(64))
    )
    assert jmpscale.get_scaler(optimizer.opt_state).loss_scale == 64.0
    step(model, optimizer, X, 1.0)
    assert (np.asarray(model.kernel[...]) != moved).all()
    assert jmpscale.get_scaler(optimizer.opt_state).good_steps == 1
