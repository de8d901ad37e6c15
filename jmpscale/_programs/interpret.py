"""Runs a program with another rule for its operations: the base of each run of a diagnosis and of `check_step`.

Values of fewer bits than float32 are carried in float32. Loops remain loops, and `jax.shard_map` remains one, so the
result can be compiled like the program, and costs no more than its operations.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.compat import as_varying, axes_of_shard_map, in_current_mesh
from jmpscale._base.memory import on_device
from jmpscale._base.types import is_narrow
from jmpscale._programs.jaxpr import (
    ENTERED,
    PROGRAM,
    Caller,
    called_jaxpr,
    closed,
    equations,
    split_scan_inputs,
    split_while_inputs,
    type_of,
)


def widen(x: Any) -> Any:
    """Returns an array in float32 if its dtype is narrower."""
    return x.astype(np.float32) if is_narrow(x) else x


def literal(x: core.Literal) -> Any:
    """Returns the value of a literal, which may be a Python number, in float32 if its dtype is narrower."""
    return widen(np.asarray(x.val, type_of(x).dtype))


def operations(jaxpr: core.Jaxpr, program: Caller = PROGRAM) -> Iterator[tuple[core.JaxprEqn, Caller]]:
    """Yields the equations that an interpreter runs by its rule, in the order of the program."""
    return ((eqn, caller) for eqn, caller in equations(jaxpr, ENTERED, program) if eqn.primitive.name not in ENTERED)


class Interpreter:
    """Runs a program by a rule, which returns the results of an operation; it carries the operands in float32."""

    def __init__(self, rule: "Rule", argument: Any = None, records: Any = None) -> None:
        self._rule = rule
        self.argument = argument  # an array or None, which the rule may read
        self.records = records  # nonnegative arrays by index, the largest of all iterations of a loop; or None

    def record(self, index: int, value: jax.Array) -> None:
        self.records = self.records | {index: jnp.maximum(in_current_mesh(self.records[index]), value)}

    def current_records(self) -> Any:
        """Returns the records in the mesh of the current context, where the last operation may have another one."""
        return jax.tree.map(in_current_mesh, self.records)

    def evaluate(self, program: core.ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Returns the outputs of a program, and the records."""
        return self._traced(self.records, program, inputs, PROGRAM)

    def run_equation(self, eqn: core.JaxprEqn, inputs: list[Any], caller: Caller) -> list[Any]:
        """Returns the results of an equation, in the memory of the device.

        All operations that this adds have the context of the equation, such as its mesh.
        """
        with eqn.ctx.manager:
            pairs = zip(map(on_device, inputs), eqn.invars, strict=True)
            operands = [x if _is_in_other_mesh(operand) else in_current_mesh(x) for x, operand in pairs]
            return list(map(on_device, self._run_entered(eqn, operands, caller)))

    def _run_entered(self, eqn: core.JaxprEqn, inputs: list[Any], caller: Caller) -> list[Any]:
        name = eqn.primitive.name
        if name not in ENTERED:
            return self._rule(self, eqn, inputs, caller)
        special = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        return special.get(name, self._call)(eqn, inputs, caller.inside(eqn))

    def _traced(
        self, records: Any, program: core.ClosedJaxpr, inputs: Sequence[Any], caller: Caller
    ) -> tuple[list[Any], Any]:
        """Runs a part of the program in a trace of its own, whose records are values of that trace."""
        outer, self.records = self.records, records
        outputs = self._run(program, inputs, caller)
        records, self.records = self.current_records(), outer
        return outputs, records

    def _run(self, program: core.ClosedJaxpr, inputs: Sequence[Any], caller: Caller) -> list[Any]:
        jaxpr = program.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(widen, program.consts), strict=True))
        values.update(zip(jaxpr.invars, map(widen, inputs), strict=True))

        def read(x: Any) -> Any:
            return literal(x) if isinstance(x, core.Literal) else values[x]

        for eqn in jaxpr.eqns:
            values.update(zip(eqn.outvars, self.run_equation(eqn, [read(x) for x in eqn.invars], caller), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _call(self, eqn: core.JaxprEqn, inputs: list[Any], inside: Caller) -> list[Any]:
        return self._run(called_jaxpr(eqn), inputs, inside)

    def _scan(self, eqn: core.JaxprEqn, inputs: list[Any], inside: Caller) -> list[Any]:
        consts, carry, xs = split_scan_inputs(eqn, inputs)
        body, length, reverse = (eqn.params[name] for name in ("jaxpr", "length", "reverse"))

        def step(state: tuple[list[Any], Any], x: list[Any]) -> tuple[tuple[list[Any], Any], list[Any]]:
            carry, records = state
            outputs, records = self._traced(records, body, [*consts, *carry, *x], inside)
            return (_with_types_of(outputs[: len(carry)], carry), records), outputs[len(carry) :]

        state = (carry, self.current_records())
        (carry, self.records), ys = jax.lax.scan(step, state, xs, length=length, reverse=reverse)
        return [*carry, *ys]

    def _while(self, eqn: core.JaxprEqn, inputs: list[Any], inside: Caller) -> list[Any]:
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        cond_consts, body_consts, first = split_while_inputs(eqn, inputs)

        def test(state: tuple[list[Any], Any]) -> Any:
            # A condition of `jax.vmap` holds for some of the examples. The loop ends when it holds for none.
            return going_on(*state)[0].any()

        def going_on(carry: list[Any], records: Any) -> tuple[Any, Any]:
            (found,), records = self._traced(records, cond, [*cond_consts, *carry], inside)
            return found, records

        def step(state: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
            carry, records = state
            active, records = going_on(carry, records)  # records of `test` cannot leave it
            outputs, records = self._traced(records, body, [*body_consts, *carry], inside)
            outputs = _with_types_of(outputs, carry)
            if active.ndim:  # an example that has ended keeps its values
                outputs = [_where(active, x, y) for x, y in zip(outputs, carry, strict=True)]
            return outputs, records

        carry, records = jax.lax.while_loop(test, step, (first, self.current_records()))
        self.records = going_on(carry, records)[1]
        return carry

    def _cond(self, eqn: core.JaxprEqn, inputs: list[Any], inside: Caller) -> list[Any]:
        def branch(program: core.ClosedJaxpr) -> Callable[..., tuple[list[Any], Any]]:
            def run(records: Any, *operands: Any) -> tuple[list[Any], Any]:
                outputs, records = self._traced(records, program, operands, inside)
                return _with_types_of(outputs, outputs), records

            return run

        index, *operands = inputs
        branches = list(map(branch, eqn.params["branches"]))
        outputs, self.records = jax.lax.switch(index, branches, self.current_records(), *operands)
        return outputs

    def _shard_map(self, eqn: core.JaxprEqn, inputs: list[Any], inside: Caller) -> list[Any]:
        params = eqn.params
        axes = axes_of_shard_map(eqn)

        def body(records: Any, *args: Any) -> tuple[list[Any], Any]:
            records = jax.tree.map(lambda x: as_varying(x, axes) if params["check_vma"] else x, records)
            outputs, records = self._traced(records, closed(params["jaxpr"]), args, inside)
            return outputs, jax.lax.pmax(records, axes)

        outputs, self.records = jax.shard_map(
            body,
            mesh=params["mesh"],
            axis_names=set(axes),
            check_vma=params["check_vma"],
            in_specs=(jax.P(), *params["in_specs"]),
            out_specs=(list(params["out_specs"]), jax.P()),
        )(self.current_records(), *inputs)
        return outputs


Rule = Callable[[Interpreter, core.JaxprEqn, list[Any], Caller], list[Any]]


def _is_in_other_mesh(x: Any) -> bool:
    """Tests whether a variable of the program is in another mesh than the current one, which its equation changes.

    The array that stands for any other variable may be in another mesh, too: one that the program closes over gets the
    mesh in which it is widened, and JAX gives some results of compiled functions the mesh of the call.
    """
    sharding = getattr(type_of(x), "sharding", None)
    return sharding is not None and not sharding.mesh.empty and sharding.mesh != jax.sharding.get_abstract_mesh()


def _with_types_of(outputs: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Returns arrays in the dtypes of others, and without weak types."""
    pairs = zip(outputs, like, strict=True)
    return [jax.lax.convert_element_type(x, y.dtype) if jnp.issubdtype(y.dtype, np.floating) else x for x, y in pairs]


def _where(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Selects between arrays by a condition about their leading axes."""
    return jnp.where(jnp.expand_dims(condition, range(condition.ndim, x.ndim)), x, y)
