"""Each wrong call raises an error or a warning that names the argument, its value and the remedy; limits are exact.

The diagnoses of `raise_if_stuck` are in test_monitor.py, the assertions of `jmpscale.testing` in test_testing.py, the
errors of the command line in test_main.py.
"""

import functools
import re
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale import testing

import meshes
from tables import names

STATE = jmpscale.dynamic()
BATCH = jax.tree.map(lambda x: np.stack([x, x]), STATE)
LOSS = jnp.float32(1.0)
TRUE = jnp.array(True)
FLAGS = jnp.array([True, False])
INTS = np.zeros(2, np.int32)
W32, W16, W8 = jnp.ones(2), jnp.ones(2, jnp.float16), jnp.ones(2, jnp.float8_e4m3fn)
GRADS = {"w": jnp.ones(3), "b": jnp.ones(2)}
BIG = {f"layer_{i}": {"kernel": np.full((30, 30), 1 / 3, np.float32), "bias": np.zeros(9)} for i in range(100)}
PLATEAU = optax.contrib.reduce_on_plateau()
ADAM, ADAM16, SGD = optax.adam(1e-3), optax.adam(1e-3, mu_dtype=jnp.float16), optax.sgd(1e-3)
TX = jmpscale.with_loss_scaling(ADAM)
OPT_STATE = TX.init(GRADS)
SCALE = jmpscale.with_loss_scaling(optax.scale(1.0))
SCALE_STATE = SCALE.init(GRADS)
REPORT = jmpscale.GradReport(np.array(True), np.ones(2, np.float32), *[INTS] * 5, paths=("b", "w"), sizes=(2, 3))
REPORTS = jax.tree.map(lambda x: np.stack([x, x]), REPORT)
NNX, EQUINOX = nnx.Dropout(0.5), eqx.nn.Lambda(jnp.tanh)
SMALLEST, LARGEST, COUNTER = 2.0**-126, 2.0**126, 2**31 - 1


def _same(*carry):
    return carry[0] if len(carry) == 1 else carry


def _sum(tree, *_):
    """A loss of any model."""
    return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)))


class Posterior(NamedTuple):
    """Has a field with the name of an average of optax."""

    mu: jax.Array
    sigma: jax.Array


def apply_if_finite(call):
    """Has the name of a transformation of optax."""

    def update():
        return call()

    return update()


def _traced(fn, *args):
    return jax.eval_shape(fn, *args)


def _per_device(fn, *args, check_vma=False):
    """Traces `fn` under `shard_map`, on an argument that differs between the devices, and on others that do not."""
    specs = (P("d"), *[P() for _ in args])
    mesh = meshes.make_mesh(d=8)
    _traced(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P("d"), check_vma=check_vma), jnp.ones(8), *args)


def _raises(error, words):
    """Expects an error or a warning whose message contains the words; " ... " in them stands for any text."""
    return pytest.raises(error, match=".*".join(map(re.escape, words.split(" ... "))))


def test_error_names_the_argument_its_value_and_the_remedy():
    with _raises(
        ValueError, "growth_factor must be between ... and 2^126, got 1. ... above 1 in float32; the default is 2."
    ):
        jmpscale.dynamic(growth_factor=1.0)


# --- arguments of multiple functions are checked ---

TAKE_SCALER = {  # the call, and the name of the argument
    "update": (lambda s: jmpscale.update(s, True), "scaler"),
    "with_loss_scaling": (lambda s: jmpscale.with_loss_scaling(ADAM, s), "scaler"),
    "tx.update": (lambda s: TX.update(GRADS, OPT_STATE._replace(scaler=s), GRADS), "state.scaler"),
    "replace_scaler": (lambda s: jmpscale.replace_scaler(OPT_STATE, s), "scaler"),
}


@pytest.mark.parametrize("name", TAKE_SCALER)
def test_function_requires_a_scaler(name):
    call, argument = TAKE_SCALER[name]
    with _raises(TypeError, f"{argument} must be a ScalerState, got tuple. ... dynamic ... get_scaler"):
        call(tuple(STATE))
    with _raises(TypeError, f"{argument}.config must be a ScalerConfig, got NoneType. Restore a checkpoint into"):
        call(STATE._replace(config=None))
    with _raises(
        ValueError, f"{argument} must hold one scaler, got ... shape (2,). Call this under jax.vmap; or, ... tree.map("
    ):
        call(BATCH)


READ_SCALER_OF_TREE = {  # the call, and the name of the argument
    "get_scaler": (jmpscale.get_scaler, "tree"),
    "metrics": (jmpscale.metrics, "scaler"),
    "raise_if_stuck": (lambda tree: jmpscale.raise_if_stuck(tree, max_consecutive_skips=1), "scaler"),
    "value_and_grad": (lambda tree: jmpscale.value_and_grad(_sum)(tree, GRADS), "scaler"),
    "loss_scaled": (lambda tree: jmpscale.loss_scaled(_sum, lambda _: tree)(GRADS), "scale"),
    "all_finite": (lambda tree: jmpscale.all_finite(GRADS, scaler=tree), "scaler"),
    "scale": (lambda tree: jmpscale.scale(tree, LOSS), "scaler"),
    "unscale": (lambda tree: jmpscale.unscale(tree, GRADS), "scaler"),
    "unscale_and_check": (lambda tree: jmpscale.unscale_and_check(tree, GRADS), "scaler"),
    "grad_report": (lambda tree: jmpscale.grad_report(GRADS, scaler=tree), "scaler"),
    "to_torch_state_dict": (jmpscale.to_torch_state_dict, "scaler"),
    "diagnose": (lambda tree: jmpscale.diagnose(_sum)(tree, GRADS), "scaler"),
}
ACCEPT_BATCH_OF_SCALERS = {"get_scaler", "metrics", "raise_if_stuck"}
TAKE_TREE_WITH_SCALER = READ_SCALER_OF_TREE | {
    "replace_scaler": (lambda tree: jmpscale.replace_scaler(tree, STATE), "tree"),
}


@pytest.mark.parametrize("name", TAKE_TREE_WITH_SCALER)
def test_function_requires_a_tree_with_one_scaler(name):
    call, argument = TAKE_TREE_WITH_SCALER[name]
    words = rf"{argument} must contain exactly one ScalerState, found 0 in a dict\. (Pass a|The scaler|Call diagnose)"
    with pytest.raises(ValueError, match=words):
        call(GRADS)
    with _raises(ValueError, "exactly one ScalerState, found 2 in a list. A step has one scaler: wrap"):
        call([STATE, {"b": STATE}])


@pytest.mark.parametrize("name", names(READ_SCALER_OF_TREE, {"grad_report"}))
def test_function_reads_the_scaler_of_a_tree(name):
    call, _ = READ_SCALER_OF_TREE[name]
    of_scaler, of_tree = call(STATE), call({"step": 3, "opt_state": OPT_STATE._replace(scaler=STATE)})
    assert str(of_tree) == str(of_scaler)


@pytest.mark.parametrize("name", READ_SCALER_OF_TREE)
def test_function_requires_the_arrays_of_one_scaler(name):
    call, argument = READ_SCALER_OF_TREE[name]
    with _raises(ValueError, f"{argument} must contain ... all arrays, got 0. Pass the unfiltered tree."):
        call(jax.tree.map(lambda _: None, OPT_STATE))
    if name in ACCEPT_BATCH_OF_SCALERS:
        call((BATCH, 1))
    else:
        with _raises(ValueError, f"{argument} must hold one scaler, got ... shape (2,)"):
            call((BATCH, 1))


TAKE_NO_REF = {  # the call, and the path of the reference
    "all_finite": (jmpscale.all_finite, "tree['w']"),
    "scale": (lambda tree: jmpscale.scale(STATE, tree), "tree['w']"),
    "scale-disabled": (lambda tree: jmpscale.scale(jmpscale.disabled(), tree), "tree['w']"),
    "unscale": (lambda tree: jmpscale.unscale(STATE, tree), "tree['w']"),
    "unscale-disabled": (lambda tree: jmpscale.unscale(jmpscale.disabled(), tree), "tree['w']"),
    "cast": (lambda tree: jmpscale.cast(tree, jnp.float16), "tree['w']"),
    "apply_if": (lambda tree: jmpscale.apply_if(True, _same, tree), "carry[0]['w']"),
    "grad_report": (jmpscale.grad_report, "grads['w']"),
    "tx.update": (lambda tree: TX.update(tree, OPT_STATE), "updates['w']"),
    "autocast-args": (lambda tree: jmpscale.autocast(_sum)(GRADS, tree), "args[1]['w']"),
    "autocast-kwargs": (lambda tree: jmpscale.autocast(_sum)(tree=tree), "kwargs['tree']['w']"),
    "loss_scaled-args": (lambda tree: jmpscale.loss_scaled(_sum, 8.0)(GRADS, tree), "args[1]['w']"),
    "loss_scaled-kwargs": (lambda tree: jmpscale.loss_scaled(_sum, 8.0)(tree=tree), "kwargs['tree']['w']"),
}


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this version of JAX has no public references")
@pytest.mark.parametrize("name", TAKE_NO_REF)
def test_ref_raises(name):
    call, path = TAKE_NO_REF[name]
    with _raises(TypeError, f"must hold values, got a jax.Ref at {path}. Pass its value, ref[...]."):
        call({"b": jnp.ones(1), "w": jax.new_ref(jnp.ones(2))})


