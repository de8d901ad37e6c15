"""scale, unscale, unscale_and_check and update: dtypes, exactness, and the transformations of JAX around them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from jax.experimental import sparse

import jmpscale

import hlo

F16, BF16, F32, F64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64


# --- scale ---


@pytest.mark.parametrize(("dtype", "out"), [(F16, F32), (BF16, F32), (F32, F32), (F64, F64), (jnp.float8_e5m2, F32)])
@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:the loss is float:UserWarning")
def test_scale_promotes_to_at_least_float32(dtype, out, variant):
    scaled = variant(lambda x: jmpscale.scale(jmpscale.dynamic(), x))(jnp.ones((3,), dtype))
    assert scaled.dtype == out
    np.testing.assert_array_equal(scaled, 65536.0)


def test_scale_takes_a_tree_of_losses_and_a_python_number():
    tree = {"a": jnp.float16(4), "b": (jnp.ones((2, 2)), 0.5), "c": None}
    scaled = jmpscale.scale(jmpscale.static(2.0), tree)
    chex.assert_trees_all_equal(scaled, {"a": jnp.float32(8), "b": (jnp.full((2, 2), 2.0), jnp.float32(1)), "c": None})


@pytest.mark.parametrize("leaf", [1, True, np.int32(3), 1j, np.complex64(1), "loss", jax.numpy.tanh, b""])
def test_scale_refuses_what_is_no_loss(leaf):
    with pytest.raises(TypeError, match=r"scale takes losses of a floating-point dtype, got .* at tree\['x'\]\. Pass"):
        jmpscale.scale(jmpscale.dynamic(), {"x": leaf})


def test_scale_refuses_a_prng_key():
    with pytest.raises(TypeError, match=r"got key<fry>\[\] at tree\[0\]"):
        jmpscale.scale(jmpscale.dynamic(), [jax.random.key(0)])


def test_a_loss_returned_in_float16_caps_the_scale_at_2_to_the_15():
    def gradient(scale, w):
        with pytest.warns(UserWarning, match="the loss is float16.*in float16, where large scales are infinite"):
            return jax.grad(lambda w: jmpscale.scale(jmpscale.static(scale), (w * w).astype(F16)))(w)

    assert jnp.isfinite(gradient(2.0**15, jnp.float32(0.5)))
    assert jnp.isinf(gradient(2.0**16, jnp.float32(0.5)))


# --- unscale ---


@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (F16, F32),
        (jnp.float8_e5m2, F32),
        (jnp.float8_e4m3fn, F32),
        (BF16, BF16),
        (F32, F32),
        (F64, F64),
        (jnp.complex64, jnp.complex64),
        (jnp.complex128, jnp.complex128),
    ],
)
@pytest.mark.usefixtures("x64")
def test_unscale_widens_what_float32_must_hold_and_keeps_the_rest(dtype, out, variant):
    unscaled = variant(lambda x: jmpscale.unscale(jmpscale.static(4.0), x))(jnp.full((2,), 2.0).astype(dtype))
    assert unscaled.dtype == out
    np.testing.assert_array_equal(unscaled.astype(jnp.complex128), 0.5)


def test_unscale_passes_everything_else_through_untouched():
    float0 = jax.grad(lambda n: n * 1.0, allow_int=True)(3)
    others = [jnp.arange(3), jnp.array(True), jax.random.key(0), float0, None, "name", jnp.tanh, 3]
    out, finite = jmpscale.unscale_and_check(jmpscale.dynamic(), others)
    assert all(before is after for before, after in zip(others, out, strict=True))
    assert finite


def test_zero_size_and_empty_trees():
    for tree in ({}, (), None, jnp.zeros((0, 4), F16)):
        out, finite = jmpscale.unscale_and_check(jmpscale.dynamic(), tree)
        assert finite
        assert jax.tree.structure(out) == jax.tree.structure(tree)


def test_bcoo_keeps_its_indices():
    matrix = sparse.BCOO((jnp.array([64000.0, 32.0], F16), jnp.array([[0, 2], [1, 0]])), shape=(2, 3))
    out, finite = jmpscale.unscale_and_check(jmpscale.static(4.0), {"embedding": matrix})
    assert finite
    np.testing.assert_array_equal(out["embedding"].todense(), [[0, 0, 16000], [8, 0, 0]])


def test_static_1_changes_no_bit_of_bfloat16_or_float32():
    for dtype in (BF16, F32):
        bits = np.random.default_rng(0).integers(0, 2**16, 4096, np.uint16)
        x = jnp.asarray(bits).view(BF16).astype(dtype)
        x = x[jnp.isfinite(x) & (jnp.abs(x) >= jnp.finfo(dtype).tiny)]
        np.testing.assert_array_equal(jmpscale.unscale(jmpscale.static(1.0), x), x)


@pytest.mark.parametrize("exponent", [-126, -60, -1, 0, 1, 15, 16, 32, 100, 126])
def test_unscaling_a_scaled_value_gives_it_back_bit_for_bit(exponent):
    scaler = jmpscale.static(2.0**exponent)
    x = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    there = jmpscale.scale(scaler, x)
    normal = np.isfinite(there) & (np.abs(there) >= np.finfo(np.float32).tiny)
    assert normal.any()
    np.testing.assert_array_equal(np.asarray(jmpscale.unscale(scaler, there))[normal], x[normal])


@pytest.mark.usefixtures("x64")
def test_unscaling_by_any_scale_is_within_rounding_of_a_float64_reference():
    for scale in (3.0, 1000.0, 0.7):
        for dtype, tolerance in ((F16, 1.3e-7), (F32, 1.3e-7), (BF16, 4e-3), (F64, 3e-16)):
            x = jnp.linspace(1, 2, 999).astype(dtype)
            reference = np.asarray(x, np.float64) / np.float64(np.float32(scale))
            out = np.asarray(jmpscale.unscale(jmpscale.static(scale), x), np.float64)
            np.testing.assert_allclose(out, reference, rtol=tolerance)


def test_small_gradients_survive():
    scaler = jmpscale.static(2.0**24)
    grads, finite = jmpscale.unscale_and_check(scaler, jnp.array([1.0, 2.0**-14], F16))
    assert finite
    np.testing.assert_array_equal(grads, np.float32([2.0**-24, 2.0**-38]))


def test_complex_infinity_does_not_spread_within_a_number():
    out = jmpscale.unscale(jmpscale.static(2.0), jnp.array([complex(np.inf, 4)], jnp.complex64))
    assert jnp.imag(out)[0] == 2.0


def test_overflow_caused_by_unscaling_is_seen(variant):
    check = variant(lambda x: jmpscale.unscale_and_check(jmpscale.static(2.0**-20), x)[1])
    assert check(jnp.float32(1e30))
    assert not check(jnp.float32(3e38))


def test_the_smallest_and_largest_scale_keep_gradients_alive():
    for scale in (2.0**-126, 2.0**126):
        tiny = jnp.float32(2.0**-100 if scale < 1 else 2.0**100)
        grad = jmpscale.unscale(jmpscale.static(scale), tiny)
        assert jnp.isfinite(grad)
        assert grad == tiny / jnp.float32(scale) != 0


def test_unscale_is_differentiable():
    scaler = jmpscale.static(8.0)
    assert jax.grad(lambda x: jmpscale.unscale(scaler, x))(jnp.float32(3)) == 0.125
    assert jax.grad(lambda x: jmpscale.scale(scaler, x))(jnp.float32(3)) == 8.0


def test_unscale_keeps_values_that_overwrite_instead_of_a_gradient():
    own = {"amax": jnp.array([3.0]), "scale": [jnp.array(2.0)]}  # as in Flax's fp8 layers
    grads = {"params": {"w": jnp.array([8.0])}, "_overwrite_with_gradient": {"dense": own}}
    for tree in (grads, (grads, jnp.array(8.0)), FrozenDict(grads)):
        unscaled, finite = jmpscale.unscale_and_check(jmpscale.dynamic(4.0), tree)
        assert jax.tree.structure(unscaled) == jax.tree.structure(tree)
        first = unscaled[0] if isinstance(tree, tuple) else unscaled
        chex.assert_trees_all_equal(dict(first["params"]), {"w": jnp.array([2.0])})
        chex.assert_trees_all_equal(jax.tree.leaves(first["_overwrite_with_gradient"]), jax.tree.leaves(own))
        assert finite


def test_unscale_keeps_weak_types():
    for x in (1.5, jnp.asarray(1.5), jnp.float32(1.5), np.float32(1.5)):
        out = jmpscale.unscale(jmpscale.static(4.0), x)
        assert jax.typeof(out) == jax.typeof(jnp.asarray(x))
        assert out == 0.375


# --- invalid arguments ---

CALLS = {
    "scale": lambda s: jmpscale.scale(s, 1.0),
    "unscale": lambda s: jmpscale.unscale(s, 1.0),
    "unscale_and_check": lambda s: jmpscale.unscale_and_check(s, 1.0),
    "update": lambda s: jmpscale.update(s, True),
    "raise_if_stuck": lambda s: jmpscale.raise_if_stuck(s, max_consecutive_skips=1),
    "to_torch_state_dict": jmpscale.to_torch_state_dict,
    "with_loss_scaling": lambda s: jmpscale.with_loss_scaling(optax.sgd(1.0), s),
    "replace_scaler": lambda s: jmpscale.replace_scaler(jmpscale.dynamic(), s),
}


@pytest.mark.parametrize("make", [jmpscale.dynamic, jmpscale.disabled])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_batch_of_scalers_outside_vmap_is_refused(call, make):
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), make())
    with pytest.raises(ValueError, match=r"one scaler, got a batch with loss_scale of shape \(2,\).*vmap"):
        call(batch)


TAKE_ANY_HOLDER = ["raise_if_stuck"]


@pytest.mark.parametrize("name", [name for name in CALLS if name not in TAKE_ANY_HOLDER])
def test_something_else_in_the_place_of_the_state_is_refused(name):
    with pytest.raises(TypeError, match=r"(state|scaler) must be a ScalerState, got dict.*get_scaler finds it"):
        CALLS[name]({"w": 1.0})


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_scaler_with_arrays_of_other_types_is_refused(call):
    for field, value, kind in (
        ("finite_steps", jnp.int8(0), "integer"),  # growth_interval would wrap around
        ("finite_steps", jnp.int16(0), "integer"),
        ("skipped", jnp.float32(0), "integer"),
        ("consecutive_skips", jnp.zeros(2, jnp.int32), "integer"),
        ("loss_scale", jnp.float16(1024), "floating"),
        ("loss_scale", jnp.bfloat16(1024), "floating"),
        ("loss_scale", jnp.int32(1024), "floating"),
    ):
        message = rf"{field} must be a scalar of a {kind} dtype of 32 bits, got {value.dtype}\[.*created by jmpscale"
        with pytest.raises(TypeError, match=message):
            call(jmpscale.dynamic()._replace(**{field: value}))


@pytest.mark.parametrize("finite", [1, 1.0, None, "yes", np.int32(1), np.ones(())])
def test_update_refuses_what_is_no_flag(finite):
    with pytest.raises(TypeError, match=r"finite must be a boolean, got .*unscale_and_check"):
        jmpscale.update(jmpscale.dynamic(), finite)


def test_update_refuses_several_flags():
    with pytest.raises(ValueError, match=r"finite must be a scalar, got shape \(2,\)\. Combine"):
        jmpscale.update(jmpscale.dynamic(), jnp.array([True, False]))


# --- update: what the loss explains ---


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_loss_that_is_not_finite_explains_a_skip_and_never_causes_one(bad, shape, variant):
    state = jmpscale.dynamic(1024.0, hysteresis=2)
    loss = jnp.full(shape, bad)
    after = variant(lambda loss, finite: jmpscale.update(state, finite, loss=loss))
    skipped = after(loss, jnp.array(False))
    assert [x.item() for x in jax.tree.leaves(skipped)] == [1024.0, 0, 2, 1, 1, 2]
    fine = after(loss, jnp.array(True))
    assert [x.item() for x in jax.tree.leaves(fine)] == [1024.0, 1, 2, 0, 0, 0]
    overflow = after(jnp.zeros(shape), jnp.array(False))
    assert [x.item() for x in jax.tree.leaves(overflow)] == [1024.0, 0, 1, 1, 1, 1]


def test_one_bad_loss_in_a_tree_is_enough():
    losses = {"a": jnp.float16(1), "b": jnp.array([1.0, jnp.nan])}
    assert jmpscale.update(jmpscale.dynamic(), False, loss=losses).last_skip == 2


def test_static_counts_and_never_changes():
    state = jmpscale.static(8.0)
    for finite, leaves in (
        (True, [8.0, 1, 1, 0, 0, 0]),
        (False, [8.0, 0, 1, 1, 1, 1]),
        (False, [8.0, 0, 1, 2, 2, 1]),
        (True, [8.0, 1, 1, 2, 0, 1]),
    ):
        state = jmpscale.update(state, finite)
        assert [x.item() for x in jax.tree.leaves(state)] == leaves
    state = state._replace(finite_steps=jnp.int32(5000))
    assert jmpscale.update(state, True).finite_steps == 5001, "a static scaler ignores the growth interval"


# --- inside the transformations of JAX ---


def _train(steps, scaler, gradient_dtype=F16):
    """Runs a few steps on a quadratic, with an overflow injected at step 2."""

    def one(carry, step):
        w, scaler = carry

        def loss(w):
            half = w.astype(gradient_dtype)
            return (half * half).astype(F32) * jnp.where(step == 2, jnp.inf, 1.0)

        grads = jax.grad(lambda w: jmpscale.scale(scaler, loss(w)))(w)
        grads, finite = jmpscale.unscale_and_check(scaler, grads)
        w = jmpscale.apply_if(finite, lambda w: w - 0.25 * grads, w)
        return (w, jmpscale.update(scaler, finite)), scaler.loss_scale

    return jax.lax.scan(one, (jnp.float32(1), scaler), jnp.arange(steps))


def test_inside_scan_the_state_is_a_carry():
    (w, scaler), scales = _train(5, jmpscale.dynamic(2.0**10, growth_interval=2))
    np.testing.assert_array_equal(scales, 2.0 ** np.array([10, 10, 11, 10, 10]))
    assert w == 0.5**4
    assert scaler.skipped == 1


def test_inside_while_cond_remat_and_vmap_it_is_the_same():
    expected = _train(5, jmpscale.dynamic(2.0**10, growth_interval=2))
    rematted = jax.jit(jax.remat(lambda s: _train(5, s)))(jmpscale.dynamic(2.0**10, growth_interval=2))
    chex.assert_trees_all_equal(rematted, expected)
    start = jmpscale.dynamic(2.0**10, growth_interval=2)
    conditional = jax.lax.cond(True, lambda s: _train(5, s), lambda s: _train(5, jmpscale.update(s, False)), start)
    chex.assert_trees_all_equal(conditional, expected)
    batch = jax.tree.map(lambda x: jnp.stack([x] * 3), jmpscale.dynamic(2.0**10, growth_interval=2))
    mapped = jax.vmap(lambda s: _train(5, s))(batch)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[1], mapped), expected)

    def body(state):
        return jmpscale.update(state, state.skipped == 3)

    out = jax.lax.while_loop(lambda s: s.skipped < 3, body, jmpscale.dynamic(2.0**10))
    assert out.loss_scale == 2.0**7


def test_inside_custom_vjp_code():
    @jax.custom_vjp
    def double_gradient(x):
        return x

    def backward(_, g):
        grads, finite = jmpscale.unscale_and_check(jmpscale.static(4.0), g)
        return (jnp.where(finite, grads * 8, 0.0),)

    double_gradient.defvjp(lambda x: (x, None), backward)
    assert jax.grad(lambda x: double_gradient(x) ** 2)(jnp.float32(3)) == 12.0


def test_update_adjusts_each_scaler_of_a_batch_under_vmap():
    batch = jax.tree.map(lambda x: jnp.stack([x] * 3), jmpscale.dynamic(16.0, growth_interval=1))
    batch = batch._replace(loss_scale=jnp.array([4.0, 8.0, 16.0]))
    out = jax.vmap(jmpscale.update)(batch, jnp.array([True, False, True]))
    np.testing.assert_array_equal(out.loss_scale, [8.0, 4.0, 32.0])
    np.testing.assert_array_equal(out.skipped, [0, 1, 0])


# --- disabled() costs nothing ---


def _mlp_loss(params, batch):
    x, y = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def _functional_step(tx):
    def step(params, opt_state, scaler, batch):
        loss = _mlp_loss(params, batch)
        grads = jax.grad(lambda params: jmpscale.scale(scaler, _mlp_loss(params, batch)))(params)
        grads, finite = jmpscale.unscale_and_check(scaler, grads)
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)
        return params, opt_state, jmpscale.update(scaler, finite, loss=loss), loss

    return step


def _bare_step(tx):
    def step(params, opt_state, scaler, batch):
        loss, grads = jax.value_and_grad(_mlp_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, scaler, loss

    return step


def _wrapper_step(tx):
    tx = jmpscale.with_loss_scaling(tx, jmpscale.disabled())

    def step(params, opt_state, scaler, batch):
        opt_state = jmpscale.LossScalingState(scaler, opt_state, None)
        loss, grads = jmpscale.value_and_grad(_mlp_loss)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state.inner_state, opt_state.scaler, loss

    return step


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("make_step", "donate"),
    [
        (_functional_step, (0, 1, 2)),
        (_wrapper_step, ()),
        pytest.param(_functional_step, (), marks=pytest.mark.full),
        pytest.param(_wrapper_step, (0, 1, 2), marks=pytest.mark.full),
    ],
)
def test_disabled_compiles_to_the_program_without_jmpscale(make_step, donate):
    tx = optax.adamw(1e-3)
    params = [jnp.ones((16, 16))] * 3
    args = params, tx.init(params), jmpscale.disabled(), (jnp.ones((4, 16)), jnp.ones((4, 16)))
    bare = hlo.instructions(hlo.compiled(_bare_step(tx), *args, donate_argnums=donate))
    ours = hlo.instructions(hlo.compiled(make_step(tx), *args, donate_argnums=donate))
    assert ours == bare
    active = hlo.instructions(hlo.compiled(_functional_step(tx), *args[:2], jmpscale.dynamic(), args[3]))
    assert active != bare, "the comparison can tell programs apart"


def test_disabled_returns_its_input():
    scaler = jmpscale.disabled()
    tree = {"a": jnp.ones(2, F16), "n": 3}
    assert jmpscale.scale(scaler, tree) is tree
    assert jmpscale.unscale(scaler, tree) is tree
    grads, finite = jmpscale.unscale_and_check(scaler, {"a": jnp.array(jnp.nan)})
    assert jnp.isnan(grads["a"])
    assert finite
    assert finite.dtype == bool
    assert jmpscale.update(scaler, False) is scaler


def test_disable_jit_takes_a_loss_scale_that_is_a_python_float():
    scaler = jmpscale.dynamic()._replace(loss_scale=8.0)
    with jax.disable_jit():
        assert jmpscale.scale(scaler, 2.0) == 16.0
        assert jmpscale.unscale(scaler, jnp.ones(1)).tolist() == [0.125]


@pytest.mark.usefixtures("x64")
def test_with_64_bit_numbers_the_state_keeps_its_types():
    state = jmpscale.dynamic(growth_interval=1)
    for finite in (True, False):
        state = jax.jit(jmpscale.update)(state, finite, loss=jnp.float64(1))
        assert [x.dtype for x in jax.tree.leaves(state)] == [F32] + [jnp.int32] * 5
