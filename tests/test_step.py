"""apply_if and value_and_grad: what a skip keeps, bit for bit, and which errors are JAX's own."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import jmpscale

from cases import some


class TrainState(train_state.TrainState):
    batch_stats: dict
    key: jax.Array
    ema: dict


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=False)(x)


def _train_state():
    key = jax.random.key(0)
    variables = Net().init({"params": key, "dropout": key}, jnp.ones((2, 3)))
    return TrainState.create(
        apply_fn=Net().apply,
        params=variables["params"],
        tx=optax.adamw(optax.cosine_decay_schedule(1e-2, 100)),
        batch_stats=variables["batch_stats"],
        key=key,
        ema=jax.tree.map(lambda x: x, variables["params"]),
    )


def _bits(tree):
    """Returns every array's bytes: equality of values would call -0.0 and 0.0 the same, and NaN unlike itself."""
    leaves = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
              for x in map(jnp.asarray, jax.tree.leaves(tree))]  # fmt: skip
    return [(np.asarray(x).dtype, np.asarray(x).tobytes()) for x in leaves]


def _flax_step(state, batch, poison):
    key, dropout = jax.random.split(state.key)

    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, new = state.apply_fn(variables, batch, rngs={"dropout": dropout}, mutable=["batch_stats"])
        return jnp.mean(out**2) * poison, new["batch_stats"]

    scaler = jmpscale.dynamic(2.0)
    (_, stats), grads, finite = jmpscale.value_and_grad(loss, has_aux=True)(scaler, state.params)

    def step(state):
        new = state.apply_gradients(grads=grads)
        ema = optax.incremental_update(new.params, state.ema, 0.1)
        return new.replace(batch_stats=stats, key=key, ema=ema)

    return jmpscale.apply_if(finite, step, state), finite


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("poison", some([np.nan, np.inf], default=[np.inf]))
def test_a_skip_leaves_a_whole_flax_train_state_as_it_was_bit_for_bit(poison):
    state, batch = _train_state(), jax.random.normal(jax.random.key(1), (8, 3))
    step = jax.jit(_flax_step)
    state, finite = step(state, batch, 1.0)
    assert finite
    skipped, finite = step(state, batch, poison)
    assert not finite
    assert _bits(skipped) == _bits(state)
    moved, _ = step(state, batch, 1.0)
    assert all(a != b for a, b in zip(_bits(moved), _bits(state), strict=True) if a[1] != b"\0" * len(a[1]))
    assert moved.step == 2


def test_one_carry_gives_one_value_and_several_a_tuple(variant):
    go = variant(
        lambda f, a, b: (jmpscale.apply_if(f, lambda a: a + 1, a), *jmpscale.apply_if(f, lambda a, b: (b, a), a, b))
    )
    assert go(jnp.array(True), jnp.float32(1), jnp.float32(2)) == (2, 2, 1)
    assert go(jnp.array(False), jnp.float32(1), jnp.float32(2)) == (1, 1, 2)


def test_a_tuple_as_the_only_carry_stays_one_value():
    out = jmpscale.apply_if(jnp.array(True), lambda t: (t[1], t[0]), (jnp.float32(1), jnp.float32(2)))
    assert out == (2, 1)


def test_nan_payloads_and_negative_zeros_survive_a_skip(variant):
    carry = jnp.array([0x7FC12345, 0xFFC00001, 0x80000000, 1], jnp.uint32).view(jnp.float32)
    kept = variant(lambda f, c: jmpscale.apply_if(f, lambda x: x * 2, c))(jnp.array(False), carry)
    assert _bits(kept) == _bits(carry)