TAKE_NO_PARTIAL_SUM = {
    "all_finite": jmpscale.all_finite,
    "unscale": lambda tree: jmpscale.unscale(STATE, tree),
    "grad_report": jmpscale.grad_report,
    "tx.update": lambda tree: TX.update(tree, OPT_STATE),
}


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="this version of JAX has no type for partial sums under jit")
@pytest.mark.parametrize("name", TAKE_NO_PARTIAL_SUM)
def test_partial_sum_raises(name):
    def fn(x):
        total = jnp.einsum("ij,kj->ik", x, x, out_sharding=P(None, None, unreduced={"d"}))
        return TAKE_NO_PARTIAL_SUM[name]({"a": 1, "b": x, "w": total})

    with jax.set_mesh(meshes.make_mesh(AxisType.Explicit, d=8)):
        x = jax.sharding.reshard(jnp.ones((4, 8)), P(None, "d"))
        words = "the leaf at tree['w'] is a partial sum over the mesh axes ['d'] ... psum ... reshard"
        with _raises(TypeError, words):
            _traced(fn, x)


# --- wrong calls: by the class of the error, the call and the words of the message ---


def _dynamic(**settings):
    return lambda: jmpscale.dynamic(**settings)


CONSTRUCTORS = {
    TypeError: {
        "bool": (_dynamic(growth_factor=True), "growth_factor must be a Python float, got True of type bool"),
        "array": (_dynamic(growth_factor=jnp.ones(())), "growth_factor ... float32[] of type Array. ... with float()"),
        "traced": (lambda: _traced(jmpscale.dynamic, 8.0), "init_scale must ... got float32[] ... a traced value"),
        "string": (_dynamic(backoff_factor="0.5"), "backoff_factor must be a Python float, got '0.5' of type str"),
        "float count": (_dynamic(growth_interval=100.0), "growth_interval must ... of type float. Convert"),
        "string count": (_dynamic(growth_interval="x" * 58), f"must be a Python int, got '{58 * 'x'}' of type str"),
        "long string": (_dynamic(growth_interval="x" * 59), f"must be a Python int, got '{56 * 'x'}..."),
        "bool count": (_dynamic(hysteresis=True), "hysteresis must be a Python int, got True"),
    },
    ValueError: {
        "growth rounds to 1": (_dynamic(growth_factor=1 + 2.0**-24), "growth_factor must ... be above 1 in float32"),
        "large growth": (_dynamic(growth_factor=LARGEST * 1.5), "growth_factor must ... got 1.2760588759535192e+38."),
        "backoff rounds to 1": (
            _dynamic(backoff_factor=1 - 2.0**-25),
            "backoff_factor must ... be below 1 in float32; the default is 0.5.",
        ),
        "small backoff": (_dynamic(backoff_factor=SMALLEST / 2), "backoff_factor must ... got 2^-127."),
        "interval of 0": (_dynamic(growth_interval=0), "growth_interval must be between 1 and ... got 0. Pass"),
        "large interval": (_dynamic(growth_interval=2**31), "growth_interval must ... got 2147483648."),
        "hysteresis of 0": (_dynamic(hysteresis=0), "hysteresis must be between 1 and"),
        "reset": (_dynamic(hysteresis_reset="never"), "hysteresis_reset must be ... 'finite', got 'never'"),
        "small min_scale": (_dynamic(min_scale=SMALLEST / 2), "min_scale must ... 2^-126 and 2^126, got 2^-127."),
        "large max_scale": (_dynamic(max_scale=LARGEST * 1.5), "max_scale must ... got 1.2760588759535192e+38."),
        "max_scale above float64": (_dynamic(max_scale=10**400), "max_scale must ... 2^126, got 10000"),
        "min above max": (_dynamic(min_scale=4.0, max_scale=2.0), "min_scale must not exceed max_scale, got 4 and 2."),
        "init below min": (_dynamic(init_scale=0.5), "init_scale must be between 1 and 2^32, got 0.5. Change"),
        "init above max": (_dynamic(init_scale=2.0**32 + 1), "init_scale must be between"),
        "ignored setting": (
            lambda: jmpscale.ScalerConfig(mode="static", growth_interval=5),
            "growth_interval must be omitted with mode 'static', got 5.",
        ),
        "mode": (lambda: jmpscale.ScalerConfig(mode="off"), "mode must be one of ... 'disabled', got 'off'."),
        "small static scale": (
            lambda: jmpscale.static(SMALLEST / 2),
            "scale must be between 2^-126 and 2^126, got 2^-127. Outside, it or its reciprocal",
        ),
        "large static scale": (lambda: jmpscale.static(LARGEST * 1.5), "scale must be between"),
    },
}


def _donated(state):
    """Returns a scaler whose arrays are deleted, as a compiled function deletes what is donated to it."""
    state = jax.tree.map(jnp.asarray, state)
    jax.tree.map(lambda x: x.delete(), state)
    return state


def _update(**fields):
    return lambda: jmpscale.update(STATE._replace(**fields), True)


def _after_gradients(use, state=STATE):
    """Traces `use(state, grads, ok)` after a backward pass with this state."""
    grads = jmpscale.value_and_grad(_sum)
    return lambda: _traced(lambda s: (lambda g: use(s, g, jmpscale.all_finite(g)))(grads(s, GRADS)[1]), state)


def _pair(aux):
    """Returns a loss and auxiliary data."""
    return jmpscale.value_and_grad(lambda w: (_sum(w), aux), has_aux=True)(STATE, W32)[0]


