"""diagnose takes the arguments of value_and_grad, changes none of them, and works in every mode of JAX."""

import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmpscale
from jmpscale._diagnosis import progress

import meshes
from tables import full, rows

F16 = jnp.float16
RANDOM = np.random.default_rng(0)
W, X = (jnp.asarray(RANDOM.standard_normal(shape), jnp.float32) for shape in ((8, 4), (16, 8)))


def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x.astype(F16) @ w.astype(F16)).astype(jnp.float32) ** 2)


def overflowing(w, x):
    return jnp.mean((jnp.tanh(x.astype(F16) @ w.astype(F16) * F16(30000)) * F16(0)).astype(jnp.float32) + w.mean())


@functools.cache
def expected():
    return jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), W, X)


def test_numbers_are_those_of_value_and_grad():
    diagnosis = expected()
    options = {"xla_allow_excess_precision": False}
    run = jax.jit(lambda scaler: jmpscale.value_and_grad(loss_fn)(scaler, W, X), compiler_options=options)
    loss, grads = jax.device_get(run(jmpscale.dynamic()))
    exact_loss, exact = jax.device_get(jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(X @ w) ** 2))(W))
    assert diagnosis.loss == pytest.approx(float(loss), rel=1e-6)
    assert diagnosis.loss_float32 == pytest.approx(float(exact_loss), rel=1e-6)
    assert diagnosis.gradient_error == pytest.approx(np.linalg.norm(grads - exact) / np.linalg.norm(exact), rel=1e-2)
    assert diagnosis.loss_scale == 2.0**16
    errors = dict(diagnosis.scale_errors)
    assert list(errors) == sorted(errors)
    assert diagnosis.causes == ()
    assert diagnosis.summary == diagnosis.describe().splitlines()[0]
    low, high = diagnosis.fitting_scales()
    assert re.fullmatch(
        rf"Loss scales from 2\^{np.log2(low):.0f} to 2\^{np.log2(high):.0f} fit; yours is 2\^16\. The gradients differ "
        r"from float32 by 0\.\d+%\.",
        diagnosis.summary,
    )


CALLS = {
    "auxiliary data": lambda f: jmpscale.diagnose(lambda *args: (f(*args), X), has_aux=True)(jmpscale.dynamic(), W, X),
    "decorator": lambda f: jmpscale.diagnose(has_aux=False)(f)(jmpscale.dynamic(), W, X),
    "keywords": lambda f: jmpscale.diagnose(f)(jmpscale.dynamic(), W, x=X),
    "other argument": lambda f: jmpscale.diagnose(lambda x, w: f(w, x), 1)(jmpscale.dynamic(), X, W),
    "optimizer state": lambda f: jmpscale.diagnose(f)(jmpscale.with_loss_scaling(optax.sgd(1.0)).init(W), W, X),
    "compiled": lambda f: jmpscale.diagnose(jax.jit(f))(jmpscale.dynamic(), W, X),
    "NumPy": full(lambda f: jmpscale.diagnose(f)(jmpscale.dynamic(), np.asarray(W), np.asarray(X))),
    "checkpointed": full(lambda f: jmpscale.diagnose(jax.checkpoint(f))(jmpscale.dynamic(), W, X)),
}


@pytest.mark.parametrize("call", rows(CALLS))
def test_call_has_the_same_scales(call):
    found = call(loss_fn)
    assert found.fitting_scales() == expected().fitting_scales()
    assert found.summary.split(".")[0] == expected().summary.split(".")[0]


def test_disabled_scaler_has_a_scale_of_one():
    assert jmpscale.diagnose(loss_fn)(jmpscale.disabled(), W, X).loss_scale == 1.0


@pytest.mark.full
@pytest.mark.parametrize("mode", [jax.disable_jit, jax.debug_nans, jax.debug_infs])
def test_mode_of_jax(mode):
    with mode(True):
        assert jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), W, X).summary == expected().summary