def test_on_a_cpu_the_step_is_not_run_when_skipped(request):
    if request.config.getoption("--elsewhere"):
        pytest.skip("elsewhere it is, and thrown away: test_gate.py")
    ran = []
    step = jax.jit(
        lambda f, x: jmpscale.apply_if(f, lambda x: (jax.debug.callback(lambda: ran.append(1)), x + 1)[1], x)
    )
    step(jnp.array(False), jnp.float32(1)).block_until_ready()
    jax.effects_barrier()
    assert ran == []
    step(jnp.array(True), jnp.float32(1)).block_until_ready()
    jax.effects_barrier()
    assert ran == [1]


def test_fn_is_traced_once():
    traces = []

    @jax.jit
    def step(f, x):
        return jmpscale.apply_if(f, lambda x: (traces.append(1), x + 1)[1], x)

    for flag in (True, False, True):
        step(jnp.array(flag), jnp.float32(1))
    assert len(traces) == 1


def test_leaves_that_are_not_arrays_go_around_the_branch():
    model = {"w": jnp.arange(3.0), "activation": jnp.tanh, "name": "mlp"}

    def step(finite, w):
        return jmpscale.apply_if(finite, lambda m: m | {"w": m["activation"](m["w"])}, model | {"w": w})

    kept, moved = (step(jnp.array(finite), model["w"]) for finite in (False, True))
    assert _bits(kept["w"]) == _bits(model["w"])
    np.testing.assert_array_equal(moved["w"], jnp.tanh(model["w"]))
    assert moved["activation"] is jnp.tanh
    assert moved["name"] == "mlp"


def test_prng_keys_integers_booleans_and_python_numbers_are_gated():
    carry = {"key": jax.random.key(1), "n": 3, "b": jnp.array(True), "x": np.float64(2.0).astype(np.float32)}

    def step(c):
        return {"key": jax.random.split(c["key"])[0], "n": c["n"] + 1, "b": ~c["b"], "x": c["x"] * 2}

    kept = jmpscale.apply_if(jnp.array(False), step, carry)
    assert (kept["n"], kept["b"], kept["x"]) == (3, True, 2.0)
    assert jnp.array_equal(jax.random.key_data(kept["key"]), jax.random.key_data(carry["key"]))
    moved = jmpscale.apply_if(jnp.array(True), step, carry)
    assert (moved["n"], moved["b"], moved["x"]) == (4, False, 4.0)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            lambda c: c | {"b": c["b"].astype(jnp.float16)},
            r"carry\[0\]\['b'\] went in as float32\[2\] and came out as float16\[2\].*tx\.init",
        ),
        (lambda c: c | {"b": c["b"][:1]}, r"carry\[0\]\['b'\] went in as float32\[2\] and came out as float32\[1\]"),
        (lambda c: {"a": c["a"]}, r"same structure, but carry\[0\]\['b'\] is only in its input"),
        (lambda c: c | {"z": c["a"]}, r"same structure, but carry\[0\]\['z'\] is only in its output"),
        (lambda c: list(c.values()), r"same structure, but carry\[0\]\['a'\] is only in its input"),
        (lambda c: c | {"f": jnp.sin}, r"carry\[0\]\['f'\] went in as .*tanh.* and came out as .*sin"),
        (lambda c: None, r"same structure"),
    ],
)
def test_a_step_that_changes_its_carrys_type_is_refused_by_path(fn, message):
    carry = {"a": jnp.ones(()), "b": jnp.ones(2), "f": jnp.tanh}
    with pytest.raises(TypeError, match=message):
        jmpscale.apply_if(jnp.array(True), fn, carry)


def test_several_carries_must_come_back_as_a_tuple():
    with pytest.raises(TypeError, match="same structure, but the containers differ"):
        jmpscale.apply_if(jnp.array(True), lambda a, b: [a, b], jnp.ones(()), jnp.ones(()))
    with pytest.raises(TypeError, match="needs at least one carry"):
        jmpscale.apply_if(jnp.array(True), lambda: None)