SCALE_AND_UPDATE = {
    TypeError: {
        "vector field": (_update(finite_steps=INTS), "scaler.finite_steps must be a scalar ... got int32[2]."),
        "float field": (_update(finite_steps=np.float32(3)), "scaler.finite_steps must ... got float32[]. ... restore"),
        "int16 field": (_update(total_skips=np.int16(3)), "scaler.total_skips must ... 32 bits, got int16[]."),
        "float16 scale": (_update(loss_scale=np.float16(8)), "scaler.loss_scale must ... 32 bits, got float16[]."),
        "int32 scale": (_update(loss_scale=np.int32(8)), "scaler.loss_scale must ... got int32[]. Convert it"),
        "int scale": (_update(loss_scale=1024), "scaler.loss_scale must ... got 1024. Convert it, or"),
        "complex scale": (_update(loss_scale=np.complex64(8)), "scaler.loss_scale must ... got complex64[]."),
        "string scale": (_update(loss_scale="8"), "scaler.loss_scale must ... got '8'."),
        "dict as config": (_update(config={}), "scaler.config must ... got dict. Restore a checkpoint"),
        "int loss": (lambda: jmpscale.scale(STATE, {"n": jnp.int32(3)}), "got int32[] at tree['n']. Pass only"),
        "complex loss": (lambda: jmpscale.scale(STATE, 1j), "floating-point losses, got 1j at tree. "),
        "function as gradients": (lambda: jmpscale.all_finite(jnp.sum), "tree must be a pytree ... got sum. Pass"),
        "string loss": (lambda: jmpscale.scale(STATE, "x"), "got 'x' at tree. "),
        "number as flag": (lambda: jmpscale.update(STATE, 1), "finite must be a boolean, got 1. Pass the result"),
        "int32 as flag": (lambda: jmpscale.update(STATE, jnp.int32(1)), "finite must be a boolean, got int32"),
    },
    ValueError: {
        "donated scaler": (
            lambda: jmpscale.metrics(_donated(jmpscale.dynamic())),
            "deleted arrays, ... Use the scaler that",
        ),
        "flags": (lambda: jmpscale.update(STATE, FLAGS), "finite must be a scalar, got shape (2,). Combine with"),
        "axis": (lambda: jmpscale.update(STATE, TRUE, axis_name="x"), "'x' is not the name of a ... omit axis_name"),
        "axis set": (lambda: jmpscale.all_finite(GRADS, axis_name={"x"}), "axis_name 'x' is not the name of a mapped"),
        "nested axis": (
            lambda: jmpscale.all_finite(GRADS, axis_name=[["x"]]),
            "list of 1 is not the name of",
        ),
    },
    UserWarning: {
        "float16 loss": (lambda: _traced(jmpscale.scale, STATE, W16), "the loss is float16 ... Return it in float32"),
        "float8 loss": (lambda: _traced(jmpscale.scale, STATE, W8), "the loss is float8_e4m3fn"),
        "constant": (
            lambda: _traced(lambda x: jmpscale.update(STATE, x), TRUE),
            "the scaler is a constant ... pass it to the compiled function as an argument, and return the new one.",
        ),
        "created": (
            lambda: _traced(lambda x: jmpscale.update(jmpscale.dynamic(), x), TRUE),
            "the scaler is a constant of the compiled program ... the compiled function creates the scaler",
        ),
        "update inside apply_if": (
            lambda: jmpscale.apply_if(True, lambda scaler: jmpscale.update(scaler, TRUE), STATE),
            "jmpscale.update is inside jmpscale.apply_if: ... every later step would be skipped. Call update after",
        ),
        "unscaled twice": (
            lambda: _traced(lambda grads: jmpscale.unscale(STATE, jmpscale.unscale(STATE, grads)), GRADS),
            "the gradients are unscaled twice: value_and_grad and loss_scaled unscale them. Remove this call.",
        ),
        "unscaled after loss_scaled": (
            lambda: _traced(lambda w: jmpscale.unscale(STATE, _grad(w)()), W32),
            "the gradients are unscaled twice",
        ),
        "unscaled after value_and_grad": (
            lambda: jmpscale.unscale_and_check(STATE, jmpscale.value_and_grad(_sum)(STATE, GRADS)[1]),
            "the gradients are unscaled twice",
        ),
        "unscaled loss": (
            lambda: jmpscale.unscale(STATE, jmpscale.value_and_grad(_sum)(STATE, GRADS)[0]),
            "the gradients are unscaled twice",
        ),
        "flag of the loss": (
            lambda: jmpscale.update(STATE, jmpscale.all_finite(jmpscale.value_and_grad(_sum)(STATE, GRADS)[0])),
            "finite must be about the gradients, got all_finite(loss). Pass all_finite(grads).",
        ),
        "loss and array": (_after_gradients(lambda s, _, ok: jmpscale.update(s, ok, loss=_pair(W32))), "got a pair"),
        "updated twice": (
            _after_gradients(lambda s, _, ok: jmpscale.update(jmpscale.update(s, ok), ok)),
            "the scaler is updated twice in a step. Remove this call: with_loss_scaling updates its own scaler.",
        ),
        "updated by the wrapper": (
            _after_gradients(
                lambda s, g, ok: jmpscale.update(SCALE.update(g, s)[1].scaler, jmpscale.all_finite(g)), SCALE_STATE
            ),
            "the scaler is updated twice",
        ),
        "missing axis": (lambda: _per_device(jmpscale.all_finite), "axes ('d',) ... axis_name=('d',) ... axis_name=()"),
    },
}


def _apply(fn, *carry):
    return lambda: jmpscale.apply_if(TRUE, fn, *carry)


def _reshard_in_step():
    mesh = meshes.make_mesh(AxisType.Explicit, d=8)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, P("d")))
        jmpscale.apply_if(TRUE, lambda x: jax.sharding.reshard(x, P()), x)


def _gate(new, state, finite=None):
    return jmpscale.apply_if(new.scaler.step_applied if finite is None else finite, lambda _: new, state)


def _apply_if_applied(scaler, finite, of_new_scaler):
    applied = scaler.step_applied
    new = jmpscale.update(scaler, finite)
    return jmpscale.apply_if(new.step_applied if of_new_scaler else applied, _same, W32)


def _gate_variables(copy=lambda state: state):
    state = nnx.State({"w": nnx.Param(W32)})
    jmpscale.apply_if(TRUE, lambda _: state, copy(state))


APPLY_IF = {
    TypeError: {
        "no flag": (lambda: jmpscale.apply_if(BIG, _same, LOSS), "finite must be a boolean, got dict"),
        "no function": (_apply(LOSS, LOSS), "fn must be a function ... got Array. ... apply_if(finite, fn, *carry)."),
        "no carry": (_apply(_same), "carry must hold at least one value, got none. Pass"),
        "nnx": (_apply(_same, NNX), "carry must hold ... got a Flax NNX Dropout ... carry nnx.state(model), and write"),
        "list": (_apply(lambda a, b: [a, b], 1, 1), "returned a list, expected a tuple of 2 values: `return a, b`."),
        "dropped": (_apply(lambda c: c["layer_1"], BIG), "carry[0]['layer_0']['bias'] is only in its input."),
        "added": (_apply(lambda c: c | {"v": 1}, GRADS), "carry[0]['v'] is only in its output"),
        "container": (_apply(list, (LOSS, LOSS)), "same structure, but the containers differ: PyTreeDef((("),
        "dtype": (_apply(lambda w: w.astype("f2"), LOSS), "was float32[] and is float16[]. Convert it with .astype"),
        "shape": (_apply(lambda w: w[None], LOSS), "[0] was float32[] and is float32[1]. Reshape"),
        "sharding": (_reshard_in_step, "was float32[8@d] and is float32[8]. ... reshard it in fn"),
        "varying": (
            lambda: _per_device(lambda x: _apply(lambda w: w * x, jnp.ones(1))(), check_vma=True),
            "was float32[1] and is float32[1] ... or reduce gradients that vary over devices.",
        ),
        "object": (_apply(lambda w, _: (w, "b"), 1, "a"), "carry[1] was 'a' and is 'b'. Only arrays and Python"),
        "number": (_apply(lambda n: n + 0.5, 1), "carry[0] was int32[] and is float32[]"),
    },
    UserWarning: {
        "scaler": (_after_gradients(lambda s, _, ok: _gate(jmpscale.update(s, ok), s, ok)), "a scaler, and fn changes"),
        "earlier flag": (
            _after_gradients(lambda s, _, ok: _apply_if_applied(s, ok, False)),
            "is about an earlier step",
        ),
        "wrapper": (_after_gradients(lambda s, g, _: _gate(SCALE.update(g, s)[1], s), SCALE_STATE), "fn changes it:"),
        "variables": (_gate_variables, "fn returns the Flax NNX variables ... old = nnx.clone(nnx.state(model))."),
        "traced variables": (lambda: nnx.jit(_gate_variables)(), "fn returns the Flax NNX variables"),
    },
}


def _value_and_grad(*args, fun=_sum, **options):
    return lambda: jmpscale.value_and_grad(fun, **options)(STATE, *args)


def _train_step(params, opt_state):
    loss, grads = jmpscale.value_and_grad(_sum)(opt_state, params)
    updates, opt_state = SCALE.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss


class _Model:
    @jmpscale.value_and_grad
    def loss(self, batch):
        return jnp.sum(batch)

    def method(self, w):
        return jnp.sum(w)


def _value_and_grad_at_constant(params):
    return jmpscale.value_and_grad(_sum)(STATE, params)


_holomorphic = functools.partial(jax.value_and_grad, holomorphic=True)


def _value_and_grad_of_vector(fun, has_aux):
    """A transformation that differentiates the sum of a vector."""

    def value_and_grad(*args):
        def total(*args):
            value, aux = fun(*args)
            return jnp.sum(value), (value, aux)

        (_, output), grads = jax.value_and_grad(total, has_aux=has_aux)(*args)
        return output, grads

    return value_and_grad


