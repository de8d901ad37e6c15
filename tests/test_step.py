"""apply_if and value_and_grad: what a skip keeps bit for bit, true gradients, and which errors are those of JAX."""

import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import jmpscale
from jmpscale import testing

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


def _flax_step(state, batch, poison):
    key, dropout = jax.random.split(state.key)

    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, new = state.apply_fn(variables, batch, rngs={"dropout": dropout}, mutable=["batch_stats"])
        return jnp.mean(out**2) * poison, new["batch_stats"]

    scaler = jmpscale.dynamic(2.0)
    (_, stats), grads = jmpscale.value_and_grad(loss, has_aux=True)(scaler, state.params)
    finite = jmpscale.all_finite(grads)

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
    testing.assert_step_is_noop(state, skipped)
    applied, _ = step(state, batch, 1.0)
    for was, now in zip(jax.tree.leaves(state), jax.tree.leaves(applied), strict=True):
        if jnp.issubdtype(now.dtype, jax.dtypes.prng_key) or now.any():
            with pytest.raises(AssertionError):
                testing.assert_step_is_noop(was, now)
    assert applied.step == 2


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
    testing.assert_step_is_noop(carry, kept)


def test_on_a_cpu_the_step_is_not_run_when_skipped(request):
    if request.config.getoption("--default-form"):
        pytest.skip("in the default form it is run, and its result is discarded: test_gate.py")
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


def test_apply_if_traces_fn_once():
    traces = []

    @jax.jit
    def step(f, x):
        return jmpscale.apply_if(f, lambda x: (traces.append(1), x + 1)[1], x)

    for flag in (True, False, True):
        step(jnp.array(flag), jnp.float32(1))
    assert len(traces) == 1


def test_apply_if_passes_leaves_that_are_not_arrays_around_the_gate():
    model = {"w": jnp.arange(3.0), "activation": jnp.tanh, "name": "mlp"}

    def step(finite, w):
        return jmpscale.apply_if(finite, lambda m: m | {"w": m["activation"](m["w"])}, model | {"w": w})

    kept, moved = (step(jnp.array(finite), model["w"]) for finite in (False, True))
    testing.assert_step_is_noop(model, kept)
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
            r"same shapes.*but carry\[0\]\['b'\] was float32\[2\] and is float16\[2\].*astype.*tx\.init",
        ),
        (
            lambda c: c | {"b": c["b"][:1]},
            r"but carry\[0\]\['b'\] was float32\[2\] and is float32\[1\]\. Return an array of the same shape from fn",
        ),
        (lambda c: {"a": c["a"]}, r"same structure, but carry\[0\]\['b'\] is only in its input"),
        (lambda c: c | {"z": c["a"]}, r"same structure, but carry\[0\]\['z'\] is only in its output"),
        (lambda c: list(c.values()), r"same structure, but carry\[0\]\['a'\] is only in its input"),
        (lambda c: c | {"f": jnp.sin}, r"carry\[0\]\['f'\] was .*tanh.* and is .*sin.*close over other objects"),
        (lambda c: None, r"same structure"),
    ],
)
def test_apply_if_refuses_a_change_of_type_and_names_its_path(fn, message):
    carry = {"a": jnp.ones(()), "b": jnp.ones(2), "f": jnp.tanh}
    with pytest.raises(TypeError, match=message):
        jmpscale.apply_if(jnp.array(True), fn, carry)


@jax.tree_util.register_pytree_with_keys_class
class _Twins:
    """A node with two children under the same key."""

    def __init__(self, first, second):
        self.children = first, second

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("x"), child) for child in self.children], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_apply_if_distinguishes_leaves_with_equal_paths():
    def fn(twins):
        first, second = twins.children
        return _Twins(first.astype(jnp.float16), second)

    with pytest.raises(TypeError, match=r"carry\[0\]\.x was float32\[2\] and is float16\[2\]"):
        jmpscale.apply_if(True, fn, _Twins(jnp.ones(2), jnp.ones(2)))


