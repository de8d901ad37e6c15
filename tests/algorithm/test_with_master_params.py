"""with_master_params trains half-precision parameters as float32 ones, of which they are the rounded copies."""

import functools
import importlib.metadata

import equinox as eqx
import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import check_step

from bits import assert_equal_bits
from compiling import FAST
from meshes import make_mesh
from tables import names

pytestmark = pytest.mark.usefixtures("standard_promotion")

jit = functools.partial(jax.jit, **FAST)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((64, 8)), jnp.float32)
Y = jnp.tanh(X.sum(1, keepdims=True))
PARAMS = {
    "a": jnp.asarray(RNG.standard_normal((8, 16)) / 3, jnp.float32),
    "b": jnp.asarray(RNG.standard_normal((16, 1)) / 4, jnp.float32),
}
ADAMW = optax.adamw(3e-4)
with_copies = jmpscale.with_master_params
DTYPES = ["bfloat16", "float16"]
FEW_DTYPES = ["bfloat16", pytest.param("float16", marks=pytest.mark.full)]
FLAX, OPTAX = (tuple(map(int, importlib.metadata.version(name).split(".")[:3])) for name in ("flax", "optax"))


def loss_fn(params, factor=1.0):
    half = jnp.result_type(params["a"]) if jnp.result_type(params["a"]) != jnp.float32 else jnp.bfloat16
    prediction = jnp.tanh(X.astype(half) @ params["a"].astype(half)) @ params["b"].astype(half)
    return factor * jnp.mean((prediction.astype(jnp.float32) + params.get("c", 0) - Y) ** 2)


def params_in(dtype):
    """Returns parameters in half precision, and one in float32."""
    return {**jmpscale.cast(PARAMS, dtype), "c": jnp.zeros(())}


def nodes(tree, kind):
    """Returns the nodes of a tree that are of a class."""
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]


def copies_of(opt_state):
    return optax.tree.get(opt_state, "master_params")


def assert_rounded(params, copies):
    """Checks that parameters in half precision are their copies, rounded, bit for bit, and that others have none."""
    half = [x for x in jax.tree.leaves(params) if x.dtype != jnp.float32]
    copies = jax.tree.leaves(copies)
    assert all(copy.dtype == jnp.float32 for copy in copies)
    assert_equal_bits(half, [copy.astype(x.dtype) for x, copy in zip(half, copies, strict=True)])


def step_of(tx, jit=jit, **options):
    """Returns a jitted step; with a scaler in the state, the loss is scaled."""

    def step(params, opt_state, factor=1.0):
        if nodes(opt_state, jmpscale.ScalerState):
            loss, grads = jmpscale.value_and_grad(loss_fn)(opt_state, params, factor)
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        else:
            loss, grads = jax.value_and_grad(loss_fn)(params, factor)
            updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jit(step, **options)


# --- the parameters are the rounded copies, and the copies are float32 parameters ---


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_with_master_params_trains_the_copies_like_float32_parameters(dtype):
    """Bit for bit, if the loss of the float32 parameters casts them."""
    inner = optax.adamw(3e-4, weight_decay=0.1)

    def train(tx, params, cast):
        @jit
        def step(params, opt_state):
            # The barrier keeps XLA from fusing the gradients with different consumers.
            grads = jax.lax.optimization_barrier(jax.grad(lambda p: loss_fn(cast(p)))(params))
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        opt_state = tx.init(params)
        for _ in range(20):
            params, opt_state = step(params, opt_state)
        return params, opt_state

    start = jmpscale.cast(PARAMS, dtype)
    expected = train(inner, jmpscale.cast(start, jnp.float32), lambda params: jmpscale.cast(params, dtype))
    params, opt_state = train(jmpscale.with_master_params(inner), start, lambda params: params)
    assert_equal_bits(expected, (opt_state.master_params, opt_state.inner_state))
    assert_rounded(params, opt_state.master_params)