VALUE_AND_GRAD = {
    TypeError: {
        "scaler": (
            lambda: jmpscale.value_and_grad(STATE),
            "fun must be the loss function, got ScalerState. The scaler is the first positional argument of the "
            "new function: value_and_grad(loss_fn)(scaler, params, batch).",
        ),
        "scaler second": (
            lambda: jmpscale.value_and_grad(_sum, STATE),
            "but not its arguments. The scaler is the first",
        ),
        "all arguments": (lambda: jmpscale.value_and_grad(_sum, 0, True, STATE, GRADS), "but not its arguments. The"),
        "no pair": (_value_and_grad(GRADS, has_aux=True), "pair (loss, aux) because has_aux is true, got float32[]."),
        "triple": (
            _value_and_grad(LOSS, fun=lambda w: (w, w, w), has_aux=True),
            "a pair (loss, aux) ... got tuple of 3. Return both, or omit has_aux; collect several auxiliary values in",
        ),
        "jax.grad": (_value_and_grad(GRADS, transform=jax.grad), "must return ((value, aux), grads) ... flax.nnx"),
        "jax.grad of a pair": (_value_and_grad((W32, W32), transform=jax.grad), "transform must return ((value,"),
        "holomorphic": (
            _value_and_grad(jnp.complex64(1), fun=lambda z: z**2, transform=_holomorphic),
            "fun must return a real ... got complex64[]. Reduce it with .sum() or .mean(), or use scale, jax.vjp and",
        ),
        "vector": (
            _value_and_grad(W32, fun=lambda w: w[:1], transform=_value_and_grad_of_vector),
            "fun must return a real floating-point scalar as the loss, got float32[1]",
        ),
        "vector if disabled": (
            lambda: jmpscale.value_and_grad(jnp.tanh)(jmpscale.disabled(), W32),
            "as the loss, got float32[2]. Reduce it",
        ),
        "vector and aux": (_value_and_grad(W32, fun=lambda w: (w, 1), has_aux=True), "as the loss, got float32[2]."),
        "pair": (_value_and_grad(W32, fun=lambda w: (jnp.sum(w), w)), "of 2. Return the loss. ... has_aux=True."),
        "none": (_value_and_grad(W32, fun=lambda w: None), "as the loss, got None. Return the loss."),
        "value_and_grad": (
            lambda: jmpscale.value_and_grad(jmpscale.value_and_grad(_sum)),
            "fun must be the loss function, got a result of value_and_grad. Pass the loss function itself",
        ),
        "jitted value_and_grad": (
            lambda: jmpscale.value_and_grad(jax.jit(jmpscale.value_and_grad(_sum))),
            "fun must be the loss function, got a result of value_and_grad.",
        ),
        "equinox with nnx": (_value_and_grad(EQUINOX, transform=nnx.value_and_grad), "an Equinox Lambda ... equinox."),
        "step": (
            lambda: _traced(jmpscale.value_and_grad(_train_step), STATE, GRADS, SCALE_STATE),
            "as the loss, got tuple of 3. Return the loss. Pass the loss function itself, not a training step",
        ),
        "nnx": (_value_and_grad(NNX), "arguments must ... a Flax NNX Dropout ... transform=flax.nnx.value_and_grad"),
        "nnx first": (_value_and_grad(NNX, LOSS, argnums=-2), "got a Flax NNX Dropout"),
        "equinox": (_value_and_grad(1.0, EQUINOX, argnums=(0, 1)), "argument 1 must ... tanh at .fn. Pass"),
        "absent argument": (_value_and_grad(GRADS, argnums=1), "without the scaler, got 1 in a call with 1 positional"),
        "integers": (
            _value_and_grad(GRADS, {"n": INTS}, argnums=1),
            "argument 1 must ... got int32[2] at ['n']. argnums",
        ),
    },
    ValueError: {
        "no scaler": (lambda: jmpscale.value_and_grad(_sum)(GRADS, W32), "found 0 in a dict. The scaler is the first"),
        "keyword": (
            lambda: jmpscale.value_and_grad(_sum)(scaler=STATE, tree=GRADS),
            "found 0 in a NoneType. The scaler",
        ),
        "method": (lambda: _Model().loss(STATE, W32), "found 0 in a _Model. ... Call value_and_grad(self.loss)("),
    },
    UserWarning: {
        "constant": (lambda: _traced(_value_and_grad_at_constant, GRADS), "the scaler is a constant of the compiled"),
        "scaled loss in autocast": (
            _value_and_grad(
                W32,
                fun=jmpscale.autocast(
                    lambda w: jmpscale.scale(STATE, (w.sum() * jnp.ones((8, 8)) @ jnp.ones((8, 8))).sum())
                ),
            ),
            "the loss is scaled twice",
        ),
        "scaled loss": (
            lambda: _traced(_value_and_grad(GRADS, fun=lambda tree: jmpscale.scale(STATE, _sum(tree)))),
            "the loss is scaled twice, because value_and_grad scales it. Remove scale from the loss.",
        ),
        "scaled backward pass": (
            _value_and_grad(W32, fun=jmpscale.loss_scaled(_sum, 8.0)),
            "twice ... Remove loss_scaled",
        ),
    },
}


def _half_sum(w):
    return jnp.sum(w.astype(jnp.float16))


def _loss_scaled(scale, fun=_sum, **options):
    return lambda: jmpscale.loss_scaled(fun, scale, **options)(GRADS)


def _grad(w, fun=_sum, scale=8.0, **options):
    return lambda: jax.grad(jmpscale.loss_scaled(fun, scale, **options), **options)(w)


LOSS_SCALED = {
    TypeError: {
        "loss": (lambda: jmpscale.loss_scaled(3.0, 8.0), "fun must ... got 3.0. Call loss_scaled(fun, scale)."),
        "vector": (_loss_scaled(jnp.ones(3)), "scale must be a floating-point scalar, got float32[3]. Pass"),
        "int": (_loss_scaled(jnp.int32(3)), "scale must be a floating-point scalar, got int32[]"),
        "no pair": (_loss_scaled(8.0, has_aux=True), "a pair (loss, aux) because has_aux is true, got float32[]."),
        "float16": (_grad({"h": W16}), "got args[0]['h'] of float16[2]: ... autocast ... framework ... value_and_grad"),
        "float8": (
            lambda: jax.grad(lambda w: jmpscale.loss_scaled(_sum, 8.0)(tree=w))(W8),
            "got kwargs['tree'] of float8_e4m3fn[2]",
        ),
        "closure": (
            lambda: jax.grad(lambda w: jmpscale.loss_scaled(lambda: _sum(w), 8.0)())(W16),
            "got a value that fun closes over of float16[2]",
        ),
    },
    ValueError: {
        "number": (_loss_scaled(-1), "scale must be between 2^-126 and 2^126, got -1."),
        "zero": (_loss_scaled(jnp.float32(0)), "scale must be between 2^-126 and 2^126, got 0"),
        "nan": (_loss_scaled(np.float32("nan")), "scale must be between 2^-126 and 2^126, got nan."),
        "function": (_loss_scaled(lambda _: 0), "scale must be between 2^-126 and 2^126, got 0."),
        "string": (_loss_scaled("x"), "exactly one ScalerState, found 0 in a str"),
        "varying": (
            lambda: _per_device(lambda x, w: _grad(w, scale=x[0])(), W32, check_vma=True),
            "scale must be equal on all devices that share args[0] ... ['d']. ... jax.shard_map with in_specs=jax.P().",
        ),
    },
    UserWarning: {
        "float16": (_grad(W32, _half_sum), "the loss is float16"),
        "float16 output": (
            lambda: jax.grad(lambda w: _sum(jmpscale.loss_scaled(lambda w: w.astype("f2"), 8.0)(w)))(W32),
            "the loss is float16, so the backward pass starts from the loss scale in float16",
        ),
        "constant": (
            lambda: _traced(_grad(W32, scale=STATE)),
            "constant of the compiled program, so it will not adapt. Pass a function that reads it from the arguments "
            "of fun, such as `lambda model, *args, **kwargs: model.loss_scale`, or pass a number.",
        ),
        "function": (lambda: _traced(_grad(W32, scale=lambda _: LOSS)), "constant of the compiled program"),
    },
}

AUTOCAST = {
    TypeError: {
        "number": (
            lambda: jmpscale.autocast(3.0),
            "fun must be the loss function, got 3.0. Call autocast(loss_fn, dtype",
        ),
        "dtype": (lambda: jmpscale.autocast(jnp.float16), "fun must be the loss function, got float16. Call autocast"),
        "name of a dtype": (lambda: jmpscale.autocast("bfloat16"), "fun must be the loss function, got 'bfloat16'."),
        "to float32": (lambda: jmpscale.autocast(_sum, dtype=jnp.float32), "must be float16 or bfloat16, got float32."),
        "context manager": (lambda: jmpscale.autocast().__enter__(), "not a context manager. Wrap the loss function"),
        "to None": (lambda: jmpscale.autocast(dtype=None), "dtype must be float16 or bfloat16, got None. Pass"),
        "result in another dtype": (
            lambda: jmpscale.autocast(_sum, result=jnp.bfloat16),
            "result must be float32, or float16 like dtype, got bfloat16. Pass jnp.float32.",
        ),
        "result in an array": (
            lambda: jmpscale.autocast(result=W32),
            "result must be ... got float32[2]. Pass jnp.float32.",
        ),
        "to an array": (lambda: jmpscale.autocast(_sum, dtype=W32), "dtype must ... got float32[2]. Pass jnp.float16"),
    },
}

