"""diagnose enters every kind of program, names the user's lines, and leaves the caller's objects unchanged."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas

import jmpscale

import diagnosis_programs as programs
import meshes
from diagnosis_programs import H, W, X
from messages import LARGEST_NUMBER, NO_FUNCTION, NO_GRADIENT, NO_HALF_RESULT, OVERFLOW, REMEDY_OF_ALL_LINES


def diagnose(fun, *args, scale=2.0**10, **options):
    return jmpscale.diagnose(fun, **options)(jmpscale.static(scale), *args)


def line_of(fun, text, name=None):
    """Returns the name of the line of a function that contains a text, as a diagnosis shows it."""
    lines, first = inspect.getsourcelines(fun)
    (number,) = [first + i for i, line in enumerate(lines) if text in line]
    return f"test_diagnose.py:{number} ({name or fun.__name__})"


def squared(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


# --- Lines. ---


@jax.jit
def helper(x):
    return x * H(300)  # helper


def two_calls(w, x):
    small = helper(x.astype(H) * w.astype(H))
    large = helper(helper(x.astype(H)))  # large
    return squared(jnp.tanh(small * H(1e-3))) + squared(jnp.tanh(large.astype(jnp.float32) * 1e-6))


@pytest.mark.full
def test_two_calls_of_a_compiled_function_are_two_lines():
    diagnosis = diagnose(two_calls, jnp.float32(0.5), jnp.float32([1.0, 2.0]))
    line = line_of(helper.__wrapped__, "# helper", "helper").removesuffix(")")
    large, small = (
        f"{line}, called at {line_of(two_calls, text).partition(' ')[0]})" for text in ("# large", "small =")
    )
    assert diagnosis.lines == (large,)
    assert f"mul at {large} reaches 1.8e+05, {LARGEST_NUMBER}" in diagnosis.summary
    assert {row.line for row in diagnosis.rows if row.line.startswith(line)} == {large, small}


def library_calls(w, x):
    a = jnp.convolve(300 * x, 300 * w, mode="same")  # first
    b = jnp.convolve(300 * jnp.sin(x), 300 * w, mode="same")  # second
    return jnp.mean(jnp.log1p(a**2) + jnp.log1p(b**2))


@pytest.mark.full
def test_two_calls_of_a_function_of_a_library_are_two_lines():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(64), jnp.float32)
    diagnosis = diagnose(jmpscale.autocast(library_calls), x[:9], x)
    assert diagnosis.lines == (line_of(library_calls, "# first"), line_of(library_calls, "# second"))


def gated_overflow(w, x):
    def step(h):
        return h * H(300) * H(300)  # gated

    h = jmpscale.apply_if(jnp.all(x < 100), step, (x * w).astype(H))
    return squared(jnp.tanh(h.astype(jnp.float32) * 1e-6))


@pytest.mark.full
def test_line_in_a_gate_is_named():
    assert diagnose(gated_overflow, W, X[:8]).lines == (line_of(gated_overflow, "# gated", "step"),)


def inner_step(w):
    tx = jmpscale.with_loss_scaling(optax.sgd(0.1), jmpscale.static(1.0), warn_after_skips=1)
    updates, state = tx.update(jax.lax.stop_gradient(w * jnp.inf), tx.init(w), w)  # a skip
    return squared((w + updates).astype(H)) * (1 + state.scaler.consecutive_skips.astype(jnp.float32))


@pytest.mark.filterwarnings("ignore:1 consecutive steps were skipped")
def test_step_with_a_callback_in_a_loss_is_run():
    assert diagnose(inner_step, W).summary.startswith("Loss scales from ")


def adversarial(inner_grad_fn):
    """Returns a loss that contains a gradient, which underflows unless it is scaled."""

    def inner_loss(x, w):
        return 1e-9 * squared(jnp.tanh(x @ w))

    def loss(w, x):
        _, grad = inner_grad_fn(inner_loss)(x, w)
        step = grad / jnp.maximum(jnp.linalg.norm(grad), 1e-30)
        return squared(jnp.tanh((x + jax.lax.stop_gradient(step)) @ w))

    return jmpscale.autocast(loss)


@pytest.mark.full
def test_remedy_for_a_gradient_inside_the_loss_is_its_own_scale():
    remedy = "Or scale the gradient that the loss contains: value_and_grad(inner_fn)(scaler, ...)."
    assert diagnose(adversarial(jax.value_and_grad), W, X).summary.endswith(remedy)

    def scaled_grad_fn(fun):
        return functools.partial(jmpscale.value_and_grad(fun), jmpscale.static(2.0**30))

    diagnosis = diagnose(adversarial(scaled_grad_fn), W, X)
    assert diagnosis.lines == ()
    assert diagnosis.gradient_error < 0.05


def overflow_in_nested_loops(w, x):
    def outer(h, _):
        return jax.lax.scan(lambda h, _: (h * H(30), None), h, None, length=2)[0], None  # loop

    h, _ = jax.lax.scan(outer, x.astype(H), None, length=2)
    return squared(jnp.tanh(h.astype(jnp.float32) * 1e-6)) + squared(w)


def test_line_in_nested_loops_is_named():
    diagnosis = diagnose(overflow_in_nested_loops, W, X)
    (line,) = diagnosis.lines
    assert line == line_of(overflow_in_nested_loops, "# loop", "outer")


def long_recurrence(w, x):
    def cell(h, x):
        h = jnp.tanh(x @ w + h)  # cell
        return h, None

    return squared(jax.lax.scan(cell, jnp.zeros(8), jnp.broadcast_to(x[0], (10_000, 8)))[0])


@pytest.mark.full
def test_long_loop_remains_a_loop():
    diagnosis = diagnose(jmpscale.autocast(long_recurrence), W, X)
    assert diagnosis.fitting_scales is not None
    assert {row.line for row in diagnosis.rows} == {line_of(long_recurrence, "# cell", "cell")}


# --- Operations that are not entered. ---


def kernel_loss(w):
    def kernel(x, y):
        y[...] = x[...].astype(y.dtype) * 2

    double = pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32), interpret=True)
    return squared(w.astype(H)) + squared(double(jax.lax.stop_gradient(w.astype(H))))  # kernel


@pytest.mark.full
def test_kernels_run_in_their_own_dtype_and_are_listed():
    diagnosis = diagnose(kernel_loss, W)
    (entry,) = diagnosis.not_entered
    assert entry == f"{line_of(kernel_loss, '# kernel')}: pallas_call"
    assert diagnosis.describe().splitlines()[-1] == f"  {entry}"
    assert diagnosis.summary.startswith(
        f"{not_float32(line_of(kernel_loss, '# kernel'), 'pallas_call')} Loss scales from "
    )
    assert diagnosis.fitting_scales is not None


def not_float32(line, operation):
    """Returns the first sentence of a summary whose comparison depends on an operation in half precision."""
    return f"The comparison is not entirely float32: {operation} at {line} runs in half precision in it, too."


def doubled(x):
    def double(x):
        with np.errstate(over="ignore"):
            return np.asarray(x) * np.float16(2)

    return jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # callback


def callback_is_infinite(w):
    return squared(doubled(jax.lax.stop_gradient(w.astype(H) * H(6e4))) * w.astype(H))


@pytest.mark.full
def test_infinity_of_an_operation_in_half_precision_is_not_said_to_be_one_in_float32():
    line = line_of(doubled, "# callback")
    assert diagnose(callback_is_infinite, jnp.ones(2)).summary == (
        f"{not_float32(line, 'pure_callback')} The result of pure_callback at {line} is not finite, and reaches the "
        "loss or a gradient. Whether it is finite in float32 was not measured: give this operation operands in "
        "float32, and diagnose again."
    )


def unused_callback(w):
    doubled(jax.lax.stop_gradient(w.astype(H)))
    return squared(w.astype(H))


def test_operation_in_half_precision_that_does_not_reach_the_outputs_is_only_listed():
    diagnosis = diagnose(unused_callback, jnp.ones(2))
    assert diagnosis.not_entered == (f"{line_of(doubled, '# callback')}: pure_callback",)
    assert diagnosis.summary.startswith("Loss scales from ")


def overflow_in_a_condition(w):
    h = w.astype(H)
    total = jax.lax.stop_gradient(h).sum()

    def goes_on(n):
        return (total * H(300) * H(300) * (n + 1).astype(H)).astype(jnp.float32) < 1e6  # condition

    n = jax.lax.while_loop(goes_on, lambda n: n + 1, jnp.int32(0))
    return jnp.sum((h * (1 + n).astype(H)).astype(jnp.float32) ** 2)


@pytest.mark.full
def test_overflow_in_the_condition_of_a_loop_is_named():
    diagnosis = diagnose(overflow_in_a_condition, jnp.full(3, 0.5), scale=2.0**4)
    line = line_of(overflow_in_a_condition, "# condition", "goes_on")
    assert diagnosis.summary.startswith(f"{OVERFLOW}mul at {line} reaches ")
    assert diagnosis.lines == (line,)


def loop_with_own_bounds(w, x):
    def iterate(x, n):
        return jax.lax.fori_loop(0, n, lambda i, h: jnp.tanh(h * H(3)), x)  # bounds

    h = jax.vmap(iterate)(jax.lax.stop_gradient(x).astype(H), jnp.arange(len(x)) % 5)
    return squared(h.astype(jnp.float32) @ w)


@pytest.mark.full
def test_loop_with_a_bound_for_each_example_is_entered():
    diagnosis = diagnose(loop_with_own_bounds, W, X)
    assert diagnosis.loss_float32 == pytest.approx(float(loop_with_own_bounds(W, X)), rel=0.01)
    assert line_of(loop_with_own_bounds, "# bounds", "iterate") in {row.line for row in diagnosis.rows}
    assert diagnosis.not_entered == ()


def sharded_loss(w, x, check_vma=True):
    def shard_loss(w, x):
        return jax.lax.pmean(programs.mlp_by_hand(w, x), "data")

    mesh = meshes.make_mesh(data=4)
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    return jax.shard_map(shard_loss, mesh=mesh, check_vma=check_vma, **specs)(w, x)


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_is_entered(check_vma):
    diagnosis = diagnose(functools.partial(sharded_loss, check_vma=check_vma), W, X)
    assert diagnosis.not_entered == ()
    assert any("(mlp_by_hand)" in row.line for row in diagnosis.rows)
    plain = diagnose(programs.mlp_by_hand, W, X)
    found, expected = (np.log2(x.fitting_scales) for x in (diagnosis, plain))
    assert np.abs(found - expected).max() <= 3  # each device has a part of the batch
    assert diagnosis.loss == pytest.approx(plain.loss, rel=1e-3)


def sharded_overflow(axis_type, w, x):
    def shard_loss(w, x):
        h = jax.lax.scan(lambda h, _: (h @ w.astype(H), None), x.astype(H), None, length=3)[0]  # overflow
        return jax.lax.pmean(squared(jnp.tanh(h.astype(jnp.float32) * 1e-6)), "data")

    mesh = meshes.make_mesh(getattr(jax.sharding.AxisType, axis_type), data=4)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(shard_loss, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
        return diagnose(mapped, w, jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))))


@pytest.mark.full
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_line_in_a_shard_map_is_named(axis_type):
    diagnosis = sharded_overflow(axis_type, 30 * W, X)
    line = line_of(sharded_overflow, "# overflow", "shard_loss")
    assert diagnosis.summary.startswith(f"{OVERFLOW}dot_general at {line} reaches ")
    assert diagnosis.lines == (line,)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The function jit.* includes a pmap:UserWarning")
def test_pmap_is_entered_or_listed():
    def loss(w, x):
        def device_loss(w, x):
            return jax.lax.pmean(programs.mlp_by_hand(w, x), "devices")

        return jax.pmap(device_loss, axis_name="devices", in_axes=(None, 0))(w, x.reshape(4, 4, 8))[0]

    diagnosis = diagnose(loss, W, X)
    is_entered = any("mlp_by_hand" in row.line for row in diagnosis.rows)
    assert bool(diagnosis.not_entered) or is_entered
    assert diagnosis.fitting_scales is not None
    assert diagnosis.loss == pytest.approx(diagnose(programs.mlp_by_hand, W, X).loss, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_sharded_arrays_have_the_same_diagnosis(axis_type):
    mesh = meshes.make_mesh(getattr(jax.sharding.AxisType, axis_type), data=4)
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    w = jax.device_put(W, jax.NamedSharding(mesh, jax.P()))

    def loss(w, x):
        return squared(jnp.tanh(x.astype(H) @ w.astype(H)))

    with jax.set_mesh(mesh):
        sharded = diagnose(loss, w, x)
    plain = diagnose(loss, W, X)
    (low, high), (plain_low, plain_high) = sharded.fitting_scales, plain.fitting_scales
    assert high == plain_high
    assert plain_low / 2 <= low <= plain_low * 2  # the sums over devices round differently
    assert sharded.not_entered == ()
    found, expected = ([(row.line, row.max_abs) for row in d.rows] for d in (sharded, plain))
    assert {line for line, _ in found} == {line for line, _ in expected}
    assert max(x for _, x in found) == pytest.approx(max(x for _, x in expected), rel=1e-3)


def test_debug_callbacks_do_not_run(capfd):
    calls = []

    def loss(w):
        jax.debug.print("called {}", w)
        jax.debug.callback(lambda x: calls.append(x), w)
        return jnp.sum(jnp.sin(w.astype(H)).astype(jnp.float32))

    assert diagnose(loss, jnp.ones(2)).not_entered == ()
    jax.effects_barrier()
    assert calls == []
    assert "called" not in capfd.readouterr().out


# --- Settings of JAX. ---


def sine(w):
    return squared(jnp.sin(w.astype(H)))


SETTINGS = {
    "disable_jit": lambda: jax.disable_jit(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "standard promotion": lambda: jax.numpy_dtype_promotion("standard"),
    "x64": lambda: jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(),
}


@pytest.mark.full
def test_settings_of_jax_do_not_change_the_diagnosis():
    w = jnp.float32([1.0, 2e5])  # the sine of an infinity is NaN
    plain = diagnose(sine, w)
    assert plain.summary.startswith(OVERFLOW)
    for name, setting in SETTINGS.items():
        with setting():
            found = diagnose(sine, w)
        assert found.summary == plain.summary, name
        assert found.rows == plain.rows, name


@pytest.mark.full
@pytest.mark.usefixtures("x64")
def test_program_in_float64():
    def loss(w, x):
        h = jax.lax.scan(lambda h, i: (jnp.tanh(h) + i.astype(H), None), (x @ w).astype(H), jnp.arange(3))[0]
        return jnp.mean(h.astype(jnp.float64) ** 2)

    diagnosis = diagnose(loss, W.astype(jnp.float64), X.astype(jnp.float64))
    low, high = diagnosis.fitting_scales
    assert low < 2.0**10 < high
    assert diagnosis.summary.startswith("Loss scales from ")


# --- Arguments. ---


def test_control_flow_on_jax_arrays_has_a_remedy():
    def loss(w, x):
        return jnp.sum(w) if x > 0 else jnp.sum(w**2)

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        diagnose(loss, jnp.ones(2), jnp.float32(1))
    *_, note = caught.value.__notes__
    assert note.startswith("diagnose traces the loss function, as jax.jit does, so Python must not read the values of")
    assert f", as it does at test_diagnose.py:{loss.__code__.co_firstlineno + 1} (loss). Arguments" in note


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this version of JAX has no jax.new_ref")
def test_closed_over_ref_raises():
    ref = jax.new_ref(jnp.float32(0))

    def loss(w):
        ref[...] += 1
        return jnp.sum(w)

    with pytest.raises(TypeError, match="the values that fun closes over"):
        diagnose(loss, jnp.ones(2))
    assert ref[...] == 0


@pytest.mark.full
def test_arguments_with_infinities_are_named():
    def loss(w, batch, bias):
        return squared(batch["image"] * w + bias)

    image = jnp.float32([1.0, jnp.nan])
    diagnosis = diagnose(loss, jnp.float32(1), {"image": image}, image)
    assert diagnosis.summary == (
        "Infinities or NaN in batch['image'] and bias reach the loss or a gradient: with zeros in their place, the "
        "loss and the gradients are finite. Correct the data, or gate the state that a skipped step has changed."
    )
    assert np.isnan(diagnosis.loss)
    assert np.isnan(diagnosis.loss_float32)
    assert diagnosis.gradient_error == np.inf
    assert diagnosis.scale_errors == ()
    assert diagnosis.fitting_scales is None


@pytest.mark.full
def test_argument_with_infinities_is_not_named_if_a_line_is_the_reason():
    mask = jnp.float32([-jnp.inf, 0])
    diagnosis = diagnose(lambda w, mask: squared(jnp.log(w * 0) + jnp.exp(mask)), jnp.ones(2), mask)
    assert diagnosis.summary.startswith("The result of log at ")


@pytest.mark.full
def test_operations_that_also_have_integer_results_are_run():
    def loss(w):
        operands, start = (jax.lax.stop_gradient(w) * 3, jnp.arange(4)), (np.float16(0), 0)
        largest, _ = jax.lax.reduce(operands, start, lambda x, y: (jnp.maximum(x[0], y[0]), x[1] + y[1]), (0,))
        return squared(jax.lax.top_k(jnp.sort(w), 2)[0] - largest)

    assert "reduce" in {row.operation for row in diagnose(loss, jnp.arange(4, dtype=H)).rows}


def test_scan_without_iterations_is_evaluated():
    def loss(w):
        return squared(jax.lax.scan(lambda h, x: (h * x, h), w, jnp.zeros((0, 2)))[0])

    diagnosis = diagnose(loss, jnp.ones(2))
    assert diagnosis.summary.startswith(NO_HALF_RESULT)
    assert diagnosis.not_entered == ()


def test_diagnose_does_not_change_the_containers_of_the_caller():
    def loss(w, batch):
        scale = 2.0 if batch.pop("flag")[0] > 0 else 1.0  # reads the values of a NumPy array
        return squared(batch.pop("x") * w) * scale

    batch = {"x": jnp.ones(2), "flag": np.ones(1, np.float32)}
    diagnose(loss, jnp.ones(2), batch)
    assert list(batch) == ["x", "flag"]


@pytest.mark.full
def test_program_in_bfloat16():
    diagnosis = diagnose(jmpscale.autocast(programs.mlp, dtype=jnp.bfloat16), W, X)
    assert diagnosis.summary.startswith("Loss scales from 2^-")
    assert {row.dtype for row in diagnosis.rows} == {"bfloat16"}
    low, high = diagnosis.fitting_scales
    assert low < 2.0**-60
    assert high > 2.0**100


def test_program_without_gradients():
    diagnosis = diagnose(lambda w: squared(jax.lax.stop_gradient(w.astype(H))), jnp.ones(2))
    assert diagnosis.summary.startswith(f"{NO_GRADIENT}No loss scale")


def test_options_are_those_of_value_and_grad():
    def loss(x, w):
        return jnp.sum((x * w.astype(H)).astype(jnp.float32)), "auxiliary"

    diagnose_loss = jmpscale.diagnose(loss, 1, True)
    diagnosis = diagnose_loss(jmpscale.static(4.0), jnp.float16([1, 2]), jnp.float32([3, 4]))
    assert diagnosis.loss == 11
    assert diagnosis.fitting_scales is not None
    assert diagnose_loss.__name__ == "diagnose_of_loss"


@pytest.mark.full
def test_remedy_is_tried_inside_of_jit():
    plain = diagnose(jmpscale.autocast(programs.image_positions), W, X)
    compiled = diagnose(jax.jit(jmpscale.autocast(programs.image_positions)), W, X)
    assert compiled.summary == plain.summary
    assert REMEDY_OF_ALL_LINES in compiled.summary


@pytest.mark.full
def test_linear_solve_runs_as_written_and_is_listed():
    def loss(scale):
        half = (jnp.eye(8) * (2 + scale)).astype(H)
        return squared(jax.scipy.sparse.linalg.cg(lambda v: half @ v, X[0].astype(H), maxiter=20)[0])  # solve

    diagnosis = diagnose(loss, jnp.float32(0.1))
    assert f"{line_of(loss, '# solve')}: custom_linear_solve" in diagnosis.not_entered
    assert diagnosis.loss_float32 == pytest.approx(float(jnp.mean((X[0] / 2.1) ** 2)), rel=1e-2)


def test_callback_with_side_effects_and_a_result_is_refused():
    def loss(w):
        factor = jax.experimental.io_callback(lambda: np.float32(2), jax.ShapeDtypeStruct((), np.float32))
        return squared((w * factor).astype(H))

    with pytest.raises(
        TypeError, match=r"with io_callback, as it does at test_diagnose\.py:\d+ \(loss\): .* Pass the val"
    ):
        diagnose(loss, jnp.ones(2))


@jax.checkpoint
def overflow_of_the_gradient(w, x):
    """The activations hardly change if the logarithm is infinite; the gradient does."""
    h = x * jax.lax.rsqrt(jnp.mean(x**2) + 1e-6) @ w
    logarithm = jnp.log(1 + (h.astype(H) ** 2).astype(jnp.float32))  # fault
    return jnp.mean((jnp.tanh(h) + 1e-3 * jnp.minimum(logarithm, 20)) ** 2)


@pytest.mark.full
def test_overflow_of_a_value_that_is_computed_again_is_one_of_the_forward_pass():
    w = jax.random.normal(jax.random.key(0), (8, 8)) * 3000
    diagnosis = diagnose(overflow_of_the_gradient, w, X)
    begin = "The forward pass, which is computed again, overflows: integer_pow at "
    assert diagnosis.summary.startswith(f"{begin}{line_of(overflow_of_the_gradient, '# fault')} reaches ")


# --- Wrong calls. ---


def donated():
    w = jnp.ones(3)
    jax.jit(lambda w: w + 1, donate_argnums=0)(w)
    return w


def explicit_array():
    mesh = meshes.make_mesh(jax.sharding.AxisType.Explicit, data=4)
    return jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P("data")))


def train_step(scaler, params, batch):
    loss, grads = jmpscale.value_and_grad(lambda params: jnp.mean((params * batch) ** 2))(scaler, params)
    return params - grads, jmpscale.update(scaler, jmpscale.all_finite(grads)), loss


OF_A_STEP = "For a training step, call diagnose_step(train_step) with the arguments of the step."
WRONG = {
    "a training step that begins with the scaler": (
        lambda: jmpscale.diagnose(train_step)(jmpscale.dynamic(), X, X),
        TypeError,
        "fun must accept the arguments that follow the first one, which contains the scaler, but train_step does "
        "not: missing a required argument: 'batch'. If fun takes the first argument, too, pass it twice. "
        f"{OF_A_STEP}",
    ),
    "an argument is missing": (
        lambda: jmpscale.diagnose(lambda w, x: sine(w))(X),
        TypeError,
        f"fun must accept its arguments, but <lambda> does not: missing a required argument: 'x'. {OF_A_STEP}",
    ),
    "a training step that begins with the parameters": (
        lambda: jmpscale.diagnose(lambda params, scaler, x: train_step(scaler, params, x))(X, jmpscale.dynamic(), X),
        TypeError,
        f"fun must return the loss, got tuple of 3 from <lambda>. {OF_A_STEP}",
    ),
    "a training step of the parameters": (
        lambda: diagnose(lambda params: train_step(jmpscale.dynamic(), params, X), X),
        TypeError,
        f"fun must return the loss, got tuple of 3 from <lambda>. {OF_A_STEP}",
    ),
    "fun is not callable": (
        lambda: jmpscale.diagnose(3.0),
        TypeError,
        f"{NO_FUNCTION} 3.0. Its arguments are those of the new function: diagnose(loss_fn)(params",
    ),
    "abstract argument": (
        lambda: diagnose(sine, jax.ShapeDtypeStruct((2, 8), H)),
        TypeError,
        "args must hold arrays with values, got float16[2, 8] without values at args[0]. Call diagnose outside",
    ),
    "traced keyword": (
        lambda: jax.jit(lambda x: jmpscale.diagnose(sine)(jmpscale.static(1.0), w={"a": x}))(X),
        TypeError,
        "kwargs must hold arrays with values, got float32[16, 8] without values at kwargs['w']['a'].",
    ),
    "explicit mesh without a context": (
        lambda: diagnose(sine, explicit_array()),
        ValueError,
        "args must be used in the context of its mesh, got an array on a mesh with Explicit axes at args[0]. Call",
    ),
    "donated argument": (
        lambda: diagnose(sine, {"w": donated()}),
        ValueError,
        "args must hold arrays with values, got a deleted float32[3] at args[0]['w']. It was donated to a compiled",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_call_raises(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_diagnose_without_a_scaler_compares_the_gradients_as_they_are():
    def loss_fn(w, x):
        return jnp.mean((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    found, expected = (jmpscale.diagnose(loss_fn)(*scaler, W, X) for scaler in ((), (jmpscale.static(1.0),)))
    assert found.gradient_error == expected.gradient_error
    assert found.loss == expected.loss
    assert found.fitting_scales is None
    assert found.summary == expected.summary.partition("yours is 2^0. ")[2]


def test_diagnose_without_a_scaler_says_to_scale_a_loss_whose_gradients_underflow():
    summary = jmpscale.diagnose(lambda w, x: 1e-8 * jnp.mean((x.astype(jnp.float16) @ w).astype(jnp.float32) ** 2))(
        W.astype(jnp.float16), X
    ).summary
    assert summary.startswith("The backward pass underflows: ")
    assert "Scale the loss, with jmpscale.value_and_grad and a scaler, or by a larger number if" in summary