IDENTITY = jmpscale.with_master_params(optax.identity())
SPECIAL = [0.0, -0.0, np.inf, np.nan, 2.0**-149, 2.0**-126, 3.3895314e38, 3.3961e38, 3.4028235e38]
SPECIAL += [2.0**-25, 1.0001 * 2.0**-25, 2.0**-24, 2.0**-14, 65504, 65519, 65520]  # the limits of float16


def _numbers():
    near_one = st.builds(lambda x, e: float(np.float32(x * 2.0**e)), st.floats(1, 2, width=32), st.integers(-40, 30))
    # With a limit, because `floats` rejects, one by one, the larger numbers that it draws.
    finite = st.floats(0, float(np.finfo(np.float32).max), width=32)
    positive = st.one_of(finite, near_one, st.sampled_from(SPECIAL))
    return st.builds(lambda x, sign: float(np.float32(sign * x)), positive, st.sampled_from([1, -1]))


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.given(st.data())
def test_with_master_params_reaches_the_rounded_copy(dtype, data):
    """Of any number, by any change: also if the difference is not a float32 number."""
    arrays = npst.arrays(np.float32, 20, elements=_numbers())
    copy, change = data.draw(arrays), data.draw(arrays)
    cancels = data.draw(npst.arrays(np.bool_, 20))
    with np.errstate(all="ignore"):
        change = np.where(cancels, -copy * (1 + change * np.float32(2.0**-20)), change)
    _check_reached(jnp.asarray(copy), jnp.asarray(change, np.float32), dtype)


def _check_reached(copy, change, dtype):
    param = copy.astype(dtype)
    state = IDENTITY.init(param)._replace(master_params=copy)
    updates, state = jit(IDENTITY.update)(change, state, param)
    applied, new, expected = optax.apply_updates(param, updates), state.master_params, copy + change
    was, now = np.asarray(param, np.float32), np.asarray(applied, np.float32)
    rounded = np.asarray(new.astype(dtype), np.float32)
    assert applied.dtype == dtype
    # Nothing but NaN can be added to an infinite parameter, and no update is larger than the largest float32 number.
    smallest, largest = 2.0**-126, float(np.finfo(np.float32).max)
    with np.errstate(invalid="ignore"):  # the difference of infinite numbers
        too_far = np.abs(rounded.astype(np.float64) - was) > largest
        flushed = np.abs(np.asarray(copy, np.float64) + np.asarray(change, np.float64)) < smallest
    ended = (np.isinf(was) & (now != was)) | (too_far & np.isfinite(rounded))
    np.testing.assert_array_equal(now[~ended], rounded[~ended])
    # A sum of numbers that are not zero is never -0.0, except where a CPU flushes it to zero.
    same_sign = (np.signbit(now) == np.signbit(rounded)) | np.isnan(now) | ((now == 0) & ((was != 0) | flushed))
    assert same_sign[~ended].all()
    # The copy is the sum, or, where it is far smaller than the parameter, within the rounding of the update.
    exact, reached = (np.asarray(x, np.float64) for x in (expected, new))
    other = ~(ended | np.isnan(exact) | (exact == reached))
    assert (np.abs(reached[other] - exact[other]) <= 2.0**-24 * np.abs(was[other]) + smallest).all()
    assert (np.abs(rounded[other]) <= 2.0**-11 * np.abs(was[other]) + smallest).all()


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_master_params_reaches_the_rounded_copy_of_random_numbers(dtype):
    size = 100_000
    copy = jnp.asarray(RNG.choice([-1, 1], size) * np.exp2(RNG.uniform(-30, 15, size)), jnp.float32)
    change = copy * jnp.asarray(RNG.standard_normal(size) * np.exp2(RNG.uniform(-25, 2, size)), jnp.float32)
    for exact in (change, -copy * (1 + jnp.asarray(np.exp2(RNG.uniform(-24, -5, size)), jnp.float32)), -copy):
        _check_reached(copy, exact, dtype)
    # Copies that round to 1, and new ones that no float32 update of 1 reaches exactly.
    steps = RNG.integers(2, 2**12, size)
    copy, new = 1 - steps * 2.0**-24, -RNG.integers(1, steps) * 2.0**-24
    _check_reached(jnp.asarray(copy, jnp.float32), jnp.asarray(new - copy, jnp.float32), dtype)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_with_master_params_keeps_parameters_whose_update_is_zero(dtype):
    copy = jnp.asarray([*SPECIAL, *(-x for x in SPECIAL)], jnp.float32)
    params = copy.astype(dtype)
    state = IDENTITY.init(params)._replace(master_params=copy)
    updates, new = jit(IDENTITY.update)(jnp.full_like(copy, -0.0), state, params)
    if jax.default_backend() == "cpu":  # which flushes subnormal numbers to zero
        is_normal = ~((np.abs(copy) > 0) & (np.abs(copy) < 2.0**-126))
        copy, params, updates, new = jax.tree.map(lambda x: x[is_normal], (copy, params, updates, new))
    assert_equal_bits(params, optax.apply_updates(params, updates))
    assert_equal_bits(copy, new.master_params)