MASK = {"w": True, "b": False}
CLIP = jmpscale.with_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), SGD))
LAMB = jmpscale.with_loss_scaling(optax.chain(optax.identity(), optax.scale_by_trust_ratio()))


def _clip(update):
    return lambda: _per_device(update, CLIP.init(W32), check_vma=True)


def _reads_losses(grads, state, params=None, *, losses):
    return jax.tree.map(lambda g: g * losses, grads), state


def _looks_up_losses(grads, state, params=None, **extra_args):
    return _reads_losses(grads, state, losses=extra_args["losses"])


def _update_with(update=_reads_losses, **extra_args):
    inner = optax.chain(optax.scale(1.0), optax.GradientTransformationExtraArgs(SGD.init, update))
    tx = jmpscale.with_loss_scaling(inner)
    return lambda: tx.update(GRADS, tx.init(GRADS), GRADS, **extra_args)


def _inner(update):
    """Calls `update` of `with_loss_scaling` around an optimizer whose state is a count."""
    tx = jmpscale.with_loss_scaling(optax.GradientTransformation(lambda _: jnp.int32(0), update))
    return lambda: tx.update(GRADS, tx.init(GRADS), GRADS)


def _wrap(*args, **options):
    return lambda: jmpscale.with_loss_scaling(*args, **options)


def _gradients_of_sum():
    return jmpscale.value_and_grad(_sum)(STATE, GRADS)[1]


def _update_in(tx, **extra_args):
    return tx.update(GRADS, tx.init(GRADS), GRADS, **extra_args)


def _record_updates(updates, *args, **kwargs):
    return updates


def _update_of_chain(*transformations, inside=SGD):
    chain = optax.chain(*transformations, optax.chain(jmpscale.with_loss_scaling(inside)))
    return lambda: _traced(chain.update, GRADS, chain.init(GRADS))


def _with_empty_cell():
    """Returns a transformation that closes over an unset variable and a dictionary that contains itself."""
    itself = {}
    itself["itself"] = itself

    def update(grads, state, params=None):
        return (grads if params is None else itself[never_set]), state

    if not GRADS:
        never_set = None
    return optax.GradientTransformation(SGD.init, update)


WITH_LOSS_SCALING = {
    TypeError: {
        "scaler": (_wrap(STATE), "inner must be an optax.GradientTransformation, got ScalerState. ... around"),
        "function": (_wrap(optax.adam), "inner must be an optax.GradientTransformation, got function."),
        "init alone": (_wrap(SimpleNamespace(init=ADAM.init)), "inner must be ... got SimpleNamespace."),
        "update alone": (_wrap(SimpleNamespace(update=ADAM.update)), "inner must be ... got SimpleNamespace."),
        "wrapped in a chain": (
            lambda: _wrap(optax.chain(SGD, optax.chain(TX)), jmpscale.disabled())().init(GRADS),
            "inner must not contain with_loss_scaling, got ... Wrap the whole optimizer once.",
        ),
        "scaler in the gradients": (
            lambda: SCALE.update({"model": GRADS, "scaler": STATE}, SCALE_STATE),
            "the gradients contain a ScalerState, which the optimizer would change. Keep it out of params.",
        ),
        "max_norm": (_wrap(ADAM, max_norm="1"), "max_norm must be a Python float, got '1'"),
        "warn_after_skips": (_wrap(ADAM, warn_after_skips=1.5), "warn_after_skips must be a Python int, got 1.5"),
        "loss by position": (lambda: TX.update(GRADS, OPT_STATE, GRADS, LOSS), "value=loss), got another value by pos"),
        "loss first": (lambda: TX.update(_pair(1)[0], OPT_STATE, GRADS), "got the loss in place of the gradients."),
        "inner state": (lambda: TX.update(GRADS, ADAM.init(GRADS)), "got tuple. The ... ._replace(inner_state=...)"),
        "updates of inner": (
            _inner(lambda g, s, p: (g["w"], s)),
            "['b'] is only in its input. Gate optax_step(inner, grads) with apply_if.",
        ),
        "structure of inner": (_inner(lambda g, s, p: (g, (s, s))), "state is only in its input. ... outside"),
        "dtype of inner": (_inner(lambda g, s, p: (g, s > 0)), "state was int32[] and is bool[]. ... .astype in inner"),
    },
    ValueError: {
        "axis of max_norm": (
            lambda: _wrap(ADAM, max_norm=1.0, norm_axis_name="x")().update(GRADS, OPT_STATE),
            "axis_name 'x' is not the name of a mapped axis",
        ),
        "warn_after_skips": (_wrap(ADAM, warn_after_skips=0), "warn_after_skips must be between 1 ... got 0."),
        "small max_norm": (_wrap(ADAM, max_norm=SMALLEST / 2), "max_norm must ... got 2^-127. Omit it to clip"),
        "large max_norm": (_wrap(ADAM, max_norm=LARGEST * 1.5), "max_norm must be between"),
    },
    UserWarning: {
        "misspelled loss": (lambda: SCALE.update(GRADS, SCALE_STATE, GRADS, lss=LOSS), "'lss' of tx.update is ignored"),
        "loss by another name": (
            lambda: SCALE.update(GRADS, SCALE_STATE, GRADS, train_loss=LOSS),
            "the extra argument 'train_loss' of tx.update is ignored",
        ),
        "inside apply_if": (
            lambda: jmpscale.apply_if(True, lambda state: SCALE.update(GRADS, state)[1], SCALE_STATE),
            "with_loss_scaling is inside jmpscale.apply_if: a skipped step would not adjust its scale, ... call "
            "tx.update without apply_if.",
        ),
        "gradients as parameters": (
            lambda: SCALE.update(GRADS, SCALE_STATE, _gradients_of_sum()),
            "params must be the parameters, got gradients. The arguments are tx.update(grads, state, params).",
        ),
        "gradients as the loss": (
            lambda: SCALE.update(GRADS, SCALE_STATE, value=_gradients_of_sum()),
            "the loss must be the unscaled loss, got gradients. Pass value=loss.",
        ),
        "another scaler": (
            _after_gradients(lambda s, grads, _: [SCALE.update(grads, x) for x in (s, SCALE_STATE)], SCALE_STATE),
            "the gradients were unscaled by another scaler ... wrap one optax.partition.",
        ),
        "clip of a shard": (
            _clip(lambda x, s: CLIP.update(x, s, value=LOSS)[0]),
            "optax.clip_by_global_norm uses the norm ... the mesh axes ['d']. To clip, use",
        ),
        "norm of a shard": (_clip(lambda x, s: LAMB.update(x, s, x, value=LOSS)[0]), "optax.scale_by_trust_ratio uses"),
        "loss and dict": (lambda: SCALE.update(GRADS, SCALE_STATE, value=_pair({"x": LOSS})), "loss ... got a pair"),
        "replaced by a constant": (
            lambda: _traced(
                lambda grads, state: SCALE.update(grads, jmpscale.replace_scaler(state, STATE)), GRADS, SCALE_STATE
            ),
            "the optimizer state is a constant of the compiled program",
        ),
        "inside apply_if_finite": (
            lambda: _update_in(optax.apply_if_finite(SCALE, 5)),
            "is inside optax.apply_if_finite, whose skips do not adjust the scale. Remove apply_if_finite",
        ),
        "state is created": (
            lambda: _traced(lambda grads: SCALE.update(grads, SCALE.init(grads)), GRADS),
            "the optimizer state is a constant of the compiled program",
        ),
        "float16 gradients": (
            lambda: SCALE.update({"w": jnp.ones(2, jnp.float16)}, SCALE_STATE),
            "the gradients must be float32, got float16[2] at updates['w']: in true units they underflow.",
        ),
        "misspelled value": (
            lambda: SCALE.update(GRADS, SCALE_STATE, GRADS, key=LOSS, values=LOSS),
            "the extra argument 'values' of tx.update is ignored",
        ),
        "constant state": (
            lambda: _traced(lambda grads: SCALE.update(grads, SCALE_STATE), GRADS),
            "the optimizer state is a constant of the compiled program, so every call starts from the same one: the "
            "compiled function creates the optimizer state, or closes over it. Create it outside, pass it to the "
            "compiled function as an argument, and return the new one. In a whole training run, carry it through "
            "jax.lax.scan.",
        ),
        "float16 parameters": (
            lambda: TX.init({"w": W16, "n": INTS}),
            "the parameters are float16, ... float32, and use",
        ),
        "float16 averages": (
            lambda: jmpscale.with_loss_scaling(ADAM16).init(GRADS),
            "averages of gradients in float16 ... Change mu_dtype or accumulator_dtype to bfloat16",
        ),
        "float16 averages of optax_step": (
            lambda: jmpscale.apply_if(True, jmpscale.optax_step(ADAM16, W32), W32, ADAM16.init(W32)),
            "averages of gradients in float16",
        ),
        "MultiSteps inside": (
            lambda: _wrap(optax.MultiSteps(SGD, 2), max_norm=1.0)().init(GRADS),
            "max_norm clips the gradients of each micro-batch",
        ),
        "inside MultiSteps": (lambda: optax.MultiSteps(TX, 2).init(GRADS), "inside optax.MultiSteps: ... MultiSteps("),
        "inside masked": (lambda: optax.masked(TX, MASK).init(GRADS), "masked or optax.partition: ... masked(tx, mask"),
        "after clip": (_update_of_chain(optax.clip(1.0)), "replaces infinity or NaN ... scale_by_adam: ... Place"),
        "after clip in a chain": (_update_of_chain(optax.clip(1.0), optax.scale(2.0)), "after a transformation"),
        "after nested chain": (_update_of_chain(optax.chain(optax.chain(optax.clip(1.0)))), "after a transformation"),
        "after masked clip": (_update_of_chain(optax.masked(optax.clip(1.0), True)), "after a transformation"),
        "after partitioned clip": (
            _update_of_chain(optax.partition({"a": optax.clip(1.0)}, "a")),
            "after a transformation",
        ),
        "after clip in a named_chain": (
            lambda: _update_in(optax.named_chain(("a", optax.clip(1.0)), ("b", SCALE))),
            "after a transformation",
        ),
        "before averages in a named_chain": (
            lambda: _update_in(optax.named_chain(("a", SCALE), ("b", optax.ema(0.9)))),
            "before a transformation",
        ),
        "after momentum": (_update_of_chain(optax.trace(0.9)), "or keeps them in its state"),
        "after sign_sgd": (_update_of_chain(optax.sign_sgd(1.0)), "after a transformation"),
        "before weight decay": (
            lambda: _update_in(optax.chain(SCALE, optax.add_decayed_weights(1e-4))),
            "before a transformation that acts on skipped steps too, such as optax.ema or optax.add_decayed_weights. "
            "Place it inside: with_loss_scaling(optax.chain(tx, ",
        ),
        "before averages": (lambda: _update_in(optax.chain(SCALE, optax.ema(0.9))), "before a transformation"),
        "before plateau": (lambda: _update_in(optax.chain(SCALE, PLATEAU), value=LOSS), "before a transformation"),
        "after zero_nans": (_update_of_chain(optax.zero_nans()), "after a transformation"),
    },
}

