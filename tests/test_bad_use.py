"""Wrong arguments get an error that a newcomer can act on.

`ERRORS` is the one list of all messages with which the package raises or warns, and a test holds it to the source.
"""

import ast
import contextlib
import errno
import functools
import io
import os
import pathlib
import re
import sys
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
from jmpscale.__main__ import _check_output, _demonstrate, _explaining, _parse, read_text

PACKAGE, HERE = pathlib.Path(jmpscale.__file__).parent, pathlib.Path(__file__)

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
    """Plays the part of a second process, which holds other bits of the same shard."""

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


def _stuck(last_skip=1, **fields):
    fields = {"skipped": 5, "skipped_in_a_row": 3, "last_skip": last_skip} | fields
    state = STATE._replace(**{name: jnp.asarray(x, getattr(STATE, name).dtype) for name, x in fields.items()})
    jmpscale.raise_if_stuck(state, max_skips_in_a_row=2)


def _stuck_checkified():
    def check(state):
        jmpscale.raise_if_stuck(state._replace(skipped_in_a_row=state.skipped_in_a_row + 9), max_skips_in_a_row=2)

    checkify.checkify(check)(STATE)[0].throw()


def _without_matplotlib():
    missing, sys.modules["matplotlib.figure"] = sys.modules["matplotlib.figure"], None
    try:
        _demonstrate(_parse([]))
    finally:
        sys.modules["matplotlib.figure"] = missing


def _parser_error():
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        _parse(["--steps", "0"])
    raise SystemExit(said.getvalue())


def _demo_fails():
    with _explaining("read old.png", OSError):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _history(**change):
    return {name: np.stack([value] * 3) for name, value in jmpscale.metrics(STATE).items()} | change


REPORTS = jax.tree.map(lambda x: np.stack([x, x]), jax.device_get(REPORT))
A_SCALER = r"state must be a ScalerState, got {}\. .*(dynamic|get_scaler)"
AS_SCALER = r"scaler must be a ScalerState, got {}\. .*dynamic"