@pytest.mark.full
def test_with_master_params_keeps_changes_that_half_precision_loses():
    def loss_after(tx, params):
        step, opt_state = step_of(tx), tx.init(params)
        for _ in range(400):
            params, opt_state, loss = step(params, opt_state)
        return float(loss)

    half = jmpscale.cast(PARAMS, jnp.bfloat16)
    float32, copies, alone = (
        loss_after(*run) for run in ((ADAMW, PARAMS), (jmpscale.with_master_params(ADAMW), half), (ADAMW, half))
    )
    assert abs(copies - float32) < 0.02 * float32
    assert alone > 1.2 * float32


def test_with_master_params_gives_only_half_precision_parameters_a_copy():
    params = {
        "bfloat16": jnp.ones(2, jnp.bfloat16),
        "float16": np.ones(2, np.float16),
        "float32": jnp.ones(2),
        "complex": jnp.ones(2, jnp.complex64),
        "none": None,
        "masked": optax.MaskedNode(),
    }
    copies = jmpscale.with_master_params(optax.sgd(0.1)).init(params).master_params
    expected = dict.fromkeys(params) | {name: jnp.ones(2) for name in ("bfloat16", "float16")}
    assert_equal_bits(expected | {"masked": optax.MaskedNode()}, copies)
    types = jax.eval_shape(lambda: params | {"float16": jnp.ones(2, jnp.float16)})
    like = jmpscale.with_master_params(optax.adam(0.1)).init(types).master_params
    assert jax.tree.map(lambda x: (x.shape, x.dtype), like) == jax.tree.map(lambda x: (x.shape, x.dtype), copies)


def test_with_master_params_passes_other_leaves_to_inner_and_back():
    params = {
        "h": jnp.ones(2, jnp.bfloat16),
        "n": jnp.arange(2),
        "key": jax.random.key(0),
        "number": 1.0,
        "fn": jnp.tanh,
    }
    grads = params | {"n": np.zeros(2, jax.dtypes.float0)}
    tx = jmpscale.with_master_params(
        optax.GradientTransformation(lambda params: (), lambda grads, state, params: (grads, ()))
    )
    updates, state = tx.update(grads, tx.init(params), params)
    assert all(updates[name] is x for name, x in grads.items() if name != "h")
    assert_equal_bits(dict.fromkeys(params) | {"h": jnp.full(2, 2.0)}, state.master_params)