OPTAX_STEP = {
    TypeError: {
        "swapped": (lambda: jmpscale.optax_step(LOSS, ADAM), "tx must ... got Array. Call optax_step(tx, grads),"),
        "update function": (
            lambda: jmpscale.optax_step(ADAM.update, 1),
            "tx must be ... got function. ... not its update",
        ),
        "wrapped": (lambda: jmpscale.optax_step(TX, 1)(1, [OPT_STATE]), "tx must not contain with_loss_scaling, got"),
        "scaler in the gradients": (lambda: jmpscale.optax_step(ADAM, [STATE]), "contain a ScalerState"),
        "tuple": (_apply(jmpscale.optax_step(ADAM, GRADS), (GRADS, ADAM.init(GRADS))), "carry must be ... got 1. Call"),
        "opposite order": (
            _apply(jmpscale.optax_step(ADAM, GRADS), ADAM.init(GRADS), GRADS),
            "carry must be two values, the parameters and then the optimizer state, got them in the opposite order. "
            "Call apply_if(finite, optax_step(tx, grads), params, opt_state).",
        ),
    },
    UserWarning: {"float16": (_apply(jmpscale.optax_step(SGD, W16), W32, SGD.init(W32)), "got float16[2] at grads")},
}

TORCH_DICT = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2}
ULP = 2.0**-23  # the spacing of float32 numbers below 2


def _from_torch(limits=(), **values):
    return lambda: jmpscale.from_torch_state_dict(TORCH_DICT | values, **dict(limits))


def _to_torch(**fields):
    return lambda: jmpscale.to_torch_state_dict(STATE._replace(**fields))


TORCH = {
    TypeError: {
        "scaler": (lambda: jmpscale.from_torch_state_dict(STATE), "mapping must be the result of ... got ScalerState."),
        "tracker": (_from_torch(_growth_tracker=1.5), "['_growth_tracker'] must be a Python int, got 1.5"),
    },
    ValueError: {
        "static": (lambda: jmpscale.to_torch_state_dict(jmpscale.static(8)), "got mode 'static'. In torch, construct"),
        "disabled": (lambda: jmpscale.to_torch_state_dict(jmpscale.disabled()), "got mode 'disabled'"),
        "nan": (_to_torch(loss_scale=jnp.float32(jnp.nan)), "scaler.loss_scale must be between ... got nan. The"),
        "zero": (_to_torch(loss_scale=jnp.float32(0)), "scaler.loss_scale ... got 0. ... restore an older checkpoint"),
        "empty": (lambda: jmpscale.from_torch_state_dict({}), "missing ['_growth_tracker', ... If it is empty, the"),
        "nested": (lambda: jmpscale.from_torch_state_dict({"x": TORCH_DICT}), "missing ['_growth_tracker', ... ['x']."),
        "extra": (_from_torch(extra=1), "missing [], unexpected ['extra']"),
        "tracker": (
            _from_torch(_growth_tracker=-2),
            "['_growth_tracker'] must be between -1 and 2147483647 ... got -2",
        ),
        "scale": (_from_torch(scale=0.0), "mapping['scale'] must ... got 0. The limits are min_scale and max_scale."),
        "below": (_from_torch({"min_scale": 2.0}, scale=2 - ULP), "mapping['scale'] must be between 2 and"),
        "above": (_from_torch({"max_scale": 2.0}, scale=2 + ULP), "mapping['scale'] must ... got 2.0000001192"),
    },
}


def _cast(tree, dtype):
    return lambda: jmpscale.cast(tree, dtype)


def _stuck(limit):
    return lambda state=STATE: jmpscale.raise_if_stuck(state, max_consecutive_skips=limit)


def _float16(size):
    return jax.ShapeDtypeStruct((size,), jnp.float16)


CAST_AND_MONITORING = {
    AttributeError: {"method": (lambda: STATE.scale(LOSS), "no attribute 'scale'. It has no methods: pass it to")},
    TypeError: {
        "cast to int": (_cast(GRADS, jnp.int8), "dtype must be a floating-point dtype, got int8. Call cast(params,"),
        "cast to complex": (_cast(GRADS, jnp.complex64), "dtype must be a floating-point dtype, got"),
        "cast to a tree": (_cast(jnp.float16, GRADS), "dtype must be ... got dict. Call cast(params, jnp"),
        "cast to an array": (_cast(GRADS, W32), "dtype must be ... got float32[2]. Call cast("),
        "cast to a string": (_cast(GRADS, "float17"), "dtype must be ... got 'float17'. Call cast("),
        "cast to None": (_cast(GRADS, None), "dtype must be a floating-point dtype, got None"),
        "fraction of skips": (_stuck(2.5), "max_consecutive_skips must be a Python int, got 2.5"),
        "traced report": (lambda: _traced(lambda r: r.describe(), REPORT), "describe ... Return the report first."),
    },
    ValueError: {
        "no skips": (_stuck(0), "max_consecutive_skips must be between 1 and 2147483647 ... got 0."),
        "stuck under jit": (lambda: jax.jit(_stuck(1))(STATE), "raise_if_stuck reads the state ... Call it between"),
        "report of no gradients": (lambda: jmpscale.grad_report({"n": 1}), "grads ... got none. Pass the gradients."),
        "report of a large leaf": (lambda: _traced(jmpscale.grad_report, _float16(2**31)), "a leaf, got 2147483648."),
        "limit of describe": (lambda: REPORT.describe(0), "limit must be between 1 and 2147483647 ... got 0."),
        "several reports": (REPORTS.describe, "got a batch of shape (2,). Select one: jax.tree.map(lambda x: x[0],"),
    },
    UserWarning: {
        "cast of averages": (
            _cast(ADAM.init(GRADS), jnp.float16),
            "the tree contains averages ... parameters alone",
        ),
    },
}