# What is wrong: the call, the type of the error, and what the message says: which argument, what it got, what to do.
ERRORS = {
    # a scaler is wanted
    "scale: swapped": (lambda: jmpscale.scale(LOSS, STATE), TypeError, A_SCALER.format("ArrayImpl")),
    "scale: optimizer state": (
        lambda: jmpscale.scale(OPT_STATE, LOSS),
        TypeError, A_SCALER.format("LossScalingState"),
    ),
    "unscale: swapped": (lambda: jmpscale.unscale(GRADS, STATE), TypeError, A_SCALER.format("dict")),
    "unscale_and_check: swapped": (
        lambda: jmpscale.unscale_and_check(GRADS, STATE),
        TypeError, A_SCALER.format("dict"),
    ),
    "update: swapped": (lambda: jmpscale.update(TRUE, STATE), TypeError, A_SCALER.format("ArrayImpl")),
    "value_and_grad: forgotten": (lambda: jmpscale.value_and_grad(_loss)(GRADS), TypeError, A_SCALER.format("dict")),
    "value_and_grad: swapped": (
        lambda: jmpscale.value_and_grad(_loss)(GRADS, STATE),
        TypeError, A_SCALER.format("dict"),
    ),
    "metrics": (lambda: jmpscale.metrics(GRADS), TypeError, A_SCALER.format("dict")),
    "raise_if_stuck": (
        lambda: jmpscale.raise_if_stuck(TORCH, max_skips_in_a_row=1),
        TypeError, A_SCALER.format("dict"),
    ),
    "to_torch_state_dict": (lambda: jmpscale.to_torch_state_dict(TORCH), TypeError, A_SCALER.format("dict")),
    "grad_report: scaler": (lambda: jmpscale.grad_report(GRADS, scaler=8.0), TypeError, AS_SCALER.format("float")),
    "replace_scaler: swapped": (
        lambda: jmpscale.replace_scaler(STATE, OPT_STATE), TypeError, AS_SCALER.format("LossScalingState"),
    ),
    "with_loss_scaling: an axis for a scaler": (
        lambda: jmpscale.with_loss_scaling(ADAM, "data"), TypeError, AS_SCALER.format("str"),
    ),
    "exponent_histogram: scaler": (
        lambda: plots.exponent_histogram(GRADS, scaler=65536.0), TypeError, AS_SCALER.format("float"),
    ),
    "a batch of scalers in the optimizer's state": (
        lambda: TX.update(GRADS, OPT_STATE._replace(scaler=BATCH), GRADS), ValueError, r"state\.scaler must hold one",
    ),
    "a batch of scalers": (
        lambda: jmpscale.scale(BATCH, LOSS), ValueError, r"state must hold one scaler, got .*shape \(2,\).*jax\.vmap",
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
        lambda: jmpscale.update(STATE._replace(good_steps=jnp.zeros(2, jnp.int32)), True), (TypeError, ValueError),
        r"state\.good_steps must be .*got int32\[2\]",
    ),
    "a scaler whose counter is no integer": (
        lambda: jmpscale.update(STATE._replace(good_steps=np.float32(3.7)), True), TypeError,
        r"state\.good_steps must be .*int.*got (np\.)?float32",
    ),
    "a scaler whose scale is complex": (
        lambda: jmpscale.scale(STATE._replace(loss_scale=np.complex64(8)), LOSS), TypeError,
        r"state\.loss_scale must be .*float.*got (np\.)?complex64",
    ),
    "a scaler whose scale is a text": (
        lambda: jmpscale.scale(STATE._replace(loss_scale="8"), LOSS), TypeError, r"state\.loss_scale must be .*got",
    ),
    # the core
    "scale: an integer": (
        lambda: jmpscale.scale(STATE, {"aux": jnp.int32(3)}), TypeError,
        r"losses of a floating-point dtype, got int32\[\] at tree\['aux'\]\. .*\.astype",
    ),
    "scale: another library's": (lambda: jmpscale.scale(STATE, "x"), TypeError, r"got 'x' at tree\. "),
    "update: a number": (
        lambda: jmpscale.update(STATE, 1), TypeError,
        r"finite must be a boolean, got 1\. .*all_finite",
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
        r"axis_name 'data' is not the name of a mapped axis here\. .*leave axis_name out",
    ),
    "an axis that is none": (
        lambda: jmpscale.all_finite(GRADS, axis_name={"data"}), ValueError, r"axis_name .*is not the name of a mapped",
    ),
    "a list of lists of axes": (
        lambda: jmpscale.all_finite(GRADS, axis_name=[["data"]]), ValueError,
        r"axis_name .*is not the name of a mapped",
    ),
    "no axis where types tell nothing": (
        lambda: _on_devices(jmpscale.all_finite, check_vma=False), UserWarning,
        r"each device decides for itself.*\('d',\).*Pass axis_name=\('d',\) to agree, or axis_name=\(\)",
    ),
    # one step
    "apply_if: no flag": (
        lambda: jmpscale.apply_if(BIG, _same, GRADS), TypeError,
        r"finite must be a boolean, got dict\. ",
    ),
    "apply_if: fn first": (
        lambda: jmpscale.apply_if(_same, TRUE, GRADS), TypeError, r"finite must be a boolean, got function\. ",
    ),
    "apply_if: fn called already": (
        lambda: jmpscale.apply_if(TRUE, _same(LOSS, LOSS), LOSS), TypeError,
        r"fn must be a function .*got tuple\. .*carry",
    ),
    "apply_if: fn last": (
        lambda: jmpscale.apply_if(TRUE, BIG, _same), TypeError, r"fn must be a function .*got dict\. .*carry",
    ),
    "apply_if: no carry": (lambda: jmpscale.apply_if(TRUE, _same), TypeError, "needs at least one carry after fn"),
    "apply_if: an NNX model": (
        lambda: jmpscale.apply_if(TRUE, _same, nnx.Linear(1, 1, rngs=nnx.Rngs(0))), TypeError,
        r"carry must hold values, got a Flax NNX Linear.*nnx\.cond.*nnx\.state",
    ),
    "apply_if: another structure": (
        lambda: jmpscale.apply_if(TRUE, lambda c: {k: c[k] for k in list(c)[1:]}, BIG), TypeError,
        r"same structure, but carry\[0\]\['layer_0'\]\['(bias|kernel)'\] is only in its input.*Return all that",
    ),
    "apply_if: other containers": (
        lambda: jmpscale.apply_if(TRUE, lambda a, b: [a, b], LOSS, LOSS), TypeError, "the containers differ",
    ),
    "apply_if: another dtype": (
        lambda: jmpscale.apply_if(TRUE, lambda w: w.astype(jnp.float16), LOSS), TypeError,
        r"carry\[0\] went in as float32\[\] and came out as float16\[\].*tx\.init on float32.*reduce the gradients",
    ),
    "value_and_grad: the scaler too early": (
        lambda: jmpscale.value_and_grad(STATE, _loss), TypeError,
        r"got .*ScalerState.*value_and_grad\(.*\)\(scaler, params",
    ),
    "value_and_grad: the scaler second": (
        lambda: jmpscale.value_and_grad(_loss, STATE), TypeError,
        r"got .*ScalerState.*value_and_grad\(.*\)\(scaler, params",
    ),
    "value_and_grad: an Equinox model": (
        lambda: jmpscale.value_and_grad(_loss)(STATE, eqx.nn.MLP(1, 1, 1, 1, key=jax.random.key(0))), TypeError,
        r"argument 0 has an Equinox MLP with a leaf that has no gradient, .*\. Pass transform=equinox\.filter_value",
    ),
    # optax
    "with_loss_scaling: swapped": (
        lambda: jmpscale.with_loss_scaling(STATE, ADAM), TypeError,
        r"inner must be an optax\.GradientTransformation, got ScalerState\. Pass one, such as optax\.adam",
    ),
    "with_loss_scaling: not called": (
        lambda: jmpscale.with_loss_scaling(optax.adam), TypeError, r"inner must be .*got function\. ",
    ),
    "tx.update: the bare optimizer's state": (
        lambda: TX.update(GRADS, ADAM.init(GRADS), GRADS), TypeError,
        r"state must be .*with_loss_scaling.*got tuple\. ",
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
    "get_scaler: the transformation": (
        lambda: jmpscale.get_scaler(TX), ValueError,
        r"exactly one ScalerState, found 0 in a GradientTransformationExtraArgs\. Pass the optimizer state",
    ),
    "get_scaler: wrapped twice": (
        lambda: jmpscale.get_scaler(jmpscale.with_loss_scaling(TX).init(GRADS)), ValueError, "exactly one .* found 2",
    ),
    "get_scaler: the arrays filtered out": (
        lambda: jmpscale.get_scaler(jax.tree.map(lambda _: None, OPT_STATE)), ValueError,
        r"got one without loss_scale\. A filter has taken them out; pass the whole tree",
    ),
    "optax_step: swapped": (
        lambda: jmpscale.optax_step(GRADS, ADAM), TypeError,
        r"tx must be an optax\.GradientTransformation, got dict\. Pass one, such as optax",
    ),
    "cast: an integer": (
        lambda: jmpscale.cast(GRADS, jnp.int8), TypeError,
        r"dtype must be a floating-point dtype, got .*int8.*\. Pass jnp\.float16",
    ),
    # making a scaler
    "dynamic: a scaler": (
        lambda: jmpscale.dynamic(STATE), TypeError,
        r"init_scale must be a Python number, got ScalerState",
    ),
    "dynamic: an array": (
        lambda: jmpscale.dynamic(growth_factor=np.ones(9999)), TypeError,
        r"growth_factor must be a Python number, got .*ndarray.*float\(\)",
    ),
    "dynamic: a tracer": (
        lambda: jax.jit(jmpscale.dynamic)(8.0), TypeError, r"init_scale must be a Python number.*traced values",
    ),
    "dynamic: a text": (
        lambda: jmpscale.dynamic("8"), TypeError,
        r"init_scale must be a Python number, got '8' of type str",
    ),
    "dynamic: nan": (
        lambda: jmpscale.dynamic(float("nan")), ValueError,
        r"init_scale must be a number, got nan\. Pass",
    ),
    "dynamic: outside its limits": (
        lambda: jmpscale.dynamic(0.5), ValueError, r"init_scale must be between 1 and .*, got 0\.5\. Move .*min_scale",
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
        lambda: jmpscale.dynamic(growth_factor=1), ValueError,
        r"growth_factor must be above 1 .*got 1\.0\. ",
    ),
    "dynamic: backoff": (
        lambda: jmpscale.dynamic(backoff_factor=2), ValueError,
        r"backoff_factor must be below 1 .*got 2\.0\. ",
    ),
    "dynamic: a fraction of a step": (
        lambda: jmpscale.dynamic(growth_interval=0.5), TypeError,
        r"growth_interval must be an integer, got 0\.5 of type float\. Use int",
    ),
    "dynamic: no step": (
        lambda: jmpscale.dynamic(hysteresis=0), ValueError,
        r"hysteresis must be between 1 and 2147483647, got 0\. Choose",
    ),
    "dynamic: refill": (
        lambda: jmpscale.dynamic(refill="never"), ValueError,
        r"refill must be one of 'growth', 'finite', got 'never'\.",
    ),
    "ScalerConfig: mode": (
        lambda: jmpscale.ScalerConfig(mode=BIG), ValueError,
        r"mode must be one of 'dynamic', .*got dict",
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
        lambda: jmpscale.from_torch_state_dict({}), ValueError, r"mapping is empty.*dynamic\(\)",
    ),
    "from_torch_state_dict: around it": (
        lambda: jmpscale.from_torch_state_dict({"scaler": TORCH}), ValueError,
        r"missing \['_growth_tracker', .*foreign \['scaler'\]\. Pass the scaler's own state dict",
    ),
    "from_torch_state_dict: scale": (
        lambda: jmpscale.from_torch_state_dict(TORCH | {"scale": 0.0}), ValueError,
        r"mapping\['scale'\] must be between .*got 0\. ",
    ),
    "from_torch_state_dict: tracker": (
        lambda: jmpscale.from_torch_state_dict(TORCH | {"_growth_tracker": -1}), ValueError,
        r"mapping\['_growth_tracker'\] must be between 0 and 2147483647, got -1\. ",
    ),
    # looking
    "raise_if_stuck: a fraction": (
        lambda: jmpscale.raise_if_stuck(STATE, max_skips_in_a_row=2.5), TypeError,
        r"max_skips_in_a_row must be an integer, got 2\.5",
    ),
    "stuck: the loss": (
        lambda: _stuck(2), FloatingPointError,
        r"^3 steps in a row .*the loss itself.*look for bad data",
    ),
    "stuck: at the floor": (lambda: _stuck(loss_scale=1), FloatingPointError, "cannot fall any further.*grad_report"),
    "stuck: at the start": (lambda: _stuck(skipped=3), FloatingPointError, "are the first skips.*start lower"),
    "stuck: falling": (_stuck, FloatingPointError, "still falling.*grad_report names the leaf"),
    "stuck: a damaged scale": (
        lambda: _stuck(loss_scale=jnp.nan), FloatingPointError, r"the loss scale is nan.*damaged.*[Rr]estore",
    ),
    "stuck: compiled": (_stuck_checkified, checkify.JaxRuntimeError, "^9 steps in a row were skipped"),
    "grad_report: nothing to see": (
        lambda: jmpscale.grad_report({"n": 1}), ValueError,
        r"grads must have a leaf of an inexact dtype, got none\. Pass",
    ),
    "grad_report: too large a leaf": (
        lambda: jax.eval_shape(jmpscale.grad_report, jax.ShapeDtypeStruct((2**16, 2**16), jnp.float16)), ValueError,
        r"at most 2147483647 values in a leaf, got 4294967296\. Split",
    ),
    "describe: limit": (lambda: REPORT.describe(0), ValueError, r"limit must be between 1 and 2147483647, got 0\. "),
    "describe: traced": (
        lambda: jax.jit(lambda g: jmpscale.grad_report(g).describe())(GRADS), TypeError,
        r"describe reads the report .*jax\.jit\. Return the report first",
    ),
    "describe: several": (
        lambda: jax.tree.map(lambda x: jnp.stack([x, x]), REPORT).describe(), ValueError,
        r"one report, got a batch of shape \(2,\)\. Take one.*x\[0\]",
    ),
    # jmpscale.testing
    "inject: no such leaf": (
        lambda: testing.inject(GRADS, jnp.inf, path="w"), ValueError,
        r"""path must be that of an inexact leaf with elements, got 'w'\. There are: \["\['b'\]", "\['w'\]"\]""",
    ),
    "inject: swapped": (lambda: testing.inject(jnp.inf, BIG, path="['w']"), ValueError, "path must be that of"),
    "inject: a tree for a path": (
        lambda: testing.inject(GRADS, jnp.inf, path=BIG), ValueError,
        "path must be .*got dict",
    ),
    "inject: a step number for a flag": (
        lambda: testing.inject(GRADS, jnp.inf, path="['w']", when=2), TypeError, r"when must be a boolean, got 2\. ",
    ),
    "inject: a flag per element": (
        lambda: testing.inject(GRADS, jnp.inf, path="['w']", when=jnp.array([True, False, True])), ValueError,
        r"when must be a scalar, got shape \(3,\)\. ",
    ),
    "inject: many values": (
        lambda: testing.inject(GRADS, jnp.full((2, 3), jnp.inf), path="['w']"), (TypeError, ValueError),
        r"value must be a scalar .*got float32\[2, 3\]\. ",
    ),
    "inject_backward: no such leaf": (
        lambda: testing.inject_backward(GRADS, jnp.inf, path="w"), ValueError,
        r"""path must be that of an inexact leaf with elements, got 'w'\. There are: """,
    ),
    "inject_backward: a step number for a flag": (
        lambda: testing.inject_backward(GRADS, jnp.inf, path="['w']", when=2), TypeError,
        r"when must be a boolean, got 2\. ",
    ),
    "inject: no value": (
        lambda: testing.inject(GRADS, None, path="['w']"), (TypeError, ValueError),
        r"value must be a scalar .*got None\. ",
    ),
    "assert_step_is_noop: a leaf": (
        lambda: testing.assert_step_is_noop({"w": np.zeros(900)}, {"w": np.full(900, 1 / 3)}), AssertionError,
        r"(?s)the step changed state\['w'\]: .* before, .* after.*apply_if",
    ),
    "assert_step_is_noop: the structure": (
        lambda: testing.assert_step_is_noop({"w": 1}, {"v": 1}), AssertionError, r"structure .*: \['v'\] differs",
    ),
    "assert_replicated: a number": (
        lambda: testing.assert_replicated({"w": 1.0}), TypeError, r"tree\['w'\] must be a jax\.Array, got float\. Pass",
    ),
    "assert_replicated: not": (
        _different_shards, AssertionError, r"tree\['w'\] differs between devices: .*give axis_name",
    ),
    "assert_replicated: processes": (
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
        lambda: plots.scale_trajectory(jmpscale.metrics(STATE)), (TypeError, ValueError),
        r"history.*got .*\[\].*np\.stack",
    ),
    "scale_trajectory: something else": (
        lambda: plots.scale_trajectory({"loss_scale": np.ones(3)}), (TypeError, ValueError),
        r"history must .*skipped_in_a_row",
    ),
    "headroom: a list": (
        lambda: plots.headroom([REPORT]), TypeError,
        r"reports must be .*GradReport.*got list\. .*np\.stack",
    ),
    "headroom: one step": (lambda: plots.headroom(REPORT), (TypeError, ValueError), r"reports.*got .*\[2\].*np\.stack"),
    "headroom: limit": (lambda: plots.headroom(REPORTS, limit=-1), ValueError, r"limit must be between .*got -1\. "),
    # python -m jmpscale
    "demo: a failing file system": (_demo_fails, Exception, "^cannot read old.png: No space left on device$"),
    "demo: not a file": (
        lambda: _check_output(pathlib.Path(os.devnull)), Exception, r"cannot write .*null: it exists and is not a file",
    ),
    "demo: the text to learn": (
        lambda: _check_output(HERE, HERE), Exception, r"cannot write .*py: it is the text to learn; name another file",
    ),
    "demo: no file": (lambda: read_text(pathlib.Path(os.devnull)), Exception, r"cannot read .*: it is not a regular"),
    "demo: a short text": (
        lambda: read_text(PACKAGE / "py.typed"), Exception, r"cannot read .*: it must have 4,096 characters.*has 0",
    ),
    "demo: without the extra": (_without_matplotlib, Exception, r'is missing.*pip install "jmpscale\[demo\]"'),
    "demo: options": (_parser_error, SystemExit, r"argument --steps: must be between 1 and 1000000, got 0"),
}  # fmt: skip
if jax.__version_info__ >= (0, 10):  # before, JAX has no type for them inside jit
    ERRORS["gradients that are partial sums"] = (
        _partial_sums, TypeError, r"the leaf at tree\['w'\] is a partial sum over the mesh axes \['d'\].*psum.*reshard",
    )  # fmt: skip


@functools.cache
def _raised(name):
    """What a call raises."""
    try:
        ERRORS[name][0]()
    except (Exception, SystemExit) as error:
        return error
    return None


@pytest.mark.parametrize("name", ERRORS)
def test_a_wrong_argument_is_told_which_what_and_what_to_do(name):
    _, kind, says = ERRORS[name]
    error = _raised(name)
    assert isinstance(error, kind), repr(error)[:1000]
    assert re.search(says, str(error)), str(error)[:1000]
    assert len(str(error)) < 1000, "the message must not drown in the numbers of a model"


def _pattern(node, names):
    """Turns the expression of a message into a regular expression; `names` are strings assigned in its scope."""
    if isinstance(node, ast.Constant):
        # What `.format` will fill in.
        return ".*".join(map(re.escape, re.split(r"\{[^{}]*\}", node.value))) if isinstance(node.value, str) else ".*"
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _pattern(getattr(x, "value", x) if isinstance(x, ast.FormattedValue) else x, names) for x in node.values
        )
    if isinstance(node, ast.BinOp):
        return _pattern(node.left, names) + _pattern(node.right, names)
    if isinstance(node, ast.Name) and node.id in names:
        return _pattern(names[node.id], {})
    return ".*"