def test_with_master_params_shows_inner_float32_values():
    seen = []

    def update(updates, state, params, *, grad, value):
        seen.append([str(x.dtype) for x in jax.tree.leaves((updates, params, grad, value))])
        return updates, state

    tx = jmpscale.with_master_params(optax.GradientTransformationExtraArgs(lambda params: params, update))
    params = {"h": jnp.ones(2, jnp.bfloat16), "f": jnp.ones(2)}
    opt_state = tx.init(params)
    assert {x.dtype for x in jax.tree.leaves(opt_state.inner_state)} == {np.dtype(np.float32)}
    updates, _ = tx.update(params, opt_state, params, grad=params, value=jnp.bfloat16(1), other=1)
    assert seen == [["float32"] * 6 + ["bfloat16"]]
    assert {x.dtype for x in jax.tree.leaves(updates)} == {np.dtype(np.float32)}


# --- a step that is skipped changes neither ---


def with_scaling(inner, **options):
    return jmpscale.with_loss_scaling(inner, jmpscale.dynamic(2.0**8), **options)


WRAPPED = {
    "inside": lambda inner: with_scaling(with_copies(inner)),
    "outside": lambda inner: with_copies(with_scaling(inner)),
    "inside, max_norm": lambda inner: with_scaling(with_copies(inner), max_norm=1.0),
    "outside, max_norm": lambda inner: with_copies(with_scaling(inner, max_norm=1.0)),
    "in a chain": lambda inner: with_scaling(optax.chain(optax.clip_by_global_norm(1.0), with_copies(inner))),
}


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("name", names(WRAPPED, default={"inside"}))
def test_with_master_params_changes_nothing_on_a_skip(name, dtype, platform):
    tx = WRAPPED[name](optax.adamw(1e-3))
    params = params_in(dtype)
    params["a"] = params["a"].at[0].set(-0.0)
    step, opt_state = step_of(tx), tx.init(params)
    for bad in (jnp.inf, jnp.nan):
        for _ in range(3):
            params, opt_state, _ = step(params, opt_state)
        assert_rounded(params, copies_of(opt_state))
        skipped, new, _ = step(params, opt_state, bad)
        assert_equal_bits((params, copies_of(opt_state)), (skipped, copies_of(new)))
        assert_equal_bits(optax.tree.get(opt_state, "mu"), optax.tree.get(new, "mu"))
        params, opt_state = skipped, new
    scaler = jmpscale.get_scaler(opt_state)
    assert (scaler.total_skips, scaler.total_steps) == (2, 8)
    assert jmpscale.metrics(opt_state)["loss_scale"] == scaler.loss_scale
    replaced = jmpscale.replace_scaler(opt_state, jmpscale.dynamic(2.0**3))
    assert jmpscale.get_scaler(replaced).loss_scale == 2.0**3
    assert_equal_bits(copies_of(opt_state), copies_of(replaced))


def test_with_master_params_in_the_functional_api_changes_nothing_on_a_skip(platform):
    tx = jmpscale.with_master_params(optax.adamw(1e-3))

    @jit
    def step(params, opt_state, scaler, factor):
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params, factor)
        finite = jmpscale.all_finite((loss, grads))
        params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads), params, opt_state)
        return params, opt_state, jmpscale.update(scaler, finite, loss=loss)

    params, scaler = params_in(jnp.float16), jmpscale.dynamic(2.0**10)
    params, opt_state, scaler = step(params, tx.init(params), scaler, 1.0)
    skipped, new, scaler = step(params, opt_state, scaler, jnp.inf)
    assert_equal_bits((params, opt_state), (skipped, new))
    assert scaler.total_skips == 1
    assert_rounded(params, copies_of(opt_state))


# --- with other transformations ---

