"""`diagnose_run`, which runs a training step beside the same step in float32."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from jmpscale._base.text import describe
from jmpscale._base.tree import PyTree
from jmpscale._diagnosis.arguments import check_arguments
from jmpscale._diagnosis.diagnose_step import diagnose_step
from jmpscale._diagnosis.tell.report import Diagnosis
from jmpscale._run.progress import with_progress_bar
from jmpscale._run.report import RunChange, RunDiagnosis
from jmpscale._run.run import Measured, run_beside_float32
from jmpscale._run.text import summarize
from jmpscale._run.verdict import find_wrong, measure_losses


def diagnose_run(step: Callable[..., Any], batches: Iterable[PyTree]) -> Callable[..., RunDiagnosis]:
    """Creates a function that measures what half precision does to a training run, beside the same run in float32.

    It calls `step(*state, batch)` for each batch, and passes what the step returns as its state to the next call. Three
    runs take each step in turn, on the same batch and the same random numbers: the step as written, the same program in
    float32 from the same state, and the program in float32 from a state that is rounded otherwise, whose arrays differ
    by up to half of a last place of bfloat16. The difference of the two runs in float32 is chance.

    It says how much of float32's progress the loss makes, and which leaves of the state do not get as far: parameters,
    averages and counters. Leaves that hold what rounding removes, as in Kahan summation, averages that are noise in
    float32, too, and losses near a minimum are not accused, and neither is a chaotic run. If something is wrong,
    `diagnose_step` diagnoses the step whose changes differ most from the changes that it makes in float32 from the same
    state. So a run finds what one step does not show, such as an update that begins from a copy in half precision, or
    an optimizer that updates in every fourth step, and shows whether a rounding that one step shows matters.

    The state is what the step returns with the structure and the types of an argument, and the Flax NNX objects among
    the arguments, as for `diagnose_step`; `RunDiagnosis.state` names it, and the summary names arguments that do not
    come back. Each run has a scaler of its own. A step that is skipped is counted, and not compared. What is in half
    precision before the run, such as tables in the batch, keeps its values, and so do constants of the step: a decay of
    0.999 is 1 in bfloat16, in all runs. Random numbers that are drawn in half precision are the same in all runs, and
    bits that the step rounds by itself are rounded in all runs; `jax.lax.reduce_precision` rounds nothing in float32.

    The step is traced once, compiled twice, and run four times for each batch, where its arguments are: on one device,
    on a mesh, or by `jax.pmap`. Batches of another shape are compiled again. The memory holds three states as
    written and five in float32, beside the step. On a terminal, a long run has a progress bar if tqdm is installed.

    Args:
      step: the training step, compiled or not, of any framework, which takes the batch as its last argument. Python
        must not read the values of arrays in it.
      batches: a finite iterable, such as a list or a generator, with the batch of each step, any pytree. Each batch is
        used once. For a run on one batch, pass `[batch] * 200`.

    Returns:
      `f(*state) -> RunDiagnosis`, with the arguments of the step without the batch. Neither they nor Flax NNX objects
      among them are changed.

    Raises:
      TypeError: `step` is not callable, does not take `(*state, batch)`, or returns none of its state; `batches` is not
        iterable; an argument is abstract or traced; an argument, or a value that `step` closes over, is a `jax.Ref`; or
        `step` creates one, or reads values by `jax.experimental.io_callback`.
      ValueError: `batches` is empty, or its batches differ in structure; or an argument was donated to a compiled
        function.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> @jax.jit
    ... def train_step(w, x):
    ...     half = w.astype(jnp.bfloat16)
    ...     loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w.astype(jnp.float32) - 1) ** 2))(half)
    ...     return half.astype(jnp.float32) - 1e-4 * grads.astype(jnp.float32), loss
    >>> w, x = jnp.ones(4), jnp.eye(4) + 1
    >>> run = jmpscale.diagnose_run(train_step, [x] * 100)(w)
    >>> [(finding.kind.name, finding.names) for finding in run.findings]
    [('LOST_PROGRESS', ('result[1]',)), ('LAGGING', ('w',))]
    """
    if not callable(step):
        raise TypeError(f"step must be the training step, got {describe(step)}. Call diagnose_run(step, batches).")
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be an iterable with a batch for each step, got {describe(batches)}. Pass [batch] * 200 for "
            "a run on one batch."
        )

    def diagnose_run_of(*state: Any) -> RunDiagnosis:
        check_arguments({f"state[{i}]": tree for i, tree in enumerate(state)}, "diagnose_run")
        # Non-finite values are results of a run, for which JAX must not raise, and compiled functions are entered.
        with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
            measured = run_beside_float32(step, state, with_progress_bar(batches))
        return _report(measured)

    diagnose_run_of.__name__ = f"diagnose_run_of_{getattr(step, '__name__', 'step')}"
    return diagnose_run_of


def _report(measured: Measured) -> RunDiagnosis:
    losses = measure_losses(measured)
    findings = find_wrong(measured, losses)
    diagnosis = _diagnose_worst(measured) if findings else None
    loss, loss_float32, loss_spread = measured.losses if measured.traced.loss else (None, None, None)
    return RunDiagnosis(
        loss=loss,
        loss_float32=loss_float32,
        loss_spread=loss_spread,
        loss_name=measured.traced.loss[1] if measured.traced.loss else None,
        progress=losses.progress if losses else None,
        changes=tuple(
            RunChange(x.leaf.name, str(x.leaf.value.dtype), x.written.error, x.written.progress, x.spread.error)
            for x in measured.leaves
        ),
        skips=measured.skips[0],
        skips_float32=measured.skips[1],
        state=tuple(measured.traced.names),
        findings=findings,
        worst_step=measured.worst.step if measured.worst else None,
        diagnosis=diagnosis,
        as_written=tuple(measured.as_written),
        summary=summarize(measured, losses, findings, diagnosis.summary if diagnosis else None),
    )


def _diagnose_worst(measured: Measured) -> Diagnosis | None:
    if measured.worst is None:
        return None
    step, args, kwargs = measured.worst.arguments
    return diagnose_step(step)(*args, **kwargs)