@pytest.mark.full
@pytest.mark.usefixtures("x64", "standard_promotion")
def test_64_bit_types():
    wide = jmpscale.diagnose(lambda w, x: loss_fn(w, x).astype(jnp.float64))(jmpscale.dynamic(), W.astype(float), X)
    assert wide.fitting_scales() is not None
    assert wide.gradient_error < 0.01


@pytest.mark.full
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_sharded_arrays(axis_type):
    mesh = meshes.make_mesh(getattr(jax.sharding.AxisType, axis_type), data=4)
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    w = jax.device_put(W, jax.NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        found = jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), w, x)
    assert found.fitting_scales()[1] == expected().fitting_scales()[1]
    assert not found.not_entered


def mapped(w, x, check_vma):
    mesh = meshes.make_mesh(jax.sharding.AxisType.Auto, data=4)
    specs = {"mesh": mesh, "in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P(), "check_vma": check_vma}
    return jax.shard_map(lambda w, x: jax.lax.pmean(loss_fn(w, x), "data"), **specs)(w, x)


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_is_named_and_its_scales_are_measured(check_vma):
    found = jmpscale.diagnose(functools.partial(mapped, check_vma=check_vma))(jmpscale.dynamic(), W, X)
    assert 0 < found.gradient_error < 0.01
    assert all(text.endswith(": shard_map") for text in found.not_entered)
    assert found.not_entered
    assert found.describe().splitlines()[-1] == f"  {found.not_entered[-1]}"


def test_python_reads_values_of_numpy_arguments():
    def branching(w, x, rate, sizes):
        return loss_fn(w, x * (2 if rate > 0.05 else 1)) * float(np.mean(sizes))

    found = jmpscale.diagnose(branching)(jmpscale.dynamic(), W, X, np.float32(0.1), np.ones(3))
    assert found.loss_float32 == pytest.approx(float(jnp.mean(jnp.tanh(2 * X @ W) ** 2)), rel=1e-5)


def test_python_control_flow_on_jax_arrays_raises_with_a_note():
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jmpscale.diagnose(lambda w, x: loss_fn(w, x) if x.sum() > 0 else 0.0)(jmpscale.dynamic(), W, X)
    assert any("diagnose traces the loss function" in note for note in caught.value.__notes__)


def test_callbacks_without_results_do_not_run():
    received = []

    def printing(w, x):
        jax.debug.callback(received.append, w)
        return loss_fn(w, x)

    jmpscale.diagnose(printing)(jmpscale.dynamic(), W, X)
    jax.effects_barrier()
    assert received == []


@pytest.mark.usefixtures("standard_promotion")
def test_nnx_objects_are_unchanged():
    linear = nnx.Linear(8, 4, dtype=F16, rngs=nnx.Rngs(0))
    model = nnx.Sequential(linear, nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Not(nnx.RngKey)))
    found = jmpscale.diagnose(lambda model, x: jnp.mean(model(x) ** 2), transform=nnx.value_and_grad)(
        jmpscale.dynamic(), model, X
    )
    assert found.fitting_scales() is not None
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, nnx.state(model, nnx.Not(nnx.RngKey))))


# --- arguments with infinities ---


def in_dictionary(w, batch):
    return loss_fn(w, batch["image"])


NAMED = {
    "NaN in a dictionary": (in_dictionary, {"image": X.at[0, 0].set(jnp.nan)}, "batch['image']"),
    "infinity": full((loss_fn, X.at[0, 0].set(jnp.inf), "x")),
}


@pytest.mark.parametrize("row", rows(NAMED))
def test_argument_with_infinities_is_named(row):
    fun, argument, name = row
    found = jmpscale.diagnose(fun)(jmpscale.dynamic(), W, argument)
    assert found.summary.startswith(f"{name} contains infinities or NaN, and with zeros in their place")
    assert found.fitting_scales() is None