MASK = {"a": True, "b": False, "c": True}
FROZEN = optax.masked(optax.set_to_zero(), {name: not flag for name, flag in MASK.items()})
LABELS = {"a": "x", "b": "y", "c": "x"}
COMPOSED = {
    "chain inside": lambda: with_copies(optax.chain(optax.clip_by_global_norm(1.0), ADAMW)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), with_copies(ADAMW)),
    "masked inside": lambda: with_copies(optax.chain(optax.masked(ADAMW, MASK), FROZEN)),
    "masked": lambda: optax.chain(optax.masked(with_copies(ADAMW), MASK), FROZEN),
    "partition inside": lambda: with_copies(optax.partition({"x": ADAMW, "y": optax.sgd(1e-2)}, LABELS)),
    "partition": lambda: optax.partition({"x": with_copies(ADAMW), "y": with_copies(optax.sgd(1e-2))}, LABELS),
    "MultiSteps inside": lambda: with_copies(optax.MultiSteps(ADAMW, 2)),
    "MultiSteps": lambda: optax.MultiSteps(with_copies(ADAMW), 2),
    "apply_if_finite inside": lambda: with_copies(optax.apply_if_finite(ADAMW, 3)),
    "inject_hyperparams inside": lambda: with_copies(optax.inject_hyperparams(optax.adamw)(3e-4)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda learning_rate: with_copies(optax.adamw(learning_rate))
    )(3e-4),
    "lion": lambda: with_copies(optax.lion(1e-4)),
    "adafactor": lambda: with_copies(optax.adafactor(1e-3)),
    "muon": lambda: with_copies(optax.contrib.muon(1e-3)),
    "schedule-free": lambda: with_copies(optax.contrib.schedule_free_adamw(1e-3)),
    "L-BFGS": lambda: with_copies(optax.lbfgs(1e-2, memory_size=2, linesearch=None)),
}
FLOAT16_BESIDE = {"MultiSteps", "inject_hyperparams"}
OUTER = {
    "alone": (lambda tx: tx, jnp.bfloat16),
    "in with_loss_scaling": (jmpscale.with_loss_scaling, jnp.float16),
    "in with_loss_scaling, bfloat16": (jmpscale.with_loss_scaling, jnp.bfloat16),
    "disabled": (lambda tx: jmpscale.with_loss_scaling(tx, jmpscale.disabled()), jnp.float16),
}


@pytest.mark.parametrize("outer", ["alone", "in with_loss_scaling"])
@pytest.mark.parametrize("name", names(COMPOSED, default={"chain"}))
def test_with_master_params_composes(name, outer):
    assert_composes(name, outer)


@pytest.mark.full
@pytest.mark.parametrize("outer", ["in with_loss_scaling, bfloat16", "disabled"])
def test_with_master_params_composes_with_loss_scaling_in_bfloat16_or_disabled(outer):
    assert_composes("chain", outer)


def assert_composes(name, outer):
    wrap, dtype = OUTER[outer]
    if OPTAX < (0, 2, 8) and dtype == jnp.float16 and name in FLOAT16_BESIDE:
        pytest.skip("before optax 0.2.8, these states have the dtype of the parameters")
    tx = wrap(COMPOSED[name]())
    params = params_in(dtype)
    step, opt_state = step_of(tx), tx.init(params)
    for _ in range(6):
        new, opt_state, _ = step(params, opt_state)
        assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, params)
        params = new
    states = nodes(opt_state, type(with_copies(ADAMW).init(PARAMS)))
    copies = {path[0].key: copy for state in states for path, copy in jax.tree.leaves_with_path(state.master_params)}
    expected = {"a"} if name == "masked" else {"a", "b"}  # a frozen parameter of optax.masked has no copy
    assert set(copies) == expected
    assert_rounded({key: params[key] for key in copies}, copies)
    assert not np.array_equal(copies["a"], PARAMS["a"].astype(dtype).astype(jnp.float32))


def test_with_master_params_accumulates_in_float32_in_multi_steps():
    """Gradients that bfloat16 would add up to 256 only."""
    tx = jmpscale.with_master_params(optax.MultiSteps(optax.sgd(1.0), 512, use_grad_mean=False))
    w = jnp.zeros((), jnp.bfloat16)

    def step(carry, _):
        w, opt_state = carry
        updates, opt_state = tx.update(jnp.ones((), jnp.bfloat16), opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), None

    (w, _), _ = jax.lax.scan(step, (w, tx.init(w)), None, 512)
    assert w == -512