def _check(state, step=lambda state: state, **options):
    return lambda: testing.check_step(step, state, **options)


TOOLS = {
    TypeError: {
        "replicated number": (lambda: testing.assert_replicated({"w": 1}), "tree['w'] must be an array, got int. Pass"),
    },
    ValueError: {
        "check_step: disabled": (_check(jmpscale.disabled()), "state must contain a scaler that checks"),
        "check_step: batch": (_check(BATCH), "state must hold one scaler, got a batch ... lambda x: x[0], state)"),
        "check_step: ignore": (_check(STATE, ignore=(".step",)), "ignore must name leaves ... got ['.step']."),
    },
}

WRONG_CALLS = {
    "constructors": CONSTRUCTORS,
    "scale and update": SCALE_AND_UPDATE,
    "apply_if": APPLY_IF,
    "value_and_grad": VALUE_AND_GRAD,
    "autocast": AUTOCAST,
    "loss_scaled": LOSS_SCALED,
    "with_loss_scaling": WITH_LOSS_SCALING,
    "optax_step": OPTAX_STEP,
    "torch": TORCH,
    "cast and monitoring": CAST_AND_MONITORING,
    "testing and plots": TOOLS,
}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        pytest.param(call, error, words, id=f"{function}-{error.__name__}-{name}")
        for function, errors in WRONG_CALLS.items()
        for error, table in errors.items()
        for name, (call, words) in table.items()
    ],
)
def test_wrong_call_raises_or_warns(call, error, words):
    with _raises(error, words) as caught:
        call()
    assert len(str(caught.value)) < 1000, "the message must not print the arrays of a model"


def test_loss_scaled_explains_its_error_in_forward_mode():
    with pytest.raises(TypeError, match="forward-mode") as caught:
        jax.jvp(jmpscale.loss_scaled(_sum, 8.0), (W32,), (W32,))
    assert "In forward mode, differentiate fun itself." in "".join(caught.value.__notes__)


# --- warnings name the line of the caller ---

CHAIN = optax.chain(SCALE, optax.scale(1.0))


def _without_axis_name(grads):
    flags = [
        jmpscale.all_finite(grads),
        jmpscale.unscale_and_check(STATE, grads)[1],
        jmpscale.update(STATE, True, loss=grads.sum()).step_applied,
        jmpscale.grad_report(grads).finite,
        SCALE.update(grads, SCALE.init(grads))[1].scaler.step_applied,
        CHAIN.update(grads, CHAIN.init(grads))[1][0].scaler.step_applied,
        jax.tree.map(jmpscale.all_finite, [grads])[0],
    ]
    return jnp.stack(flags)[None]


def _wrapper(take_gradients, scaler):
    state = SCALE_STATE._replace(scaler=scaler)
    loss, grads = take_gradients(state, GRADS)
    return SCALE.update(grads, state, value=loss)


def _functional_api(take_gradients, scaler):
    _, grads = take_gradients(scaler, GRADS)
    return jmpscale.update(scaler, jmpscale.all_finite(grads))


def _not_scaled(_, params):
    return jax.value_and_grad(_sum)(params)


def _scaled_by_hand(state, params):
    scale = jmpscale.get_scaler(state).loss_scale
    grads = jax.grad(lambda params: scale * _sum(params))(params)
    return _sum(params), jmpscale.unscale(state, grads)


def _unscaled_by_hand(state, params):
    grads = jax.grad(lambda params: jmpscale.scale(state, _sum(params)))(params)
    return _sum(params), jax.tree.map(lambda x: x / jmpscale.get_scaler(state).loss_scale, grads)


def _scaled_for_a_loop(state, params):
    return jax.value_and_grad(jmpscale.loss_scaled(_sum, state))(params)


@pytest.mark.usefixtures("nothing_scaled")
@pytest.mark.parametrize("step", [_wrapper, _functional_api])
def test_step_warns_if_no_loss_has_been_scaled(step):
    words = r"no loss has been scaled yet.*jmpscale\.value_and_grad"
    with pytest.warns(UserWarning, match=words):
        step(_not_scaled, STATE)
    with pytest.warns(UserWarning, match=words):
        _traced(functools.partial(step, _not_scaled), STATE)
    step(_not_scaled, jmpscale.static(1.0))


@pytest.mark.usefixtures("nothing_scaled")
def test_step_without_a_loss_warns_if_it_is_compiled():
    SCALE.update(GRADS, SCALE_STATE)  # does not warn outside jit
    with pytest.warns(UserWarning, match="no loss has been scaled yet"):
        _traced(SCALE.update, GRADS, SCALE_STATE)


@pytest.mark.usefixtures("nothing_scaled")
@pytest.mark.parametrize("step", [_wrapper, _functional_api])
@pytest.mark.parametrize(
    "take_gradients", [jmpscale.value_and_grad(_sum), _scaled_by_hand, _unscaled_by_hand, _scaled_for_a_loop]
)
def test_step_does_not_warn_if_the_loss_has_been_scaled(step, take_gradients):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _traced(functools.partial(step, take_gradients), STATE)
    assert caught == []


@pytest.mark.parametrize("map_", ["shard_map", pytest.param("pmap", marks=pytest.mark.full)])
def test_warnings_name_the_line_of_the_caller(map_):
    if map_ == "pmap" and jax.__version_info__ < (0, 10):
        pytest.skip("in this version of JAX pmap does not show that there is a mesh")
    meshes.require_devices(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", "each device decides independently", UserWarning)
        if map_ == "pmap":
            jax.pmap(_without_axis_name, axis_name="d")(jnp.ones((8, 3)))
        else:
            _per_device(_without_axis_name)
    first = _without_axis_name.__code__.co_firstlineno + 2
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, first + i) for i in range(7)]


# --- valid calls, some of them at a limit ---

SETTINGS_AT_LIMITS = {
    "closest to 1": {"growth_factor": 1 + 2.0**-23, "backoff_factor": 1 - 2.0**-24, "growth_interval": 1},
    "largest factor": {"growth_factor": LARGEST, "backoff_factor": SMALLEST},
    "largest counts": {"growth_interval": COUNTER, "hysteresis": COUNTER},
    "NumPy scalars": {"growth_factor": np.float32(2), "growth_interval": np.int64(3), "hysteresis_reset": "finite"},
    "smallest scale": {"init_scale": SMALLEST, "min_scale": SMALLEST, "max_scale": LARGEST},
    "largest scale": {"init_scale": LARGEST, "min_scale": LARGEST, "max_scale": LARGEST},
    "init_scale at min_scale": {"init_scale": 1},
    "init_scale at max_scale": {"init_scale": 2.0**32},
}


@pytest.mark.parametrize("name", SETTINGS_AT_LIMITS)
def test_dynamic_accepts_settings_at_the_limits(name):
    settings = SETTINGS_AT_LIMITS[name]
    config = jmpscale.dynamic(**settings).config
    for setting, value in settings.items():
        assert setting == "init_scale" or getattr(config, setting) == value
    assert {type(getattr(config, name)) for name in ("growth_factor", "backoff_factor", "min_scale")} == {float}
    assert {type(getattr(config, name)) for name in ("growth_interval", "hysteresis")} == {int}


def _step_from(state):
    """Returns a step that closes over its optimizer state."""
    return lambda params: optax.apply_updates(params, SCALE.update(params, state, params)[0])


def _loss_after_step(params):
    return _sum(_step_from(SCALE_STATE)(params))


def _scan_of_steps(params, state=SCALE_STATE):
    """Carries a state that the program closes over."""
    return jax.lax.scan(lambda c, _: (_train_step(*c)[:2], None), (params, state), None, 2)


