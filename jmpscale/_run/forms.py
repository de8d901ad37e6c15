"""The forms in which a step runs: as it is written, and in float32."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from jmpscale._base.memory import on_device
from jmpscale._programs.compile import compiled_for_many_runs
from jmpscale._programs.in_float32 import run_program_in_float32
from jmpscale._programs.interpret import widen
from jmpscale._run.traced_run import TracedRun

State = list[Any]  # the arrays of the arguments apart from the batch


class Form(NamedTuple):
    """A form of a step."""

    run: Callable[[State, list[Any]], tuple[State, Any]]  # the new state and the loss, given the state and a batch
    as_written: list[str]  # in float32, the operations in half precision that run as written, once the step has run


def form_as_written(traced: TracedRun) -> Form:
    """Returns a step as it is written."""
    program = traced.program

    def evaluate(inputs: list[Any]) -> list[Any]:
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, *inputs)

    return Form(_compiled(traced, evaluate), [])


def form_in_float32(traced: TracedRun) -> Form:
    """Returns a step in float32."""
    as_written: list[str] = []

    def evaluate(inputs: list[Any]) -> list[Any]:
        outputs, as_written[:] = run_program_in_float32(traced.program, inputs)
        return outputs

    return Form(_compiled(traced, evaluate), as_written)


def _compiled(
    traced: TracedRun, evaluate: Callable[[list[Any]], list[Any]]
) -> Callable[[State, list[Any]], tuple[State, Any]]:
    """Compiles a step. The state has its sharding in all steps."""
    places = [x.input for x in traced.leaves]
    loss_output = traced.loss[0] if traced.loss else None

    def step(returned: list[Any], constant: list[Any], batch: list[Any]) -> tuple[list[Any], Any]:
        own = dict(zip(places, returned, strict=True))
        others = iter(constant)
        state = [own[i] if i in own else next(others) for i in range(len(traced.values))]
        outputs = evaluate(traced.inputs(state, batch))
        new = [_strongly_typed(outputs[x.output]) for x in traced.leaves]
        # On several devices, each of them has a loss.
        return new, None if loss_output is None else jnp.mean(jnp.asarray(outputs[loss_output], float))

    shardings = [_sharding(x.value) for x in traced.leaves]
    run = compiled_for_many_runs(step, (shardings, None))

    def run_step(state: State, batch: list[Any]) -> tuple[State, Any]:
        constant = [x for i, x in enumerate(state) if i not in set(places)]
        new, loss = run([state[i] for i in places], constant, batch)
        after = list(state)
        for i, x in zip(places, new, strict=True):
            after[i] = x
        return after, loss

    return run_step


def _sharding(x: jax.Array) -> Any:
    return x.sharding if isinstance(x.sharding, jax.NamedSharding) else None


def _strongly_typed(x: Any) -> jax.Array:
    """Returns an array that is not weakly typed, so that the step is compiled once."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.lax.convert_element_type(x, x.dtype)


def widened(state: State) -> State:
    """Returns a state as the step in float32 takes it."""
    return [on_device(widen(x)) for x in state]