KEEPS_PARAMS = optax.GradientTransformation(lambda params: params, lambda grads, state, params=None: (grads, state))


def test_with_master_params_can_be_donated():
    """The state of inner may hold the initial parameters, but not the arrays of the copies."""
    tx = jmpscale.with_master_params(KEEPS_PARAMS)
    params = jmpscale.cast(PARAMS, jnp.bfloat16)
    step, opt_state = step_of(tx, donate_argnums=(0, 1)), tx.init(params)
    for _ in range(2):
        params, opt_state, _ = step(params, opt_state)
    assert_rounded(params, copies_of(opt_state))


@pytest.mark.full
def test_with_master_params_trains_an_ensemble():
    tx = jmpscale.with_master_params(jmpscale.with_loss_scaling(ADAMW))
    members = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), jmpscale.cast(PARAMS, jnp.bfloat16))
    step = jax.vmap(step_of(tx))
    params, opt_state, _ = step(members, jax.vmap(tx.init)(members))
    for i in range(2):
        member = jax.tree.map(lambda x, i=i: x[i], members)
        alone, _, _ = step_of(tx)(member, tx.init(member))
        np.testing.assert_allclose(np.asarray(params["a"][i], np.float32), np.asarray(alone["a"], np.float32))
    assert_rounded(params, copies_of(opt_state))


@pytest.mark.full
def test_with_master_params_can_be_exported():
    tx = jmpscale.with_master_params(jmpscale.with_loss_scaling(KEEPS_PARAMS))
    params = jmpscale.cast(PARAMS, jnp.bfloat16)
    args = params, tx.init(params)
    stored = jax.export.export(step_of(tx))(*args).serialize()
    assert_equal_bits(step_of(tx)(*args), jax.export.deserialize(stored).call(*args))


def test_with_master_params_has_a_state_that_optax_maps():
    tx, params = jmpscale.with_master_params(ADAMW), jmpscale.cast(PARAMS, jnp.bfloat16)
    specs = {"a": "spec of a", "b": "spec of b"}
    found = optax.tree.map_params(tx, lambda _, spec: spec, tx.init(params), specs)
    assert found.master_params == optax.tree.get(found, "mu") == specs


# --- parameters that something else changes ---


def test_with_master_params_follows_parameters_that_something_else_changes():
    tx = jmpscale.with_master_params(optax.sgd(1.0))
    params = jnp.array([1.0, 2.0, 3.0, jnp.nan], jnp.bfloat16)
    state = tx.init(params)._replace(master_params=jnp.array([1.001, 2.001, 3.001, 4.001]))
    changed = params.at[1].set(5.0)
    _, state = tx.update(jnp.full(4, 2.0**-10), state, changed)
    np.testing.assert_array_equal(state.master_params, np.float32([1.001, 5, 3.001, np.nan]) - np.float32(2.0**-10))
    restored = jnp.array([1.0, 2.0, 3.0, 4.0], jnp.bfloat16)  # after NaN, the copy is not lost for ever
    _, state = tx.update(jnp.zeros(4), state, restored)
    np.testing.assert_array_equal(state.master_params, np.float32([1.001 - 2.0**-10, 2, 3.001 - 2.0**-10, 4]))


@pytest.mark.full
def test_with_master_params_follows_parameters_of_a_checkpoint_beside_a_new_state():
    """As in fine-tuning, whose optimizer state is created before the parameters are restored."""
    tx = jmpscale.with_master_params(ADAMW)
    params, restored = params_in(jnp.bfloat16), jax.tree.map(lambda x: 2 * x, params_in(jnp.bfloat16))
    results = [step_of(tx)(restored, tx.init(start)) for start in (params, restored)]
    assert_equal_bits(*results)


