"""Calls that type checkers must refuse, one in each line that begins with `jmpscale.`. Nothing runs this file."""

import jax.numpy as jnp

import jmpscale

state = jmpscale.dynamic()
tree = {"w": jnp.ones(2)}

jmpscale.dynamic(growth_interval=0.5)
jmpscale.dynamic(hysteresis_reset="never")
jmpscale.dynamic(1.0, 2.0)
jmpscale.static()
jmpscale.disabled(1.0)
jmpscale.scale(tree, state)
jmpscale.unscale(tree)
jmpscale.unscale_and_check(state, tree, "data")
jmpscale.update(tree, True)
jmpscale.update(state)
jmpscale.update(state, True, 1.0)
jmpscale.all_finite(tree, "data")
jmpscale.value_and_grad(1.0)
jmpscale.value_and_grad(jnp.sum, 0, False, jnp.sum)
jmpscale.value_and_grad(jnp.sum, axis_name="data")
jmpscale.value_and_grad(transform=1.0)
jmpscale.autocast(1.0)
jmpscale.autocast(jnp.sum, 1.0)
jmpscale.autocast(len)(1.0, 2.0)
jmpscale.apply_if(True, 1.0, tree)
jmpscale.apply_if(True, lambda x, y: (x, y), tree)
jmpscale.with_loss_scaling()
jmpscale.with_loss_scaling(1.0, None, 1.0)
jmpscale.optax_step(tree)
jmpscale.cast(tree)
jmpscale.replace_scaler(tree, tree)
jmpscale.grad_report(tree, state)
jmpscale.raise_if_stuck(state)
jmpscale.raise_if_stuck(state, 3)
jmpscale.to_torch_state_dict(tree)
jmpscale.from_torch_state_dict(state, 1.0)
jmpscale.ScalerConfig("dynamic")
jmpscale.WithLossScalingState(state, tree)
jmpscale.update(state, {})