@pytest.mark.parametrize("length", [3, 5000])
def test_apply_if_refuses_a_changed_array_of_strings(length):
    """A long one as well, of which repr shows only the first and last elements."""
    words = np.array(["word"] * length)

    def fn(w, words):
        changed = words.copy()
        changed[length // 2] = "changed"
        return w, changed

    with pytest.raises(TypeError, match=r"carry\[1\] was array.*Only arrays and Python numbers may change"):
        jmpscale.apply_if(True, fn, jnp.ones(2), words)
    kept = jmpscale.apply_if(True, lambda w, words: (w, words.copy()), jnp.ones(2), words)[1]
    assert kept is words


def test_apply_if_expects_a_tuple_for_several_carries():
    for out, name in (([1.0, 1.0], "list"), (None, "NoneType"), (jnp.ones(2), "ArrayImpl")):
        with pytest.raises(TypeError, match=f"fn returned a {name}, expected a tuple of 2 values.*`return a, b`"):
            jmpscale.apply_if(True, lambda a, b, out=out: out, 1.0, 1.0)
    with pytest.raises(TypeError, match="carry must hold at least one value"):
        jmpscale.apply_if(True, lambda: None)


@pytest.mark.usefixtures("standard_promotion")
def test_float16_parameters_get_the_remedy_and_the_remedy_works():
    params = {"w": jnp.ones(3, jnp.float16)}
    grads = {"w": jnp.ones(3, jnp.float32)}
    tx = optax.adam(1e-3)

    def step(params, opt_state):
        updates, opt_state = tx.update(grads, opt_state, params)
        return jax.tree.map(lambda p, u: (p.astype(u.dtype) + u).astype(p.dtype), params, updates), opt_state

    with pytest.raises(TypeError, match=r"carry\[1\]\[0\]\.mu\['w'\] was float16\[3\].*tx\.init\(jmpscale\.cast"):
        jmpscale.apply_if(jnp.array(True), step, params, tx.init(params))
    opt_state = tx.init(jmpscale.cast(params, jnp.float32))
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
        value, _ = jax.jit(jmpscale.value_and_grad(_loss))(jmpscale.static(scale), W, X)
        assert value == jax.jit(_loss)(W, X)

    def half_loss(w):
        return jnp.sum(w.astype(jnp.float16))

    with pytest.warns(UserWarning, match="the loss is float16"):
        value, _ = jmpscale.value_and_grad(half_loss)(jmpscale.dynamic(), W)
    assert value == 6.0
    assert value.dtype == jnp.float16, "the value keeps its dtype"


def test_gradients_equal_jaxs():
    for scale, tolerance in ((2.0**8, 1e-6), (3.0, 1e-3)):  # in float16 only a power of two is exact
        _, grads = jmpscale.value_and_grad(_loss)(jmpscale.dynamic(scale), W, X)
        np.testing.assert_allclose(grads, jax.grad(_loss)(W, X), rtol=tolerance)


def test_value_and_grad_returns_non_finite_gradients_after_an_overflow(variant):
    grad = variant(lambda scale: jmpscale.value_and_grad(_loss)(jmpscale.dynamic()._replace(loss_scale=scale), W, X)[1])
    assert jmpscale.all_finite(grad(jnp.float32(2.0**8)))
    assert not jmpscale.all_finite(grad(jnp.float32(2.0**20)))


def test_value_and_grad_keeps_gradients_that_float16_loses():
    x = jnp.full(3, 2.0**-14, jnp.float16)

    def loss(w, x):  # the gradient of the float16 product underflows without a scale
        return jnp.sum((w.astype(jnp.float16) * x).astype(jnp.float32)) * jnp.float32(2.0**-12)

    assert (jax.grad(loss)(W, x) == 0).all()
    _, grads = jmpscale.value_and_grad(loss)(jmpscale.static(2.0**12), W, x)
    np.testing.assert_array_equal(grads, np.full(3, 2.0**-26, np.float32))


@pytest.mark.parametrize(
    "holder",
    [
        lambda scaler: scaler,
        lambda scaler: {"model": jnp.ones(3), "state": (scaler, None)},
        lambda scaler: jmpscale.with_loss_scaling(optax.adam(1.0), scaler).init(W),
    ],
    ids=["scaler", "tree", "optimizer state"],
)
def test_value_and_grad_takes_a_scaler_or_a_tree_that_contains_one(holder, variant):
    go = variant(lambda w: jmpscale.value_and_grad(_loss)(holder(jmpscale.dynamic(2.0**10)), w, X))
    value, grads = go(W)
    np.testing.assert_array_equal(value, _loss(W, X))
    np.testing.assert_allclose(grads, jax.grad(_loss)(W, X), rtol=1e-6)


def test_value_and_grad_needs_exactly_one_scaler():
    called = []
    run = jmpscale.value_and_grad(lambda *args: called.append(1) or _loss(*args))
    for holder, number in ((W, 0), ({}, 0), ([jmpscale.dynamic()] * 2, 2)):
        with pytest.raises(ValueError, match=f"exactly one ScalerState, found {number}"):
            run(holder, W, X)
    batch = jax.tree.map(lambda x: jnp.stack([x] * 2), jmpscale.dynamic())
    with pytest.raises(ValueError, match="holder must hold one scaler, got a batch"):
        run(batch, W, X)
    assert not called, "the error is raised before the model is traced"


def test_argnums_count_the_functions_own_arguments():
    scaler = jmpscale.dynamic(2.0**8)
    _, (gw, gx) = jmpscale.value_and_grad(_loss, argnums=(0, 1))(scaler, W, X)
    assert gw.dtype == jnp.float32
    assert gx.dtype == jnp.float32, "an unscaled float16 gradient is float32"
    for argnums in (1, -1):
        _, only_x = jmpscale.value_and_grad(_loss, argnums=argnums)(scaler, W, X)
        np.testing.assert_array_equal(only_x, gx)


def test_value_and_grad_keeps_weak_types():
    """A gradient of a strong type would change the type of a weakly typed parameter, and compile the step again."""

    @jax.jit
    def step(w):
        return w - 0.1 * jmpscale.value_and_grad(lambda w: w**2)(jmpscale.dynamic(), w)[1]

    w = jnp.asarray(3.0)
    for _ in range(3):
        w = step(w)
    assert w.weak_type
    assert step._cache_size() == 1
    np.testing.assert_allclose(w, 3.0 * 0.8**3, rtol=1e-6)


def test_keyword_arguments_and_auxiliary_data():
    def with_aux(w, x, *, power):
        return _loss(w, x, power=power), {"power": power}

    scaler = jmpscale.dynamic(2.0**8)
    (value, aux), grads = jmpscale.value_and_grad(with_aux, has_aux=True)(scaler, W, X, power=3.0)
    assert (value, aux["power"]) == (_loss(W, X, power=3.0), 3.0)
    np.testing.assert_allclose(grads, jax.grad(_loss)(W, X, power=3.0), rtol=1e-6)


def test_an_argument_of_the_function_may_be_called_state():
    def loss(w, state):
        return w * state

    _, grad = jmpscale.value_and_grad(loss)(jmpscale.dynamic(), 2.0, state=3.0)
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


@pytest.mark.parametrize("fun", [lambda w: w, lambda w: (w, 1, 2)])
def test_value_and_grad_expects_a_pair_if_has_aux(fun):
    with pytest.raises(TypeError, match=r"fun must return a pair \(loss, aux\) because has_aux is true, got"):
        jmpscale.value_and_grad(fun, has_aux=True)(jmpscale.dynamic(), jnp.ones(()))


def test_value_and_grad_is_a_decorator_with_options():
    @jmpscale.value_and_grad(argnums=1, has_aux=True)
    def loss(w, x):
        return _loss(w, x), "aux"

    (value, aux), grads = loss(jmpscale.dynamic(2.0**8), W, X)
    assert (value, aux) == (_loss(W, X), "aux")
    np.testing.assert_allclose(grads, jax.grad(_loss, argnums=1)(W, X).astype(jnp.float32), rtol=1e-3)
    assert jmpscale.value_and_grad(_loss)(jmpscale.dynamic(), W, X)[0] == value


def _warnings_of(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [(str(w.message).split(",")[0], w.filename, w.category) for w in seen]


def test_a_float16_loss_warns_once_when_it_is_traced():
    def half_loss(w):
        return jnp.sum(w.astype(jnp.float16))

    scaler = jmpscale.dynamic(2.0**8)
    expected = [("the loss is float16", __file__, UserWarning)]
    for step in (
        jax.jit(jmpscale.value_and_grad(half_loss)),
        jax.jit(lambda scaler, w: jmpscale.value_and_grad(half_loss)(scaler, w)),
        jax.jit(lambda scaler, w: jax.grad(lambda w: jmpscale.scale(scaler, half_loss(w)))(w)),
    ):
        assert _warnings_of(lambda step=step: step(scaler, W)) == expected
        assert _warnings_of(lambda step=step: step(scaler, W)) == []
    assert _warnings_of(lambda: jmpscale.scale(scaler, half_loss(W))) == []
    assert _warnings_of(lambda: jax.jit(jmpscale.value_and_grad(_loss))(scaler, W, X)) == []
    assert _warnings_of(lambda: jax.jit(jmpscale.value_and_grad(half_loss))(jmpscale.disabled(), W)) == []


def _model_and_optimizer():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return nnx, model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def test_apply_if_refuses_objects_that_are_changed_in_place():
    nnx, model, optimizer = _model_and_optimizer()
    for carry in (model, {"deep": [optimizer]}):
        with pytest.raises(
            TypeError, match=r"got a Flax NNX (Linear|Optimizer), which is changed in place.*nnx\.state"
        ):
            jmpscale.apply_if(True, lambda c: c, carry)
    state = nnx.state((model, optimizer))
    chex.assert_trees_all_equal(jmpscale.apply_if(jnp.array(True), lambda c: c, state), state)


def test_value_and_grad_refuses_an_nnx_model_only_if_it_is_differentiated():
    _, model, _ = _model_and_optimizer()

    def loss(w, model):
        return jnp.sum(model(w) ** 2)

    w = jnp.ones((1, 2))
    value, grads = jmpscale.value_and_grad(loss)(jmpscale.dynamic(2.0**8), w, model)
    chex.assert_trees_all_close((value, grads), jax.value_and_grad(loss)(w, model), rtol=1e-6)
    for argnums in (1, -1, (0, 1)):
        with pytest.raises(TypeError, match=r"got a Flax NNX Linear.*transform=flax\.nnx\.value_and_grad"):
            jmpscale.value_and_grad(loss, argnums)(jmpscale.dynamic(), w, model)


@pytest.mark.parametrize("has_aux", [False, True])
def test_value_and_grad_passes_keyword_arguments_to_nnx(has_aux):
    nnx, model, _ = _model_and_optimizer()

    def loss(model, x, target):
        value = jnp.mean((model(x) - target) ** 2)
        return (value, x) if has_aux else value

    arguments = {"x": jnp.ones((1, 2)), "target": jnp.float32(2.0)}
    run = jmpscale.value_and_grad(loss, has_aux=has_aux, transform=nnx.value_and_grad)
    ours = run(jmpscale.dynamic(2.0**8), model, **arguments)
    theirs = nnx.value_and_grad(loss, has_aux=has_aux)(model, **arguments)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-6)


def test_the_transform_that_is_given_is_the_one_that_differentiates():
    def tenfold(fun, **options):
        grad = jax.value_and_grad(fun, **options)
        return lambda *args: jax.tree.map(lambda x: 10 * x, grad(*args))

    loss, grad = jmpscale.value_and_grad(lambda w: w**2, transform=tenfold)(jmpscale.dynamic(4.0), 3.0)
    assert (float(loss), float(grad)) == (90.0, 60.0)


def test_an_equinox_module_of_floating_point_arrays_alone_needs_no_transform():
    equinox = pytest.importorskip("equinox")

    class Line(equinox.Module):
        slope: jax.Array
        start: jax.Array

    line = Line(jnp.float32(2.0), jnp.float32(1.0))
    loss, grads = jmpscale.value_and_grad(lambda m, x: m.slope * x + m.start)(jmpscale.dynamic(), line, 3.0)
    assert (float(loss), float(grads.slope), float(grads.start)) == (7.0, 3.0, 1.0)