# --- devices ---


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_master_params_has_copies_with_the_sharding_of_their_parameters(dtype):
    mesh = make_mesh()
    tx = jmpscale.with_master_params(jmpscale.with_loss_scaling(optax.adamw(1e-3)))
    shardings = {"a": NamedSharding(mesh, P("data", "model")), "b": NamedSharding(mesh, P("data"))}
    params = jax.device_put(jmpscale.cast(PARAMS, dtype), shardings)
    for init in (tx.init, jax.jit(tx.init)):
        opt_state = init(params)
        assert jax.tree.map(lambda x: x.sharding, opt_state.master_params) == shardings
    opt_state = tx.init(params)
    step = step_of(tx)
    for factor in (1.0, 1.0, jnp.inf):
        params, opt_state, _ = step(params, opt_state, factor)
        for tree in (params, opt_state.master_params):
            assert all(x.sharding.is_equivalent_to(shardings[name], 2) for name, x in tree.items())
    assert_rounded(params, opt_state.master_params)
    assert jmpscale.get_scaler(opt_state).total_skips == 1


@pytest.mark.full
@pytest.mark.parametrize("name", ["inside", "outside"])
def test_with_master_params_under_shard_map_shards_the_copies(name):
    """Each device holds a part of the parameters and of the copies, as in hand-written FSDP."""
    mesh = make_mesh(data=8)
    tx = WRAPPED[name](optax.sgd(1e-3, momentum=0.9))
    grads = jnp.asarray(RNG.standard_normal((8, 16)), jnp.float32)
    params = PARAMS["a"].astype(jnp.float16)

    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    specs = jax.tree.map(lambda x: P("data") if jnp.ndim(x) else P(), opt_state)
    local = jit(jax.shard_map(step, mesh=mesh, in_specs=(P("data"), specs, P("data")), out_specs=(P("data"), specs)))
    for bad in (1.0, jnp.inf):
        expected = jit(step)(params, opt_state, grads.at[3, 5].mul(bad))
        found = local(params, opt_state, grads.at[3, 5].mul(bad))
        assert_equal_bits(expected, found)
        params, opt_state = found
    assert jmpscale.get_scaler(opt_state).total_skips == 1


# --- frameworks and checkers ---


class Linen(nn.Module):
    dtype: str

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(jnp.tanh(nn.Dense(16, param_dtype=self.dtype)(x)))
        return nn.Dense(1, param_dtype=self.dtype)(x)


class NNX(nnx.Module):
    def __init__(self, dtype, rngs):
        self.first = nnx.Linear(8, 16, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 1, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(jnp.tanh(self.first(x))))


def _error(prediction):
    return jnp.mean((prediction.astype(jnp.float32) - Y) ** 2)


def linen(tx, dtype):
    model = Linen(dtype)
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), X)["params"], tx=tx)

    @jax.jit
    def step(state, factor):
        def loss_fn(params):
            return factor * _error(state.apply_fn({"params": params}, X))

        loss, grads = jmpscale.value_and_grad(loss_fn)(state.opt_state, state.params)
        return state.apply_gradients(grads=grads), loss

    return step, (state,), lambda state: (state.params, state.opt_state)


def nnx_optimizer(tx, dtype):
    if FLAX < (0, 12):
        pytest.skip("before Flax 0.12, an Optimizer of NNX requires an array for each parameter")
    model = NNX(dtype, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, factor):
        grad_fn = jmpscale.value_and_grad(lambda model: factor * _error(model(X)), transform=nnx.value_and_grad)
        loss, grads = grad_fn(optimizer.opt_state, model)
        optimizer.update(model, grads, value=loss)
        return loss

    def parts(model, optimizer):
        return jax.tree.map(jnp.copy, (nnx.state(model, nnx.Param), optimizer.opt_state))

    return step, (model, optimizer), parts