@pytest.mark.usefixtures("standard_promotion")
def test_float16_parameters_get_the_remedy_and_the_remedy_works():
    params = {"w": jnp.ones(3, jnp.float16)}
    grads = {"w": jnp.ones(3, jnp.float32)}
    tx = optax.adam(1e-3)

    def step(params, opt_state):
        updates, opt_state = tx.update(grads, opt_state, params)
        return jax.tree.map(lambda p, u: (p.astype(u.dtype) + u).astype(p.dtype), params, updates), opt_state

    with pytest.raises(TypeError, match=r"carry\[1\]\[0\]\.mu\['w'\] went in as float16\[3\].*tx\.init on float32"):
        jmpscale.apply_if(jnp.array(True), step, params, tx.init(params))
    opt_state = tx.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
    params, _ = jmpscale.apply_if(jnp.array(True), step, params, opt_state)
    assert params["w"].dtype == jnp.float16


@pytest.mark.parametrize("finite", [1, None, jnp.ones((), jnp.int32)])
def test_apply_if_refuses_what_is_no_flag(finite):
    with pytest.raises(TypeError, match="finite must be a boolean"):
        jmpscale.apply_if(finite, lambda x: x, 1.0)


# --- value_and_grad ---


def _loss(w, x, *, power=2.0):
    return jnp.mean((w.astype(jnp.float16) * x).astype(jnp.float32) ** power)


W, X = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.25, 2.0], jnp.float16)


def test_the_value_is_the_users_own_bit_for_bit():
    for scale in (2.0**8, 3.0):
        value, _, finite = jax.jit(jmpscale.value_and_grad(_loss))(jmpscale.static(scale), W, X)
        assert value == jax.jit(_loss)(W, X)
        assert finite

    def half_loss(w):
        return jnp.sum(w.astype(jnp.float16))

    value, _, _ = jmpscale.value_and_grad(half_loss)(jmpscale.dynamic(), W)
    assert value == 6.0
    assert value.dtype == jnp.float16, "and in its own dtype"


def test_gradients_equal_jaxs():
    _, grads, finite = jmpscale.value_and_grad(_loss)(jmpscale.dynamic(2.0**8), W, X)
    np.testing.assert_allclose(grads, jax.grad(_loss)(W, X), rtol=1e-6)
    assert finite


def test_argnums_count_the_functions_own_arguments():
    scaler = jmpscale.dynamic(2.0**8)
    _, (gw, gx), _ = jmpscale.value_and_grad(_loss, argnums=(0, 1))(scaler, W, X)
    assert gw.dtype == jnp.float32
    assert gx.dtype == jnp.float32, "an unscaled float16 gradient is float32"
    _, only_x, _ = jmpscale.value_and_grad(_loss, argnums=1)(scaler, W, X)
    np.testing.assert_array_equal(only_x, gx)
    _, last, _ = jmpscale.value_and_grad(_loss, argnums=-1)(scaler, W, X)
    np.testing.assert_array_equal(last, gx)


def test_keyword_arguments_and_auxiliary_data():
    def with_aux(w, x, *, power):
        return _loss(w, x, power=power), {"power": power}

    (value, aux), grads, finite = jmpscale.value_and_grad(with_aux, has_aux=True)(
        jmpscale.dynamic(2.0**8), W, X, power=3.0
    )
    assert (value, aux["power"]) == (_loss(W, X, power=3.0), 3.0)
    assert grads.shape == W.shape
    assert finite


def test_an_argument_of_the_function_may_be_called_state():
    def loss(w, state):
        return w * state

    _, grad, _ = jmpscale.value_and_grad(loss)(jmpscale.dynamic(), 2.0, state=3.0)
    assert grad == 3.0


def test_static_arguments_can_be_named_under_jit():
    def loss(w, x, train):
        return _loss(w, x) * (2.0 if train else 1.0)

    step = jax.jit(jmpscale.value_and_grad(loss), static_argnames="train")
    scaler = jmpscale.dynamic(2.0**8)
    assert step(scaler, W, X, train=True)[0] == 2 * step(scaler, W, X, train=False)[0]


