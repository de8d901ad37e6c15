"""Calls that type checkers must accept. Nothing runs this file."""

import jax
import jax.numpy as jnp
import optax

import jmpscale

state: jmpscale.ScalerState = jmpscale.dynamic(2.0**15, growth_interval=1000, hysteresis_reset="finite")
loss: jax.Array = jmpscale.scale(state, jnp.ones(()))
grads, finite = jmpscale.unscale_and_check(state, {"w": jnp.ones(2)}, axis_name=("data", "model"))
w: jax.Array = grads["w"]
flag: jax.Array = finite & jmpscale.all_finite(grads, axis_name="data")
state = jmpscale.update(state, flag, loss=loss)
state = jmpscale.update(state, True)
one: jax.Array = jmpscale.apply_if(finite, lambda x: x + 1, w)


def swap(x: jax.Array, n: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    return x, n


first, second = jmpscale.apply_if(finite, swap, w, grads)
check: dict[str, jax.Array] = second
first, second = jmpscale.autocast(swap)(w, grads)
first, second = jmpscale.autocast(swap, dtype="bfloat16")(x=w, n=grads)
value, gradient = jmpscale.value_and_grad(jmpscale.autocast(swap, dtype=jnp.bfloat16))(state, w, grads)
value, gradient = jmpscale.value_and_grad(swap, argnums=(0, 1), has_aux=True)(state, w, grads)
tx: jmpscale.LossScalingTransformation = jmpscale.with_loss_scaling(
    optax.adam(1e-3), state, max_norm=1.0, axis_name="data", norm_axis_name=("model",)
)
accumulating: optax.GradientTransformationExtraArgs = jmpscale.with_loss_scaling(
    optax.MultiSteps(optax.adam(1e-3), 4), warn_after_skips=20
)
opt_state = tx.init(w)
loss = jmpscale.scale(opt_state, jnp.ones(()))
grads, finite = jmpscale.unscale_and_check(opt_state, jmpscale.unscale(opt_state, grads))
step = jmpscale.optax_step(optax.MultiSteps(optax.adam(1e-3), 4), grads)
value, gradient = jmpscale.value_and_grad(swap, has_aux=True, transform=jax.value_and_grad)(opt_state, w, grads)


@jmpscale.value_and_grad(has_aux=True)
def decorated(x: jax.Array) -> tuple[jax.Array, int]:
    return x.sum(), 1


total, gradient = decorated(opt_state, w)
one, opt_state = jmpscale.apply_if(finite, jmpscale.optax_step(tx, grads, value=loss), w, opt_state)
half: dict[str, jax.Array] = jmpscale.cast(grads, jnp.float16)
applied: jax.Array = state.step_applied
overflow: bool = jmpscale.SkipReason(int(state.last_skip_reason)) is jmpscale.SkipReason.GRADIENTS
norm: jax.Array | None = jmpscale.WithLossScalingState(state, opt_state, None).grad_norm
scaler: jmpscale.ScalerState = jmpscale.get_scaler(opt_state)
logged: dict[str, jax.Array] = jmpscale.metrics(opt_state)
report: jmpscale.GradReport = jmpscale.grad_report(grads, scaler=scaler)
diagnosis: jmpscale.Diagnosis = jmpscale.diagnose(jmpscale.autocast(swap), (0, 1), True)(opt_state, w, n=grads)
diagnosis = jmpscale.diagnose(swap, has_aux=True, transform=jax.value_and_grad, accepted_error=0.1)(scaler, w, grads)
limits: tuple[float, float] | None = diagnosis.fitting_scales
critical: list[str] = [row.line for row in diagnosis.rows if row.overflow > 0 and row.in_lines]
text: str = diagnosis.describe(limit=5) + diagnosis.rows[0].dtype
run: jmpscale.RunDiagnosis = jmpscale.diagnose_run(swap, [grads, grads])(w)
found: list[tuple[str, ...]] = [x.names for x in run.findings if x.kind is jmpscale.FindingKind.LAGGING]
share: float | None = run.progress if run.diagnosis is None else run.changes[0].progress
first, second = jmpscale.in_float32(swap)(w, n=grads)
monitor: jmpscale.RunMonitor = jmpscale.RunMonitor(max_consecutive_skips=3)
monitor.raise_if_stuck(opt_state)
restored: jmpscale.ScalerState = jmpscale.from_torch_state_dict(jmpscale.to_torch_state_dict(scaler), min_scale=1.0)