def equinox(tx, dtype):
    model = jmpscale.cast(eqx.nn.MLP(8, 1, 16, 1, key=jax.random.key(0)), dtype)
    half = X.astype(dtype)

    @eqx.filter_jit
    def step(model, opt_state, factor):
        grad_fn = jmpscale.value_and_grad(
            lambda model: factor * _error(jax.vmap(model)(half)), transform=eqx.filter_value_and_grad
        )
        loss, grads = grad_fn(opt_state, model)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return eqx.combine(optax.apply_updates(params, updates), static), opt_state, loss

    def parts(model, opt_state):
        return eqx.filter(model, eqx.is_inexact_array), opt_state

    return step, (model, tx.init(eqx.filter(model, eqx.is_inexact_array))), parts


FRAMEWORKS = {"Linen": linen, "NNX": nnx_optimizer, "Equinox": equinox}
# Each framework with both dtypes, and inside and outside of with_loss_scaling.
PAIRS = {
    "Linen": [("float16", "outside"), ("bfloat16", "inside")],
    "NNX": [("float16", "inside"), ("bfloat16", "outside")],
    "Equinox": [("float16", "outside"), ("bfloat16", "inside")],
}
of_frameworks = pytest.mark.parametrize(
    ("framework", "dtype", "wrapped"), [(name, *pair) for name, pairs in PAIRS.items() for pair in pairs]
)


@pytest.mark.full
@of_frameworks
def test_with_master_params_trains_and_skips_in(framework, dtype, wrapped):
    step, state, parts = FRAMEWORKS[framework](WRAPPED[wrapped](optax.adamw(1e-3)), dtype)
    losses = []
    for factor in (*[1.0] * 20, jnp.inf):
        before = parts(*state)
        result = step(*state, factor)
        state, loss = (result[:-1], result[-1]) if isinstance(result, tuple) else (state, result)
        losses.append(loss)
    assert losses[19] < losses[0]
    (params, opt_state), (old, old_state) = parts(*state), before
    assert_equal_bits((old, copies_of(old_state)), (params, copies_of(opt_state)))
    assert_rounded(params, copies_of(opt_state))
    assert jmpscale.get_scaler(opt_state).consecutive_skips == 1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:update does not see that the loss is not finite")  # a TrainState passes no loss
@of_frameworks
def test_check_step_and_diagnose_step_accept_with_master_params_in(framework, dtype, wrapped):
    step, state, _ = FRAMEWORKS[framework](WRAPPED[wrapped](optax.adamw(1e-3)), dtype)
    for steps in (0, 30):  # the first step, and a later one
        for _ in range(steps):
            result = step(*state, 1.0)
            state = result[:-1] if isinstance(result, tuple) else state
        check_step(step)(*state, 1.0)
        diagnosis = jmpscale.diagnose_step(step)(*state, 1.0)
        assert all(change.error < 0.05 for change in diagnosis.changes)
        assert diagnosis.findings == ()


@pytest.mark.full
def test_diagnose_step_names_parameters_whose_updates_change_outside_of_with_master_params():
    tx = optax.chain(jmpscale.with_master_params(optax.scale_by_adam()), optax.scale(-3e-4))
    params = jmpscale.cast(PARAMS, jnp.bfloat16)
    diagnosis = jmpscale.diagnose_step(step_of(tx, jax.jit))(params, tx.init(params))
    assert {change.name for change in diagnosis.changes if change.error > 0.3} == {"params['a']", "params['b']"}


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_diagnose_step_accepts_with_master_params_late_in_training(dtype):
    """It accuses the same step without copies."""
    tx, params = jmpscale.with_master_params(ADAMW), jmpscale.cast(PARAMS, dtype)
    step, opt_state = step_of(tx, jax.jit), tx.init(params)
    for _ in range(300):
        params, opt_state, _ = step(params, opt_state)
    assert jmpscale.diagnose_step(step)(params, opt_state).findings == ()
    plain = jmpscale.diagnose_step(step_of(ADAMW, jax.jit))(params, opt_state.inner_state)
    assert (jmpscale.FindingKind.LOST_CHANGE in [x.kind for x in plain.findings]) == (dtype == "bfloat16")