def _assigned(body):
    return {
        node.targets[0].id: node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _texts():
    """Yields place and regular expression of every text in the package that is raised, warned, or kept for that."""
    for path in sorted(PACKAGE.glob("*.py")):
        module = ast.parse(path.read_text())
        constants = _assigned(module.body)
        for name, value in constants.items():
            for i, part in enumerate(value.elts if isinstance(value, ast.Tuple) else [value]):
                if " " in (text := _pattern(part, constants)) and name.isupper():
                    yield f"{path.name}, {name} {i}", text
        for function in ast.walk(module):
            if not isinstance(function, ast.FunctionDef):
                continue
            names = constants | _assigned(ast.walk(function))
            for node in ast.walk(function):
                raised = node.exc if isinstance(node, ast.Raise) else node
                called = ast.unparse(raised.func) if isinstance(raised, ast.Call) else ""
                if called and (isinstance(node, ast.Raise) or called in ("warnings.warn", "parser.error")):
                    yield f"{path.name}, line {node.lineno}", _pattern(raised.args[0], names)


def test_every_message_of_the_package_is_in_the_list():
    messages = [str(_raised(name)) for name in ERRORS]
    texts = dict(_texts())
    assert len(texts) > 40
    assert sum("_DIAGNOSES" in place for place in texts) == 5
    assert sum(not text.replace(".*", "") for text in texts.values()) <= 1, (
        "raise_if_stuck's, whose texts are constants"
    )
    missing = [
        f"{place}: {text}"
        for place, text in texts.items()
        if not any(re.search(text, message, re.DOTALL) for message in messages)
        and not ("partial\\ sum" in text and "gradients that are partial sums" not in ERRORS)
    ]
    assert not missing, "a row is missing in ERRORS for\n" + "\n".join(missing)


# --- scalers of other libraries ---

FOREIGN = {
    "jmp": lambda: jmp.DynamicLossScale(jnp.float32(2.0**15)),
    "flax": flax.training.dynamic_scale.DynamicScale,
    "torch": lambda: TORCH,
    "optax": lambda: optax.apply_if_finite(ADAM, 3).init(GRADS),
    "Orbax, no template": lambda: STATE._asdict(),
    "plain tuple": lambda: tuple(STATE),
}
WANTS_A_SCALER = {
    "scale": lambda s: jmpscale.scale(s, LOSS),
    "unscale": lambda s: jmpscale.unscale(s, GRADS),
    "unscale_and_check": lambda s: jmpscale.unscale_and_check(s, GRADS),
    "update": lambda s: jmpscale.update(s, True),
    "value_and_grad": lambda s: jmpscale.value_and_grad(_loss)(s, GRADS),
    "metrics": jmpscale.metrics,
    "raise_if_stuck": lambda s: jmpscale.raise_if_stuck(s, max_skips_in_a_row=1),
    "to_torch_state_dict": jmpscale.to_torch_state_dict,
    "with_loss_scaling": lambda s: jmpscale.with_loss_scaling(ADAM, s),
    "replace_scaler": lambda s: jmpscale.replace_scaler(OPT_STATE, s),
    "grad_report": lambda s: jmpscale.grad_report(GRADS, scaler=s),
    "exponent_histogram": lambda s: plots.exponent_histogram(GRADS, scaler=s),
}


@pytest.mark.parametrize("library", FOREIGN)
def test_a_scaler_of_another_library_is_refused_by_its_name(library):
    foreign = FOREIGN[library]()
    for name, call in WANTS_A_SCALER.items():
        with pytest.raises(TypeError) as error:
            call(foreign)
        assert f"must be a ScalerState, got {type(foreign).__name__}. " in str(error.value), name
    with pytest.raises(ValueError, match="exactly one ScalerState, found 0"):
        jmpscale.get_scaler(foreign)


# --- errors that are JAX's or Python's own, and can be understood ---


def _leaked():
    states = []
    jax.jit(lambda s: states.append(jmpscale.update(s, True)))(STATE)
    return states[0]


def _donated():
    state = jmpscale.dynamic()
    jax.jit(lambda s: jmpscale.update(s, True), donate_argnums=0)(state)
    return state


THEIRS = {
    "a leaked scaler": (lambda: jmpscale.scale(_leaked(), LOSS), jax.errors.UnexpectedTracerError, "side effect"),
    "a leaked scaler, read": (
        lambda: jmpscale.raise_if_stuck(_leaked(), max_skips_in_a_row=1), jax.errors.UnexpectedTracerError,
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
    "a traced picture": (
        lambda: jax.jit(plots.exponent_histogram)(GRADS), jax.errors.TracerArrayConversionError, "traced array",
    ),
    "gradients of another structure": (
        lambda: TX.update({"v": jnp.ones(3)}, OPT_STATE, GRADS), ValueError, "(?s)structure|[Mm]ismatch",
    ),
    "no parameters for weight decay": (
        lambda: (tx := jmpscale.with_loss_scaling(optax.adamw(1.0))).update(GRADS, tx.init(GRADS)), ValueError,
        "params",
    ),
    "no function": (lambda: jmpscale.value_and_grad(_loss(GRADS)), TypeError, "callable"),
    "no scaler at all": (lambda: jmpscale.value_and_grad(_loss)(), TypeError, "missing 1 required .* 'state'"),
    "an option by its place": (lambda: jmpscale.update(STATE, True, LOSS), TypeError, "takes 2 positional arguments"),
    "an option that is none": (lambda: jmpscale.dynamic(growth=2.0), TypeError, "unexpected keyword argument 'growth'"),
    "a setting set": (lambda: setattr(STATE.config, "hysteresis", 2), AttributeError, "assign to field"),
    "a field set": (lambda: setattr(STATE, "loss_scale", 2.0), AttributeError, "set attribute"),
    "settings that differ between branches": (
        lambda: jax.lax.cond(TRUE, lambda: STATE, lambda: jmpscale.dynamic(hysteresis=2)), TypeError, "hysteresis=2",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", THEIRS)
def test_what_jax_and_python_say_best_is_left_to_them(name):
    call, kind, says = THEIRS[name]
    with pytest.raises(kind, match=says):
        call()
