"""A non-finite value in any leaf, on any device, at any step: the run is that without this step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale.testing import assert_replicated, assert_step_is_noop, inject

from cases import some_of_all

DEVICES, STEPS = 8, 5
VALUES = [np.inf, -np.inf, np.nan]

# Each device holds a shard of every leaf, so that a fault can be injected into a leaf on one device alone.
RNG = np.random.default_rng(0)
PARAMS = {
    "dense": [RNG.standard_normal((16, 4)).astype(np.float32), RNG.standard_normal((8, 4)).astype(np.float32)],
    "bias": np.zeros(8, np.float32),
}
PATHS = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(PARAMS)]
BATCHES = RNG.standard_normal((STEPS, DEVICES, 2, 16)).astype(np.float32)
SGD = optax.sgd(0.1, momentum=0.9)


def _loss(params, x, whole):
    h = jnp.tanh(x @ whole(params["dense"][0])) @ whole(params["dense"][1]).T
    # In float32, where the gradients have the same bits at another power of two as the scale.
    return jnp.mean((h + jnp.broadcast_to(whole(params["bias"]), h.shape)) ** 2)


def _inject(grads, number, device, fault):
    for leaf, path in enumerate(PATHS):
        when = (fault["leaf"] == leaf) & (fault["step"] == number) & (fault["device"] == device)
        grads = inject(grads, fault["value"], path=path, when=when)
    return grads


def _grads(scaler, params, number, x, device, whole, fault):
    _, grads = jmpscale.value_and_grad(_loss)(scaler, params, x, whole)
    return _inject(grads, number, device, fault)


def _functional(carry, *step):
    params, opt_state, scaler = carry
    grads = _grads(scaler, params, *step)
    finite = jmpscale.all_finite(grads)
    params, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(SGD, grads), params, opt_state)
    return params, opt_state, jmpscale.update(scaler, finite)


def _wrapped(carry, *step):
    params, inner_state, scaler = carry
    tx = jmpscale.with_loss_scaling(SGD, scaler)
    opt_state = jmpscale.LossScalingState(scaler, inner_state, None)
    updates, opt_state = tx.update(_grads(opt_state, params, *step), opt_state, params)
    return optax.apply_updates(params, updates), opt_state.inner_state, opt_state.scaler


APIS = {"functional API": _functional, "optax wrapper": _wrapped}


def _specs(tree, *leading):
    return jax.tree.map(lambda x: P(*leading, "d") if jnp.ndim(x) else P(*leading), tree)


@functools.cache
def _run(step_fn, sharded):
    """Returns `run(steps, ...) -> history`, the training states after the steps; a device holds its own shards."""

    def local(carry, numbers, batches, fault):
        device, whole = 0, lambda w: w
        if sharded:
            device, whole = jax.lax.axis_index("d"), lambda w: jax.lax.all_gather(w, "d", tiled=True)

        def step(carry, this):
            number, x = this
            carry = step_fn(carry, number, x.reshape(-1, 16), device, whole, fault)
            return carry, carry

        return jax.lax.scan(step, carry, (numbers, batches))[1]

    start = PARAMS, SGD.init(PARAMS), jmpscale.dynamic(2.0**10)
    if sharded:
        mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))
        specs = (_specs(start), P(), P(None, "d"), P())
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=_specs(start, None))
    program = jax.jit(local)

    def run(steps, leaf=-1, step=-1, device=-1, value=0.0):
        fault = {"leaf": leaf, "step": step, "device": device, "value": jnp.float32(value)}
        return jax.block_until_ready(program(start, jnp.array(steps), BATCHES[np.array(steps)], fault))

    return run


@pytest.mark.once
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("api", "where"),
    some_of_all(APIS, ["jit", "shard_map"], default=[("optax wrapper", "jit")]),
)
def test_a_fault_at_any_leaf_device_and_step_gives_the_run_without_that_step(api, where):
    sharded = where == "shard_map"
    run = _run(APIS[api], sharded)
    everything = list(range(STEPS))
    for step in everything:
        without = jax.device_get(run([number for number in everything if number != step]))
        for device in range(DEVICES if sharded else 1):
            for leaf in range(len(PATHS)):
                value = VALUES[(step + device + leaf) % 3]
                history = run(everything, leaf, step, device, value)
                *trained, scaler = history
                if device == leaf:
                    assert_replicated(scaler)
                *trained, scaler = jax.device_get(history)
                kept = jax.tree.map(lambda x, at=step: np.delete(x, at, axis=0), trained)
                assert_step_is_noop(list(without[:2]), kept)
                if step:
                    before, after = (jax.tree.map(lambda x, at=at: x[at], trained) for at in (step - 1, step))
                    assert_step_is_noop(before, after)
                assert scaler.skipped.tolist() == [int(number >= step) for number in everything]
                assert scaler.last_skip[-1] == jmpscale.SkipReason.GRADIENTS
                assert scaler.loss_scale.tolist() == [2.0**9 if number >= step else 2.0**10 for number in everything]