def _update_on_eager_devices():
    """Closes over the state in a program that `jax.shard_map` runs without compiling it."""
    mesh = meshes.make_mesh(d=1)
    update = jax.shard_map(lambda x: SCALE.update(x, SCALE_STATE)[0], mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    update(jnp.ones(8))


def _update_with_norm(grads, state):
    return jmpscale.with_loss_scaling(optax.scale(1.0), norm_axis_name="d").update(grads, state)[0]


def _update_disabled(grads):
    return jmpscale.with_loss_scaling(SGD).update(grads, OPT_STATE._replace(scaler=jmpscale.disabled()))


def _scan_of_a_new_scaler(flags):
    """Creates a scaler in the program, which adapts there."""
    return jax.lax.scan(lambda scaler, flag: (jmpscale.update(scaler, flag), None), jmpscale.dynamic(), flags)


def _update_by_all(loss, grads):
    jmpscale.update(STATE, jmpscale.all_finite((loss, grads)))
    return jmpscale.update(STATE, jmpscale.all_finite(loss) & jmpscale.all_finite(grads))


VALID_CALLS = {
    "update of an int64 field": _update(total_skips=np.int64(3)),
    "scale bfloat16": lambda: _traced(jmpscale.scale, STATE, W32.astype(jnp.bfloat16)),
    "axis without a loss": lambda: _per_device(lambda x: jmpscale.update(STATE, TRUE).loss_scale[None]),
    "axis of the norm": lambda: _per_device(_update_with_norm, SCALE.init(W32)),
    "value_and_grad with NNX": _value_and_grad(GRADS, NNX),
    "value_and_grad with Equinox": lambda: _value_and_grad(eqx.nn.LayerNorm(2), EQUINOX)(),
    "value_and_grad of a vector": lambda: jmpscale.value_and_grad(lambda w: w[:1], transform=_value_and_grad_of_vector)(
        jmpscale.disabled(), W32
    ),
    "flags of the loss and of the gradients": lambda: _update_by_all(*jmpscale.value_and_grad(_sum)(STATE, GRADS)),
    "value_and_grad of the sum of scaled losses": _value_and_grad(
        GRADS, fun=lambda tree: jmpscale.scale(STATE, _sum(tree)) + 0.0
    ),
    "value_and_grad by a static scale": lambda: _traced(
        lambda params: jmpscale.value_and_grad(_sum)(jmpscale.static(8.0), params), GRADS
    ),
    "has_aux of NumPy": _value_and_grad(W32, fun=lambda w: (jnp.sum(w), w), has_aux=np.True_),
    "value_and_grad of gradients": _value_and_grad(W32, fun=lambda w: jmpscale.value_and_grad(jnp.sum)(STATE, w)[0]),
    "argument called scaler": lambda: jmpscale.value_and_grad(lambda w, scaler: w * scaler)(STATE, 1.0, scaler=2.0),
    "loss_scaled float16 batch": lambda: _grad(W32, lambda w: _sum([w, W16]))(),
    "loss_scaled float16 aux": _grad(W32, lambda w: (_sum(w), _half_sum(w)), has_aux=True),
    "loss_scaled eagerly": _grad(W32, scale=STATE),
    "loss_scaled by an argument": lambda: _traced(lambda state: _grad(W32, scale=state)(), STATE),
    "smallest max_norm": _wrap(ADAM, max_norm=SMALLEST),
    "largest max_norm": _wrap(ADAM, max_norm=LARGEST),
    "after clip_by_global_norm": _update_of_chain(optax.clip_by_global_norm(1.0), optax.scale(2.0)),
    "after a factor in a state": _update_of_chain(optax.inject_hyperparams(optax.scale)(step_size=1.0)),
    "after a function with an empty cell": _update_of_chain(_with_empty_cell()),
    "before a record": lambda: _update_in(optax.chain(SCALE, optax.snapshot("norms", _record_updates))),
    "before a schedule": lambda: _update_in(optax.chain(SCALE, optax.scale_by_schedule(lambda n: 1 / (n + 1)))),
    "clip inside": _update_of_chain(inside=optax.chain(optax.clip(1.0), SGD)),
    "masked inside": lambda: _wrap(optax.masked(ADAM, MASK))().init(GRADS),
    "gate by the flag of the step": _after_gradients(lambda s, _, ok: _apply_if_applied(s, ok, True)),
    "gate of another scaler": _after_gradients(lambda s, _, ok: _gate(jmpscale.update(s, ok), STATE, ok)),
    "gate of an adjusted scaler": _after_gradients(lambda s, _, ok: _gate(*[jmpscale.update(s, ok)] * 2, ok)),
    "gate by another flag": _after_gradients(lambda s, _, ok: _gate(jmpscale.update(s, ok), s, ok & TRUE)),
    "gate of copied variables": lambda: _gate_variables(nnx.clone),
    "clip by a loss of each device": _clip(lambda x, state: CLIP.update(x, state, value=x)[0]),
    "clip of equal gradients": _clip(lambda x, state: x * CLIP.update(W32[:1], state, value=LOSS)[0]),
    "clip under jit": lambda: _traced(lambda x, state: CLIP.update(x, state, value=LOSS), W32, CLIP.init(W32)),
    "gradients in two updates": _after_gradients(lambda s, g, _: SCALE.update(g, SCALE.update(g, s)[1]), SCALE_STATE),
    "unscaled loss": _after_gradients(
        lambda s, g, _: SCALE.update(g, s, value=jmpscale.unscale(s, jmpscale.scale(s, LOSS))), SCALE_STATE
    ),
    "gradients by a copy": _after_gradients(lambda s, g, _: SCALE.update(g, jax.tree.map(jnp.copy, s)), SCALE_STATE),
    "two losses": lambda: jmpscale.update(STATE, True, loss=_pair(LOSS)),
    "diagnosis of loss_scaled": lambda: jmpscale.diagnose(jmpscale.loss_scaled(_sum, 8.0))(STATE, W32),
    "another extra argument": lambda: SCALE.update(GRADS, SCALE_STATE, GRADS, glossary=LOSS),
    "cast of a user's field": lambda: jmpscale.cast(Posterior(W32, W32), jnp.float16),
    "user's own apply_if_finite": lambda: apply_if_finite(lambda: SCALE.update(GRADS, SCALE_STATE, GRADS)),
    "bfloat16 averages": lambda: jmpscale.with_loss_scaling(optax.adam(1e-3, mu_dtype=jnp.bfloat16)).init(GRADS),
    "frozen float16 parameters": lambda: TX.init({"w": W16, "adapter": W32}),
    "optax_step if disabled": _apply(jmpscale.optax_step(SGD, W16), W16, SGD.init(W16)),
    "optax_step without momentum": _apply(jmpscale.optax_step(SGD, W32), W32, SGD.init(W32)),
    "extra argument of inner": _update_with(losses=LOSS),
    "extra argument by name": _update_with(_looks_up_losses, losses=LOSS),
    "extra argument and loss": lambda: SCALE.update(GRADS, SCALE_STATE, GRADS, value=LOSS, values=LOSS),
    "extra arguments": lambda: SCALE.update(GRADS, SCALE_STATE, GRADS, value_fn=_sum, loss_fn=_sum, grad=GRADS, key=1),
    "state in an eager gradient": lambda: jax.grad(_loss_after_step)(GRADS),
    "state in a gradient": lambda: _traced(jax.grad(_loss_after_step), GRADS),
    "state in vmap": lambda: _traced(jax.vmap(_step_from(SCALE_STATE)), jax.tree.map(lambda x: x[None], GRADS)),
    "state is created for a scan": lambda: _traced(lambda p: _scan_of_steps(p, SCALE.init(p)), GRADS),
    "state in scan": lambda: _traced(_scan_of_steps, GRADS),
    "state in an eager scan": lambda: _scan_of_steps(GRADS),
    "state in an eager cond": lambda: jax.lax.cond(
        TRUE, lambda: SCALE.update(GRADS, SCALE_STATE), lambda: (GRADS, SCALE_STATE)
    ),
    "state on devices": lambda: _per_device(lambda x, state: SCALE.update(x, state)[0], SCALE_STATE, check_vma=True),
    "state on eager devices": _update_on_eager_devices,
    "state is disabled": lambda: _traced(_update_disabled, GRADS),
    "state is exported": lambda: jax.export.export(jax.jit(_train_step))(GRADS, SCALE_STATE),
    "update in scan": lambda: _traced(_scan_of_a_new_scaler, FLAGS),
    "update with a known flag": lambda: _traced(lambda x: jmpscale.update(STATE, True), TRUE),
    "update in vmap": lambda: jax.vmap(lambda x: jmpscale.update(STATE, x))(TRUE[None]),
    "update if disabled": lambda: _traced(lambda x: jmpscale.update(jmpscale.disabled(), x), TRUE),
    "report of a large leaf": lambda: _traced(jmpscale.grad_report, _float16(COUNTER)),
    "describe one leaf": lambda: REPORT.describe(1),
}


@pytest.mark.parametrize("name", VALID_CALLS)
def test_valid_call_neither_raises_nor_warns(name):
    """A warning would raise, because warnings are errors."""
    VALID_CALLS[name]()