def test_harmless_infinity_is_not_named():
    def masked(w, x, mask):
        scores = x.astype(F16) @ w.astype(F16) + mask
        return jnp.mean(jax.nn.softmax(scores.astype(jnp.float32))[:, 0])

    mask = jnp.tile(jnp.float16([0, 0, 0, -jnp.inf]), (16, 1))
    found = jmpscale.diagnose(masked)(jmpscale.dynamic(), W, X, mask)
    assert found.summary.startswith("Loss scales from")


# --- the present scale ---


@pytest.mark.parametrize(
    ("scale", "kind", "verb"), [(2.0**-20, "small", "underflows"), (2.0**40, "large", "overflows")]
)
def test_scale_outside_the_range(scale, kind, verb):
    found = jmpscale.diagnose(loss_fn)(jmpscale.static(scale), W, X)
    assert found.fitting_scales() == expected().fitting_scales()
    cause = rf"convert_element_type at test_diagnose.py:\d+ \(loss_fn\) {verb}"
    assert re.search(rf"which is too {kind}: {cause}\.", found.summary)
    assert found.causes[0].line in found.summary


def test_program_in_float32():
    found = jmpscale.diagnose(lambda w, x: jnp.mean((x @ w) ** 2))(jmpscale.dynamic(), W, X)
    assert found.summary.startswith("The program computes in float32")
    assert found.gradient_error < 1e-5


def test_zero_gradients():
    found = jmpscale.diagnose(lambda w, x: loss_fn(w * 0, x))(jmpscale.dynamic(), jnp.zeros((8, 4)), 0 * X + 1)
    assert found.summary == "All gradients are zero, in float32 too. No loss scale changes that."


# --- wrong calls ---


def donated():
    w = jnp.ones(3)
    jax.jit(lambda w: w + 1, donate_argnums=0)(w)
    return w


def with_reference():
    reference = jax.new_ref(jnp.float32(0))

    def counting(w):
        reference[...] += 1
        return jnp.sum(w)

    return jmpscale.diagnose(counting)(jmpscale.dynamic(), W)


WRONG = {
    "fun is not callable": (
        lambda: jmpscale.diagnose(3.0),
        TypeError,
        "fun must be the loss function, got 3.0. The scaler",
    ),
    "no scaler": (
        lambda: jmpscale.diagnose(loss_fn)(W, X),
        ValueError,
        "scaler must contain exactly one ScalerState, found 0 in a Array. Call diagnose(loss_fn)(scaler, params",
    ),
    "batch of scalers": (
        lambda: jmpscale.diagnose(loss_fn)(jax.tree.map(lambda x: jnp.stack([x] * 3), jmpscale.dynamic()), W, X),
        ValueError,
        "scaler must hold one scaler, got a batch with loss_scale of shape (3,).",
    ),
    "abstract argument": (
        lambda: jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), W, jax.ShapeDtypeStruct((2, 8), F16)),
        TypeError,
        "args must hold arrays with values, got float16[2, 8] without values at args[1]. Call diagnose outside of",
    ),
    "traced argument": (
        lambda: jax.jit(lambda x: jmpscale.diagnose(loss_fn)(jmpscale.dynamic(), W, x).loss)(X),
        TypeError,
        "args must hold arrays with values, got float32[16, 8] without values at args[1]. Call diagnose outside of",
    ),
    "donated argument": (
        lambda: jmpscale.diagnose(jnp.sum)(jmpscale.dynamic(), {"w": donated()}),
        ValueError,
        "args must hold arrays with values, got a deleted float32[3] at args[0]['w']. It was donated to a compiled",
    ),
    "limit": (lambda: expected().describe(0), ValueError, "limit must be between 1 and"),
}
if hasattr(jax, "new_ref"):
    WRONG["closed-over reference"] = (with_reference, TypeError, "got a jax.Ref at the values that fun closes over")


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_call_raises(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_only(monkeypatch):
    for stream, is_shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.0)
        with progress.Progress() as show:
            show("10 operations")
        assert ("diagnose: 10 operations" in stream.getvalue()) == is_shown
        assert stream.getvalue().endswith("\r\033[K") == is_shown
