"""Wrong arguments raise errors that a newcomer can act on: the table `ERRORS`, and warnings at the user's line."""

import functools
import re
import warnings
from unittest import mock

import equinox as eqx
import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale import plots, testing

STATE = jmpscale.dynamic()
BATCH = jax.tree.map(lambda x: jnp.stack([x, x]), STATE)
LOSS = jnp.float32(1.0)
GRADS = {"w": jnp.ones(3), "b": jnp.ones(2)}
TRUE = jnp.array(True)
ADAM = optax.adam(1e-3)
TX = jmpscale.with_loss_scaling(ADAM)
OPT_STATE = TX.init(GRADS)
REPORT = jmpscale.grad_report(GRADS)
TORCH = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2}
BIG = {f"layer_{i}": {"kernel": np.full((30, 30), 1 / 3, np.float32), "bias": np.zeros(9)} for i in range(100)}


def _loss(w, *_):
    return jnp.sum(w["w"] ** 2)


def _same(*carry):
    return carry[0] if len(carry) == 1 else carry


def _on_devices(fn, *args, **options):
    """Runs `fn` under a shard_map over eight devices, on a value that differs between them."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P(), **options)(jnp.arange(8.0), *args)


def _partial_sums():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.sharding.reshard(jnp.ones((4, 8)), P(None, "d"))

        @jax.jit
        def check(x):
            total = jnp.einsum("ij,kj->ik", x, x, out_sharding=P(None, None, unreduced={"d"}))
            return jmpscale.all_finite({"w": total})

        return check(x)


def _different_shards():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    local = jax.shard_map(lambda x: x[0], mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False)
    testing.assert_replicated({"w": jax.jit(local)(jnp.arange(8.0))})


def _different_processes():
    """Simulates a second process, which holds other bits of the same shard."""

    def gather(sums):
        return np.stack([sums, sums + np.array([0, other], np.uint32)])

    with (
        mock.patch.object(jax, "process_count", return_value=2),
        mock.patch.object(testing.multihost_utils, "process_allgather", gather),
    ):
        other = 0
        testing.assert_replicated({"w": LOSS})
        other = 1
        testing.assert_replicated({"w": LOSS})


def _inner(update):
    """Returns the loss-scaled form of an optimizer whose state is a count."""
    return jmpscale.with_loss_scaling(optax.GradientTransformation(lambda _: jnp.int32(0), update))


def _updated(tx):
    return jax.jit(tx.update)(GRADS, tx.init(GRADS))


def _ref():
    if not hasattr(jax, "new_ref"):
        pytest.skip("this version of JAX has no public references")
    return {"w": jax.new_ref(jnp.ones(2))}


def _stuck(last_skip=1, **fields):
    fields = {"skipped": 5, "consecutive_skips": 3, "last_skip": last_skip} | fields
    state = STATE._replace(**{name: jnp.asarray(x, getattr(STATE, name).dtype) for name, x in fields.items()})
    jmpscale.raise_if_stuck(state, max_consecutive_skips=2)


def _stuck_checkified(consecutive_skips):
    def check(state):
        jmpscale.raise_if_stuck(state, max_consecutive_skips=2)

    state = STATE._replace(loss_scale=jnp.float32(8), consecutive_skips=consecutive_skips)
    checkify.checkify(check)(state)[0].throw()


REPORTS = jax.tree.map(lambda x: np.stack([x, x]), jax.device_get(REPORT))
A_SCALER = r"state must be a ScalerState, got {}\. .*(dynamic|get_scaler)"
AS_SCALER = r"scaler must be a ScalerState, got {}\. .*dynamic"
NO_SCALER = r"tree must contain exactly one ScalerState, found 0 in a {}\. Pass a scaler"

# What is wrong: the call, the type of the error, and what the message says: the argument, the value, the remedy.
ERRORS = {
    # a scaler is expected
    "scale: swapped": (lambda: jmpscale.scale(LOSS, STATE), TypeError, A_SCALER.format("ArrayImpl")),
    "scale: optimizer state": (
        lambda: jmpscale.scale(OPT_STATE, LOSS),
        TypeError, A_SCALER.format("LossScalingState"),
    ),
    "unscale: swapped": (lambda: jmpscale.unscale(GRADS, STATE), TypeError, A_SCALER.format("dict")),
    "unscale_and_check: swapped": (
        lambda: jmpscale.unscale_and_check(GRADS, STATE), TypeError, A_SCALER.format("dict"),
    ),
    "update: swapped": (lambda: jmpscale.update(TRUE, STATE), TypeError, A_SCALER.format("ArrayImpl")),
    "raise_if_stuck": (
        lambda: jmpscale.raise_if_stuck(TORCH, max_consecutive_skips=1), ValueError, NO_SCALER.format("dict"),
    ),
    "to_torch_state_dict": (lambda: jmpscale.to_torch_state_dict(TORCH), TypeError, A_SCALER.format("dict")),
    "grad_report: scaler": (lambda: jmpscale.grad_report(GRADS, scaler=8.0), TypeError, AS_SCALER.format("float")),
    "replace_scaler: swapped": (
        lambda: jmpscale.replace_scaler(STATE, OPT_STATE), TypeError, AS_SCALER.format("LossScalingState"),
    ),
    "with_loss_scaling: an axis in place of the scaler": (
        lambda: jmpscale.with_loss_scaling(ADAM, "data"), TypeError, AS_SCALER.format("str"),
    ),
    "exponent_histogram: scaler": (
        lambda: plots.exponent_histogram(GRADS, scaler=65536.0), TypeError, AS_SCALER.format("float"),
    ),
    "value_and_grad: forgotten": (
        lambda: jmpscale.value_and_grad(_loss)(GRADS), ValueError, NO_SCALER.format("dict"),
    ),
    "value_and_grad: swapped": (
        lambda: jmpscale.value_and_grad(_loss)(GRADS, STATE), ValueError, NO_SCALER.format("dict"),
    ),
    "metrics": (lambda: jmpscale.metrics(GRADS), ValueError, NO_SCALER.format("dict")),
    "a batch of scalers in the optimizer state": (
        lambda: TX.update(GRADS, OPT_STATE._replace(scaler=BATCH), GRADS), ValueError, r"state\.scaler must hold one",
    ),
    "a batch of scalers": (
        lambda: jmpscale.scale(BATCH, LOSS), ValueError, r"state must hold one scaler, got .*shape \(2,\).*jax\.vmap",
    ),
    "a batch of scalers to value_and_grad": (
        lambda: jmpscale.value_and_grad(_loss)((BATCH, 1), GRADS), ValueError,
        r"holder must hold one scaler, got .*shape \(2,\)",
    ),
    "a batch of scalers to torch": (
        lambda: jmpscale.to_torch_state_dict(BATCH), ValueError, r"state must hold one scaler, got .*shape \(2,\)",
    ),
    "a batch of scalers in a plot": (
        lambda: plots.exponent_histogram(GRADS, scaler=BATCH), ValueError, r"must hold one scaler, got .*shape \(2,\)",
    ),
    "a scaler built without settings": (
        lambda: jmpscale.update(STATE._replace(config=None), True), TypeError,
        r"state\.config must be a ScalerConfig, got NoneType\. .*restore into",
    ),
    "a scaler whose fields have different shapes": (
        lambda: jmpscale.update(STATE._replace(finite_steps=jnp.zeros(2, jnp.int32)), True), TypeError,
        r"state\.finite_steps must be a scalar .*got int32\[2\]",
    ),
    "a scaler whose counter is not an integer": (
        lambda: jmpscale.update(STATE._replace(finite_steps=np.float32(3.7)), True), TypeError,
        r"state\.finite_steps must be .*integer.*got float32\[\]",
    ),
    "a scaler whose counter is too narrow": (
        lambda: jmpscale.update(STATE._replace(finite_steps=np.int8(3)), True), TypeError,
        r"state\.finite_steps must be .*32 bits, got int8\[\]\. Restore checkpoints into",
    ),
    "a scaler whose scale is too narrow": (
        lambda: jmpscale.update(STATE._replace(loss_scale=np.float16(8)), True), TypeError,
        r"state\.loss_scale must be .*32 bits, got float16\[\]\. ",
    ),
    "a scaler whose scale is complex": (
        lambda: jmpscale.scale(STATE._replace(loss_scale=np.complex64(8)), LOSS), TypeError,
        r"state\.loss_scale must be .*floating.*got complex64\[\]",
    ),
    "a scaler whose scale is a string": (
        lambda: jmpscale.scale(STATE._replace(loss_scale="8"), LOSS), TypeError,
        r"state\.loss_scale must be .*got '8'\. ",
    ),
    # the algorithm
    "scale: an integer": (
        lambda: jmpscale.scale(STATE, {"aux": jnp.int32(3)}), TypeError,
        r"losses of a floating-point dtype, got int32\[\] at tree\['aux'\]\. .*\.astype",
    ),
    "scale: a string": (lambda: jmpscale.scale(STATE, "x"), TypeError, r"got 'x' at tree\. "),
    "scale: a float16 loss": (
        lambda: jax.jit(jmpscale.scale)(STATE, jnp.float16(1)), UserWarning,
        r"the loss is float16, .*infinite\. Return the loss in float32",
    ),
    "update: a number": (
        lambda: jmpscale.update(STATE, 1), TypeError, r"finite must be a boolean, got 1\. .*all_finite",
    ),
    "update: the pair": (
        lambda: jmpscale.update(STATE, jmpscale.unscale_and_check(STATE, GRADS)), TypeError,
        r"finite must be a boolean, got tuple\. .*unscale_and_check",
    ),
    "update: gradients": (lambda: jmpscale.update(STATE, BIG), TypeError, r"finite must be a boolean, got dict\. "),
    "update: a flag per leaf": (
        lambda: jmpscale.update(STATE, jnp.array([True, False])), ValueError,
        r"finite must be a scalar, got shape \(2,\)\. .*\.all\(\)",
    ),
    "an unknown axis": (
        lambda: jax.jit(lambda s: jmpscale.update(s, True, axis_name="data"))(STATE), ValueError,
        r"axis_name 'data' is not the name of a mapped axis here\. .*omit axis_name",
    ),
    "an unknown axis in a set": (
        lambda: jmpscale.all_finite(GRADS, axis_name={"data"}), ValueError, "axis_name 'data' is not the name",
    ),
    "a list of lists of axes": (
        lambda: jmpscale.all_finite(GRADS, axis_name=[["data"]]), ValueError,
        "axis_name list is not the name of a mapped",
    ),
    "no axis where types do not show what varies": (
        lambda: _on_devices(jmpscale.all_finite, check_vma=False), UserWarning,
        r"each device decides independently.*\('d',\).*Pass axis_name=\('d',\) to combine.*, or axis_name=\(\)",
    ),
    "a reference among the gradients": (
        lambda: jmpscale.all_finite(_ref()), TypeError,
        r"tree must hold values, got a jax\.Ref at tree\['w'\]\. Read it with ref\[\.\.\.\]",
    ),
    # one step
    "apply_if: no flag": (
        lambda: jmpscale.apply_if(BIG, _same, GRADS), TypeError, r"finite must be a boolean, got dict\. ",
    ),
    "apply_if: fn first": (
        lambda: jmpscale.apply_if(_same, TRUE, GRADS), TypeError, r"finite must be a boolean, got function\. ",
    ),
    "apply_if: fn called already": (
        lambda: jmpscale.apply_if(TRUE, _same(LOSS, LOSS), LOSS), TypeError,
        r"fn must be a function of the carry, got tuple\. .*apply_if\(finite, fn, \*carry\)",
    ),
    "apply_if: fn last": (
        lambda: jmpscale.apply_if(TRUE, BIG, _same), TypeError, r"fn must be a function of the carry, got dict\. ",
    ),
    "apply_if: no carry": (
        lambda: jmpscale.apply_if(TRUE, _same), TypeError, r"carry must hold at least one value, got none\. Pass",
    ),
    "apply_if: an NNX model": (
        lambda: jmpscale.apply_if(TRUE, _same, nnx.Linear(1, 1, rngs=nnx.Rngs(0))), TypeError,
        r"carry must hold values, got a Flax NNX Linear.*Gate the values: carry nnx\.state\(model\).*nnx\.update",
    ),
    "apply_if: another structure": (
        lambda: jmpscale.apply_if(TRUE, lambda c: {k: c[k] for k in list(c)[1:]}, BIG), TypeError,
        r"same structure, but carry\[0\]\['layer_0'\]\['(bias|kernel)'\] is only in its input.*Return every value",
    ),
    "apply_if: other containers": (
        lambda: jmpscale.apply_if(TRUE, list, (LOSS, LOSS)), TypeError, "but the containers differ",
    ),
    "apply_if: a list for a tuple": (
        lambda: jmpscale.apply_if(TRUE, lambda a, b: [a, b], LOSS, LOSS), TypeError,
        "fn returned a list, expected a tuple of 2 values, one for each carry. Return them as `return a, b`",
    ),
    "apply_if: another dtype": (
        lambda: jmpscale.apply_if(TRUE, lambda w: w.astype(jnp.float16), LOSS), TypeError,
        r"carry\[0\] was float32\[\] and is float16\[\]\. Convert it with \.astype in fn.*tx\.init\(jmpscale\.cast",
    ),
    "apply_if: another shape": (
        lambda: jmpscale.apply_if(TRUE, lambda w: w[None], LOSS), TypeError,
        r"carry\[0\] was float32\[\] and is float32\[1\]\. Return an array of the same shape from fn",
    ),
    "apply_if: another object": (
        lambda: jmpscale.apply_if(TRUE, lambda w: {**w, "name": "b"}, {"w": LOSS, "name": "a"}), TypeError,
        r"carry\[0\]\['name'\] was 'a' and is 'b'\. Only arrays and Python numbers may change",
    ),
    "value_and_grad: the scaler too early": (
        lambda: jmpscale.value_and_grad(STATE, _loss), TypeError,
        r"fun must be the loss function, got ScalerState\. .*value_and_grad\(loss_fn\)\(scaler, params",
    ),
    "value_and_grad: the scaler second": (
        lambda: jmpscale.value_and_grad(_loss, STATE), TypeError,
        r"fun must be the loss function, got .*value_and_grad\(loss_fn\)\(scaler, params",
    ),
    "value_and_grad: a loss": (
        lambda: jmpscale.value_and_grad(_loss(GRADS)), TypeError, r"fun must be the loss function, got float32\[\]\. ",
    ),
    "value_and_grad: no auxiliary data": (
        lambda: jmpscale.value_and_grad(_loss, has_aux=True)(STATE, GRADS), TypeError,
        r"fun must return a pair \(loss, aux\) because has_aux is true, got float32\[\]\. Return both",
    ),
    "value_and_grad: an NNX model": (
        lambda: jmpscale.value_and_grad(_loss)(STATE, nnx.Linear(1, 1, rngs=nnx.Rngs(0))), TypeError,
        r"got a Flax NNX Linear.*Pass transform=flax\.nnx\.value_and_grad",
    ),
    "value_and_grad: an Equinox model": (
        lambda: jmpscale.value_and_grad(_loss)(STATE, eqx.nn.MLP(1, 1, 1, 1, key=jax.random.key(0))), TypeError,
        r"argument 0 must have gradients for all leaves, got an Equinox MLP with .* at .*\. Pass transform=equinox\.f",
    ),
    # optax
    "with_loss_scaling: swapped": (
        lambda: jmpscale.with_loss_scaling(STATE, ADAM), TypeError,
        r"inner must be an optax\.GradientTransformation, got ScalerState\. Pass one, such as optax\.adam",
    ),
    "with_loss_scaling: not called": (
        lambda: jmpscale.with_loss_scaling(optax.adam), TypeError, r"inner must be .*got function\. ",
    ),
    "with_loss_scaling: max_norm": (
        lambda: jmpscale.with_loss_scaling(ADAM, max_norm=-1.0), ValueError,
        r"max_norm must be between .*, got -1\. Omit it",
    ),
    "with_loss_scaling: max_norm is not a number": (
        lambda: jmpscale.with_loss_scaling(ADAM, max_norm="1"), TypeError, "max_norm must be a Python number, got '1'",
    ),
    "with_loss_scaling: an unknown axis of the norm": (
        lambda: _updated(jmpscale.with_loss_scaling(ADAM, max_norm=1.0, norm_axis_name="data")), ValueError,
        "axis_name 'data' is not the name of a mapped axis",
    ),
    "tx.update: the state of the inner optimizer": (
        lambda: TX.update(GRADS, ADAM.init(GRADS), GRADS), TypeError,
        r"state must be .*init of with_loss_scaling.*got tuple\. .*tx\.init\(params\)\._replace\(inner_state",
    ),
    "tx.update: swapped": (
        lambda: TX.update(OPT_STATE, GRADS, GRADS), TypeError, r"state must be .*with_loss_scaling.*got dict\. ",
    ),
    "tx.update: the scaler": (
        lambda: TX.update(GRADS, STATE, GRADS), TypeError, r"state must be .*with_loss_scaling.*got ScalerState\. ",
    ),
    "tx.update: no state": (
        lambda: TX.update(GRADS, None, GRADS), TypeError, r"state must be .*with_loss_scaling.*got NoneType\. ",
    ),
    "inner: another structure of the updates": (
        lambda: _updated(_inner(lambda g, s, p=None: (g["w"], s))), TypeError,
        r"inner must return updates with the structure of the gradients, .*, got .*\. Wrap the part of the optimizer",
    ),
    "inner: another structure of the state": (
        lambda: _updated(_inner(lambda g, s, p=None: (g, (s, s)))), TypeError,
        r"inner must return its state with the same structure, but .*\. Place .* outside: optax\.chain",
    ),
    "inner: another dtype of the state": (
        lambda: _updated(_inner(lambda g, s, p=None: (g, jnp.float32(s)))), TypeError,
        r"inner must return its state .*, but state was int32\[\] and is float32\[\]\. Convert it with .* in inner",
    ),
    "get_scaler: the transformation": (
        lambda: jmpscale.get_scaler(TX), ValueError,
        r"exactly one ScalerState, found 0 in a GradientTransformationExtraArgs\. Pass a scaler, the optimizer state",
    ),
    "get_scaler: wrapped twice": (
        lambda: jmpscale.get_scaler(jmpscale.with_loss_scaling(TX).init(GRADS)), ValueError, "exactly one .* found 2",
    ),
    "get_scaler: the arrays filtered out": (
        lambda: jmpscale.get_scaler(jax.tree.map(lambda _: None, OPT_STATE)), ValueError,
        r"got one without loss_scale\. A filter has removed it; pass the unfiltered tree",
    ),
    "optax_step: swapped": (
        lambda: jmpscale.optax_step(GRADS, ADAM), TypeError,
        r"tx must be an optax\.GradientTransformation, got dict\. Pass one, such as optax",
    ),
    "optax_step: a bare update": (
        lambda: jmpscale.optax_step(ADAM.update, GRADS), TypeError,
        r"tx must be the optimizer, got the function .*\. Pass the optimizer, not its update",
    ),
    "optax_step: a wrapped optimizer": (
        lambda: jmpscale.apply_if(True, jmpscale.optax_step(TX, GRADS), GRADS, OPT_STATE), TypeError,
        r"tx must not be wrapped in with_loss_scaling.*Pass the inner optimizer, or call tx\.update",
    ),
    "cast: an integer": (
        lambda: jmpscale.cast(GRADS, jnp.int8), TypeError,
        r"dtype must be a floating-point dtype, got .*int8.*\. Pass a dtype such as jnp\.float16",
    ),
    "cast: None": (
        lambda: jmpscale.cast(GRADS, None), TypeError, r"dtype must be a floating-point dtype, got None\. Pass a dtype",
    ),
    # making a scaler
    "dynamic: a scaler": (
        lambda: jmpscale.dynamic(STATE), TypeError, "init_scale must be a Python number, got ScalerState",
    ),
    "dynamic: an array": (
        lambda: jmpscale.dynamic(growth_factor=np.ones(9999)), TypeError,
        r"growth_factor must be a Python number, got float64\[9999\] of type ndarray.*float\(\)",
    ),
    "dynamic: a tracer": (
        lambda: jax.jit(jmpscale.dynamic)(8.0), TypeError, "init_scale must be a Python number.*traced value",
    ),
    "dynamic: a string": (
        lambda: jmpscale.dynamic("8"), TypeError, "init_scale must be a Python number, got '8' of type str",
    ),
    "dynamic: nan": (
        lambda: jmpscale.dynamic(float("nan")), ValueError, r"init_scale must be a number, got nan\. Pass",
    ),
    "dynamic: outside its limits": (
        lambda: jmpscale.dynamic(0.5), ValueError,
        r"init_scale must be between 1 and .*, got 0\.5\. Change init_scale, or the limits min_scale",
    ),
    "dynamic: too small a limit": (
        lambda: jmpscale.dynamic(min_scale=1e-40), ValueError,
        r"min_scale must be between .* got 1e-40\. Outside 2\^-126",
    ),
    "dynamic: crossed limits": (
        lambda: jmpscale.dynamic(4.0, min_scale=8.0, max_scale=2.0), ValueError,
        r"min_scale must not exceed max_scale, got 8 and 2\. Swap",
    ),
    "dynamic: growth": (
        lambda: jmpscale.dynamic(growth_factor=1), ValueError, r"growth_factor must be above 1 .*got 1\.0\. ",
    ),
    "dynamic: backoff": (
        lambda: jmpscale.dynamic(backoff_factor=2), ValueError, r"backoff_factor must be below 1 .*got 2\.0\. ",
    ),
    "dynamic: a fraction of a step": (
        lambda: jmpscale.dynamic(growth_interval=0.5), TypeError,
        r"growth_interval must be an integer, got 0\.5 of type float\. Use int",
    ),
    "dynamic: no step": (
        lambda: jmpscale.dynamic(hysteresis=0), ValueError,
        r"hysteresis must be between 1 and 2147483647, got 0\. Choose",
    ),
    "dynamic: hysteresis_reset": (
        lambda: jmpscale.dynamic(hysteresis_reset="never"), ValueError,
        r"hysteresis_reset must be one of 'growth', 'finite', got 'never'\.",
    ),
    "ScalerConfig: mode": (
        lambda: jmpscale.ScalerConfig(mode=BIG), ValueError, r"mode must be one of 'dynamic', .*got dict",
    ),
    "static": (lambda: jmpscale.static(0.0), ValueError, r"scale must be between .*got 0\. Outside 2\^-126"),
    # torch's format
    "to_torch_state_dict: static": (
        lambda: jmpscale.to_torch_state_dict(jmpscale.static(8.0)), ValueError,
        r"state must be dynamic .*got mode 'static'\. .*enabled=False",
    ),
    "from_torch_state_dict: a scaler": (
        lambda: jmpscale.from_torch_state_dict(STATE), TypeError,
        r"mapping must be the result of GradScaler\.state_dict\(\), got ScalerState\.",
    ),
    "from_torch_state_dict: disabled": (
        lambda: jmpscale.from_torch_state_dict({}), ValueError, r"mapping is empty.*disabled GradScaler.*dynamic\(\)",
    ),
    "from_torch_state_dict: a checkpoint around it": (
        lambda: jmpscale.from_torch_state_dict({"scaler": TORCH}), ValueError,
        r"missing \['_growth_tracker', .*unexpected \['scaler'\]\. Pass the scaler's own state dict",
    ),
    "from_torch_state_dict: scale": (
        lambda: jmpscale.from_torch_state_dict(TORCH | {"scale": 0.0}), ValueError,
        r"mapping\['scale'\] must be between .*got 0\. The limits are min_scale and max_scale",
    ),
    "from_torch_state_dict: tracker": (
        lambda: jmpscale.from_torch_state_dict(TORCH | {"_growth_tracker": -1}), ValueError,
        r"mapping\['_growth_tracker'\] must be between 0 and 2147483647, got -1\. ",
    ),
    # monitoring
    "raise_if_stuck: a fraction": (
        lambda: jmpscale.raise_if_stuck(STATE, max_consecutive_skips=2.5), TypeError,
        r"max_consecutive_skips must be an integer, got 2\.5",
    ),
    "raise_if_stuck: zero": (
        lambda: jmpscale.raise_if_stuck(STATE, max_consecutive_skips=0), ValueError,
        "max_consecutive_skips must be between 1 and 2147483647, got 0",
    ),
    "raise_if_stuck: compiled, without checkify": (
        lambda: jax.jit(lambda s: jmpscale.raise_if_stuck(s, max_consecutive_skips=2))(STATE), ValueError,
        r"not functionalized.*checkify\.checkify",
    ),
    "stuck: the loss": (
        lambda: _stuck(2), FloatingPointError,
        r"^3 consecutive steps were skipped \(5 in total\).*the loss itself.*Look for invalid data",
    ),
    "stuck: at the lower limit": (
        lambda: _stuck(loss_scale=1), FloatingPointError,
        "cannot back off any further.*grad_report.*decrease min_scale",
    ),
    "stuck: at the start": (
        lambda: _stuck(skipped=3), FloatingPointError, "are the first skips.*decrease init_scale",
    ),
    "stuck: backing off": (_stuck, FloatingPointError, "is still backing off.*grad_report names the leaf"),
    "stuck: a damaged scale": (
        lambda: _stuck(loss_scale=jnp.nan), FloatingPointError, r"the loss scale is nan.*damaged.*[Rr]estore",
    ),
    "stuck: an infinite scale": (
        lambda: _stuck(loss_scale=jnp.inf), FloatingPointError, r"the loss scale is inf.*damaged.*[Rr]estore",
    ),
    "stuck: under checkify": (
        lambda: _stuck_checkified(jnp.int32(9)), checkify.JaxRuntimeError, "^9 consecutive steps were skipped",
    ),
    "stuck: known already while checkify traces": (
        lambda: _stuck_checkified(np.int32(9)), FloatingPointError, "^9 consecutive steps were skipped",
    ),
    "grad_report: no gradients": (
        lambda: jmpscale.grad_report({"n": 1, "i": jnp.array(3), "none": None}), ValueError,
        r"grads must have a leaf of a floating-point dtype, got none\. Pass",
    ),
    "grad_report: too large a leaf": (
        lambda: jax.eval_shape(jmpscale.grad_report, jax.ShapeDtypeStruct((2**16, 2**16), jnp.float16)), ValueError,
        r"at most 2147483647 values in a leaf, got 4294967296\. Split",
    ),
    "describe: limit": (lambda: REPORT.describe(0), ValueError, r"limit must be between 1 and 2147483647, got 0\. "),
    "describe: a fraction": (lambda: REPORT.describe(limit=2.5), TypeError, r"limit must be an integer, got 2\.5"),
    "describe: traced": (
        lambda: jax.jit(lambda g: jmpscale.grad_report(g).describe())(GRADS), TypeError,
        r"describe reads the report .*jax\.jit\. Return the report first",
    ),
    "describe: several": (
        lambda: jax.tree.map(lambda x: jnp.stack([x, x]), REPORT).describe(), ValueError,
        r"a single report, got a batch of shape \(2,\)\. Select one.*x\[0\]",
    ),
    # jmpscale.testing
    "inject: no such leaf": (
        lambda: testing.inject(GRADS, jnp.inf, path="w"), ValueError,
        r"""path must be that of a floating-point leaf with elements, got 'w'\. .* are \["\['b'\]", "\['w'\]"\]""",
    ),
    "inject: swapped": (lambda: testing.inject(jnp.inf, BIG, path="['w']"), ValueError, "path must be that of"),
    "inject: a tree for a path": (
        lambda: testing.inject(GRADS, jnp.inf, path=BIG), ValueError, "path must be .*got dict",
    ),
    "inject: a step number for a flag": (
        lambda: testing.inject(GRADS, jnp.inf, path="['w']", when=2), TypeError, r"when must be a boolean, got 2\. ",
    ),
    "inject: a flag per element": (
        lambda: testing.inject(GRADS, jnp.inf, path="['w']", when=jnp.array([True, False, True])), ValueError,
        r"when must be a scalar, got shape \(3,\)\. ",
    ),
    "inject: many values": (
        lambda: testing.inject(GRADS, jnp.full((2, 3), jnp.inf), path="['w']"), ValueError,
        r"value must be a scalar .*got float32\[2, 3\]\. ",
    ),
    "inject: no value": (
        lambda: testing.inject(GRADS, None, path="['w']"), (TypeError, ValueError),
        r"value must be a scalar .*got None\. ",
    ),
    "inject_backward: no such leaf": (
        lambda: testing.inject_backward(GRADS, jnp.inf, path="w"), ValueError,
        r"path must be that of a floating-point leaf with elements, got 'w'\. ",
    ),
    "inject_backward: a step number for a flag": (
        lambda: testing.inject_backward(GRADS, jnp.inf, path="['w']", when=2), TypeError,
        r"when must be a boolean, got 2\. ",
    ),
    "assert_step_is_noop: a leaf": (
        lambda: testing.assert_step_is_noop({"w": np.zeros(900)}, {"w": np.full(900, 1 / 3)}), AssertionError,
        r"(?s)the step changed state\['w'\]: .* before, .* after.*apply_if",
    ),
    "assert_step_is_noop: the structure": (
        lambda: testing.assert_step_is_noop({"w": 1}, {"v": 1}), AssertionError, r"structure .*: \['v'\] differs",
    ),
    "assert_replicated: a number": (
        lambda: testing.assert_replicated({"w": 1.0}), TypeError, r"tree\['w'\] must be an array, got float\. Pass",
    ),
    "assert_replicated: different shards": (
        _different_shards, AssertionError, r"tree\['w'\] differs between devices: .*pass axis_name",
    ),
    "assert_replicated: different processes": (
        _different_processes, AssertionError, r"^tree\['w'\] differs between processes\.",
    ),
    # jmpscale.plots
    "exponent_histogram: nothing": (
        lambda: plots.exponent_histogram({"n": np.arange(3)}), ValueError,
        r"grads must have .*got none\. Pass the gradients",
    ),
    "exponent_histogram: empty": (
        lambda: plots.exponent_histogram({"w": np.zeros(0)}), ValueError,
        r"grads must have .*got none\. Pass the gradients",
    ),
    "scale_trajectory: a list": (
        lambda: plots.scale_trajectory([jmpscale.metrics(STATE)]), TypeError, r"history must .*got list\. .*np\.stack",
    ),
    "scale_trajectory: one step": (
        lambda: plots.scale_trajectory(jmpscale.metrics(STATE)), TypeError, r"history.*got .*\[\].*np\.stack",
    ),
    "scale_trajectory: something else": (
        lambda: plots.scale_trajectory({"loss_scale": np.ones(3)}), TypeError, "history must .*consecutive_skips",
    ),
    "headroom: a list": (
        lambda: plots.headroom([REPORT]), TypeError, r"reports must be .*GradReport.*got list\. .*np\.stack",
    ),
    "headroom: one step": (lambda: plots.headroom(REPORT), TypeError, r"reports.*got .*\[2\].*np\.stack"),
    "headroom: limit": (lambda: plots.headroom(REPORTS, limit=-1), ValueError, r"limit must be between .*got -1\. "),
}  # fmt: skip
if jax.__version_info__ >= (0, 10):  # before, JAX has no type for them inside jit
    ERRORS["gradients that are partial sums"] = (
        _partial_sums, TypeError, r"the leaf at tree\['w'\] is a partial sum over the mesh axes \['d'\].*psum.*reshard",
    )  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_a_wrong_argument_raises_an_error_that_names_argument_value_and_remedy(name):
    call, kind, pattern = ERRORS[name]
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert re.search(pattern, message), message[:1000]
    assert len(message) < 1000, "a message does not print the numbers of a model"
    assert "nnx.cond" not in message, "a branch, which copies the training state and loses shardings on a GPU"


# --- warnings ---


def _shard_mapped(fn):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))


def _without_axis_name(grads):
    """Calls each function that takes `axis_name` without it, on a line of its own."""
    found = [
        jmpscale.all_finite(grads),
        jmpscale.unscale_and_check(STATE, grads)[1],
        jmpscale.update(STATE, True, loss=grads.sum()).step_applied,
        jmpscale.grad_report(grads).finite,
        SCALE.update(grads, SCALE.init(grads))[1].scaler.step_applied,
        CHAIN.update(grads, CHAIN.init(grads))[1][0].scaler.step_applied,
        jax.tree.map(jmpscale.all_finite, [grads])[0],
    ]
    return jnp.stack(found)[None]


SCALE = jmpscale.with_loss_scaling(optax.scale(1.0))
CHAIN = optax.chain(SCALE, optax.scale(1.0))


@pytest.mark.parametrize(
    "mapped", [functools.partial(jax.pmap, axis_name="d"), _shard_mapped], ids=["pmap", "shard_map"]
)
def test_a_missing_axis_name_warns_at_each_line_of_the_user(mapped):
    if mapped is not _shard_mapped and jax.__version_info__ < (0, 10):
        pytest.skip("in older versions of JAX pmap does not show that there is a mesh")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", "each device decides independently", UserWarning)
        mapped(_without_axis_name)(jnp.ones((8, 3)))
    first = _without_axis_name.__code__.co_firstlineno + 3  # after the name, the docstring and the bracket
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, first + i) for i in range(7)]


# --- scalers of other libraries ---

FOREIGN = {
    "jmp": lambda: jmp.DynamicLossScale(jnp.float32(2.0**15)),
    "flax": flax.training.dynamic_scale.DynamicScale,
    "torch": lambda: TORCH,
    "optax": lambda: optax.apply_if_finite(ADAM, 3).init(GRADS),
    "Orbax, no template": lambda: STATE._asdict(),
    "plain tuple": lambda: tuple(STATE),
}
TAKE_A_SCALER = {
    "scale": lambda s: jmpscale.scale(s, LOSS),
    "unscale": lambda s: jmpscale.unscale(s, GRADS),
    "unscale_and_check": lambda s: jmpscale.unscale_and_check(s, GRADS),
    "update": lambda s: jmpscale.update(s, True),
    "to_torch_state_dict": jmpscale.to_torch_state_dict,
    "with_loss_scaling": lambda s: jmpscale.with_loss_scaling(ADAM, s),
    "replace_scaler": lambda s: jmpscale.replace_scaler(OPT_STATE, s),
    "grad_report": lambda s: jmpscale.grad_report(GRADS, scaler=s),
    "exponent_histogram": lambda s: plots.exponent_histogram(GRADS, scaler=s),
}
TAKE_A_HOLDER = {
    "get_scaler": jmpscale.get_scaler,
    "metrics": jmpscale.metrics,
    "raise_if_stuck": lambda s: jmpscale.raise_if_stuck(s, max_consecutive_skips=1),
    "value_and_grad": lambda s: jmpscale.value_and_grad(_loss)(s, GRADS),
    "loss_scaled": lambda s: jmpscale.loss_scaled(_loss, lambda grads: s)(GRADS),
    "replace_scaler": lambda s: jmpscale.replace_scaler(s, STATE),
}


@pytest.mark.parametrize("library", FOREIGN)
def test_a_scaler_of_another_library_is_refused_by_its_name(library):
    foreign = FOREIGN[library]()
    for name, call in TAKE_A_SCALER.items():
        with pytest.raises(TypeError) as error:
            call(foreign)
        assert f"must be a ScalerState, got {type(foreign).__name__}. " in str(error.value), name
    for name, call in TAKE_A_HOLDER.items():
        with pytest.raises(ValueError, match="exactly one ScalerState") as error:
            call(foreign)
        assert f"found 0 in a {type(foreign).__name__}. " in str(error.value), name


# --- errors of JAX and Python that are clear enough ---


def _leaked():
    states = []
    jax.jit(lambda s: states.append(jmpscale.update(s, True)))(STATE)
    return states[0]


def _donated():
    state = jax.tree.map(jnp.asarray, jmpscale.dynamic())
    jax.jit(lambda s: jmpscale.update(s, True), donate_argnums=0)(state)
    return state


THEIRS = {
    "a leaked scaler": (lambda: jmpscale.scale(_leaked(), LOSS), jax.errors.UnexpectedTracerError, "side effect"),
    "a leaked scaler, read": (
        lambda: jmpscale.raise_if_stuck(_leaked(), max_consecutive_skips=1), jax.errors.UnexpectedTracerError,
        "side effect",
    ),
    "a donated scaler": (lambda: jmpscale.scale(_donated(), LOSS), (RuntimeError, ValueError), "deleted"),
    "before and after, donated": (
        lambda: testing.assert_step_is_noop(_donated(), STATE), (RuntimeError, ValueError), "deleted",
    ),
    "a traced scaler to torch": (
        lambda: jax.jit(jmpscale.to_torch_state_dict)(STATE), jax.errors.ConcretizationTypeError, "traced array",
    ),
    "traced before and after": (
        lambda: jax.jit(testing.assert_step_is_noop)(GRADS, GRADS), jax.errors.TracerArrayConversionError,
        "traced array",
    ),
    "a traced plot": (
        lambda: jax.jit(plots.exponent_histogram)(GRADS), jax.errors.TracerArrayConversionError, "traced array",
    ),
    "gradients of another structure": (
        lambda: TX.update({"v": jnp.ones(3)}, OPT_STATE, GRADS), ValueError, "(?s)structure|[Mm]ismatch",
    ),
    "no parameters for weight decay": (
        lambda: (tx := jmpscale.with_loss_scaling(optax.adamw(1.0))).update(GRADS, tx.init(GRADS)), ValueError,
        "params",
    ),
    "no scaler at all": (lambda: jmpscale.value_and_grad(_loss)(), TypeError, "missing 1 required .* 'holder'"),
    "an option by its place": (lambda: jmpscale.update(STATE, True, LOSS), TypeError, "takes 2 positional arguments"),
    "an unknown option": (lambda: jmpscale.dynamic(growth=2.0), TypeError, "unexpected keyword argument 'growth'"),
    "a setting set": (lambda: setattr(STATE.config, "hysteresis", 2), AttributeError, "assign to field"),
    "a field set": (lambda: setattr(STATE, "loss_scale", 2.0), AttributeError, "set attribute"),
    "settings that differ between branches": (
        lambda: jax.lax.cond(TRUE, lambda: STATE, lambda: jmpscale.dynamic(hysteresis=2)), TypeError, "hysteresis=2",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", THEIRS)
def test_clear_errors_of_jax_and_python_are_left_to_them(name):
    call, kind, pattern = THEIRS[name]
    with pytest.raises(kind, match=pattern):
        call()