@pytest.mark.parametrize(
    ("fun", "options", "args"),
    [
        (lambda w: w, {}, (jnp.ones(2),)),
        (lambda w: jnp.int32(1), {}, (jnp.ones(()),)),
        (lambda w: w * 1j, {}, (jnp.ones(()),)),
        (lambda w: "loss", {}, (jnp.ones(()),)),
        (lambda w: (w, w), {}, (jnp.ones(()),)),
        (lambda w: w, {"has_aux": True}, (jnp.ones(()),)),
        (lambda w: (w, 1, 2), {"has_aux": True}, (jnp.ones(()),)),
        (lambda w: w * 1.0, {}, (jnp.int32(1),)),
        (lambda w: w, {"argnums": 1}, (jnp.ones(()),)),
        (lambda w: w, {"argnums": (0, 5)}, (jnp.ones(()),)),
        (lambda w: w, {}, ("text",)),
    ],
)
def test_errors_are_those_of_jax(fun, options, args):
    with pytest.raises((TypeError, ValueError)) as theirs:
        jax.value_and_grad(fun, **options)(*args)
    with pytest.raises(theirs.type) as ours:
        jmpscale.value_and_grad(fun, **options)(jmpscale.dynamic(), *args)
    assert str(ours.value).split(" at 0x")[0] == str(theirs.value).split(" at 0x")[0]


def test_a_bad_function_is_refused_when_it_is_wrapped():
    with pytest.raises(TypeError, match="callable"):
        jmpscale.value_and_grad(3.0)


def test_forgetting_the_scaler_is_told():
    called = []
    with pytest.raises(TypeError, match="state must be a ScalerState, got ArrayImpl"):
        jmpscale.value_and_grad(lambda *args: called.append(1) or _loss(*args))(W, X)
    assert not called, "it is told before the model is traced"


def test_every_transformation_gives_the_same(variant):
    go = variant(lambda w: jmpscale.value_and_grad(_loss)(jmpscale.dynamic(2.0**10), w, X))
    value, grads, finite = go(W)
    expected = jmpscale.value_and_grad(_loss)(jmpscale.dynamic(2.0**10), W, X)
    chex.assert_trees_all_close((value, grads, finite), expected, rtol=1e-6)


def test_objects_that_change_in_place_are_refused():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for carry in (model, {"deep": [optimizer]}):
        with pytest.raises(TypeError, match=r"got a Flax NNX (Linear|Optimizer), which changes in place.*nnx\.cond"):
            jmpscale.apply_if(True, lambda c: c, carry)
    state = nnx.state((model, optimizer))
    chex.assert_trees_all_equal(jmpscale.apply_if(jnp.array(True), lambda c: c, state), state)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_transform_that_is_given_is_the_one_that_differentiates(scaled):
    def tenfold(fun, **options):
        grad = jax.value_and_grad(fun, **options)
        return lambda *args: jax.tree.map(lambda x: 10 * x, grad(*args))

    make = jmpscale.scaled_value_and_grad if scaled else jmpscale.value_and_grad
    loss, grad, *_ = make(lambda w: w**2, transform=tenfold)(jmpscale.dynamic(4.0), 3.0)
    assert (float(loss), float(grad)) == (90.0, 240.0 if scaled else 60.0)


def test_an_equinox_module_of_floating_point_arrays_alone_needs_no_transform():
    equinox = pytest.importorskip("equinox")

    class Line(equinox.Module):
        slope: jax.Array
        start: jax.Array

    line = Line(jnp.float32(2.0), jnp.float32(1.0))
    loss, grads, finite = jmpscale.value_and_grad(lambda m, x: m.slope * x + m.start)(jmpscale.dynamic(), line, 3.0)
    assert (float(loss), float(grads.slope), float(grads.start), bool(finite)) == (7.0, 3.0, 1.0, True)
