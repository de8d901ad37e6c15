"""A program whose operations have modes.

With all operations as written it is the program; with all of them in float32 it is the reference. So a search over the
modes finds the lines that must compute in float32 by changing them.
"""

import collections
import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._base.memory import on_device
from jmpscale._diagnosis.run.blocks import Block, BlockProgram
from jmpscale._diagnosis.run.modes import Execution, Modal, Mode, Modes, Part, Site
from jmpscale._diagnosis.run.scaler_group import LossScales, ScalerGroup
from jmpscale._diagnosis.trace.operations import Operation, Path, autocast_lines
from jmpscale._diagnosis.trace.passes import Pass
from jmpscale._diagnosis.trace.program import Program
from jmpscale._programs.compile import compiled, has_long_loop
from jmpscale._programs.float32 import run_as_written, run_in_float32
from jmpscale._programs.interpret import Interpreter, literal, widen
from jmpscale._programs.jaxpr import Caller, Key
from jmpscale._programs.scopes import is_in_inner_gradient

_MANY = 200  # After so many calls, a function is compiled again, and optimized: see `benchmarks.diagnosis`.


class ModalProgram:
    """A program whose operations have modes. Its sites, parts and paths are in the order of the program."""

    def __init__(self, program: Program, measured: int, everything: Sequence[Operation], modal: Modal) -> None:
        """Creates a form of a program, whose first outputs are `measured`.

        `everything` is its operations, of which `modal` says what their modes do.
        """
        # An argument may occur twice.
        arrays = {id(x): on_device(widen(jnp.asarray(x))) for x in program.consts}
        self.consts = [arrays[id(x)] for x in program.consts]
        self.outputs = slice(None)  # those that a run returns
        self.at: Callable[[LossScales], LossScales] = _unchanged
        self._measured = measured
        with_mode = [(x, dtype) for x in everything if (dtype := modal.dtype(x)) is not None]
        shortest = _shortest({path for x, _ in with_mode for path in x.paths})
        sites = {
            x.key: dict.fromkeys(Site(Part(shortest[path], x.pass_), x.eqn.primitive.name, dtype) for path in x.paths)
            for x, dtype in with_mode
        }
        self.sites = list(dict.fromkeys(site for group in sites.values() for site in group))
        self.in_inner_gradients = {site for x, _ in with_mode if is_in_inner_gradient(x.eqn) for site in sites[x.key]}
        self.autocast_paths = {shortest[path] for path in autocast_lines(everything) if path in shortest}
        self.parts = list(dict.fromkeys(site.part for site in self.sites))
        # A line whose forward pass has no such result, such as an index, is also in the order of the forward pass.
        self.paths = list(dict.fromkeys(shortest[path] for x in everything for path in x.paths if path in shortest))
        # The operations that reach the outputs and run as written, whatever the modes are; known after the first run.
        self.not_entered: dict[Operation, None] = {}
        self._program = BlockProgram(program.jaxpr)
        found = _number_in_sites({x.key: x for x in everything}, sites)
        self._blocks = self._compile(found, modal)
        # The operations of each site, as numbers of their blocks and of their places in them.
        self._places: dict[Site, list[tuple[int, int]]] = collections.defaultdict(list)
        for i, block in enumerate(self._blocks):
            for j, x in enumerate(block.operations):
                for site in x.sites:
                    self._places[site].append((i, j))
        self._read_inputs = self._program.read_inputs(len(self.consts))
        self.names = program.names

    def cast_inputs(self, site: Site) -> list[int]:
        """Returns the inputs that the operations of a site cast; an empty list if one of them does something else."""
        inputs = [self._read_inputs.get(x.key) for x in self._operations(site)]
        are_casts = site.operation == "convert_element_type" and None not in inputs
        return [i for i in inputs if i is not None] if are_casts else []

    def keys(self, site: Site) -> list[Key]:
        """Returns what identifies the operations of a site, in the order of their modes."""
        return [x.key for x in self._operations(site)]

    def is_recomputed(self, site: Site) -> bool:
        """Tests whether the operations of a site compute values of the forward pass again in the backward pass."""
        return all(x.backward and not x.is_transposed for x in self._operations(site))

    def _operations(self, site: Site) -> list[Operation]:
        return [self._blocks[i].operations[j].operation for i, j in self._places[site]]

    def of_gradients(self, group: ScalerGroup | None = None) -> "ModalProgram":
        """Returns a view of the program that returns the loss and the gradients, without operations of the update.

        Of a step with several scalers, the loss scale of a run is the one of `group`.
        """
        view = copy.copy(self)
        view.at = group.at if group else _unchanged
        view.sites = [site for site in self.sites if site.part.pass_ is not Pass.UPDATE]
        view.parts = list(dict.fromkeys(site.part for site in view.sites))
        used = {part.path for part in view.parts}
        view.paths = [path for path in self.paths if path in used]
        view.outputs = slice(self._measured)
        return view

    def _compile(self, found: Mapping[Key, "_ModalOperation"], modal: Modal) -> list["_ModalBlock"]:
        """Returns the blocks, of which equal ones share a compiled function."""
        functions: dict[Hashable, _BlockFunction] = {}
        blocks = []
        for block in self._program.blocks:
            occurrences = [caller.key_of(eqn) for eqn, caller in block.operations()]
            index = {key: i for i, key in enumerate(dict.fromkeys(occurrences))}
            operations = [found[key] for key in index]
            kinds = tuple((bool(x.sites), x.operation.as_written, *x.operation.dtypes) for x in operations)
            key = block.key(), tuple(map(index.get, occurrences)), kinds
            if key not in functions:
                functions[key] = _BlockFunction(block, operations, index, modal)
            blocks.append(_ModalBlock(block, operations, functions[key]))
        return blocks

    def run(
        self, scale: LossScales, modes: Modes, default: Mode, consts: list[Any] | None = None
    ) -> tuple[list[Any], dict[Site, Any]]:
        """Returns the loss and the gradients, and what was recorded for each site.

        `modes` are the modes of some sites, `default` is the mode of all others, and `consts` replaces `self.consts`.
        """
        program = self._program
        inputs = [*(self.consts if consts is None else consts), np.asarray(self.at(scale), np.float32)]
        values = dict(zip(program.inputs, inputs, strict=True))
        values |= {i: widen(jnp.asarray(x)) for i, x in program.constants.items()}
        records = []
        for (block, operations, function), array in zip(self._blocks, self._modes(modes, default), strict=True):
            outputs, recorded = function.run([values[i] for i in block.inputs], array)
            values.update(zip(block.outputs, outputs, strict=True))
            for i in block.last_read:  # frees memory
                del values[i]
            records.append(recorded)
            self.not_entered |= {operations[i].operation: None for i in function.not_entered}
        wanted = program.outputs[self.outputs]
        outputs = [literal(x) if isinstance(x, core.Literal) else values[x] for x in wanted]
        return outputs, self._largest(jax.device_get(records))

    def _modes(self, modes: Modes, default: Mode) -> list[np.ndarray]:
        """Returns the modes of the operations of each block."""
        arrays = [np.full(len(block.operations), default, np.int32) for block in self._blocks]
        for i, j in {place for site in modes for place in self._places[site]}:
            arrays[i][j] = self._blocks[i].operations[j].mode(modes, default)
        return arrays

    def _largest(self, records: list[dict[int, np.ndarray]]) -> dict[Site, Any]:
        """Returns for each site the largest numbers that were recorded for its operations."""
        largest: dict[Site, np.ndarray] = {}
        for block, recorded in zip(self._blocks, records, strict=True):
            for i, numbers in recorded.items():
                for site in block.operations[i].sites:
                    largest[site] = np.maximum(largest.get(site, 0), numbers)
        return {site: largest[site].tolist() for site in self.sites if site in largest}


def _unchanged(scale: LossScales) -> LossScales:
    return scale


class _ModalOperation(NamedTuple):
    """An operation, with its sites, and its number among their operations; no sites if it has no mode."""

    operation: Operation
    sites: dict[Site, int]

    def mode(self, modes: Modes, default: Mode) -> int:
        """Returns the largest mode of its sites."""
        found = [(modes.get(site, default), number) for site, number in self.sites.items()]
        return max(x[number] if isinstance(x, tuple) else x for x, number in found)


def _number_in_sites(
    operations: Mapping[Key, Operation], sites: Mapping[Key, Iterable[Site]]
) -> dict[Key, _ModalOperation]:
    """Numbers the operations of each site, in the order of the program."""
    seen: collections.Counter[Site] = collections.Counter()
    found = {}
    for key, x in operations.items():
        found[key] = _ModalOperation(x, {site: seen[site] for site in sites.get(key, ())})
        seen.update(found[key].sites.keys())
    return found


class _ModalBlock(NamedTuple):
    """A block, the operations in it, and the function that runs it, and blocks that are equal to it."""

    block: Block
    operations: list[_ModalOperation]
    function: "_BlockFunction"


class _BlockFunction:
    """A compiled function of the inputs of a block, and of an array with the modes of its operations."""

    def __init__(
        self, block: Block, operations: Sequence[_ModalOperation], index: Mapping[Key, int], modal: Modal
    ) -> None:
        """`index` has the position of each operation in `operations` and in the array of modes."""
        self.not_entered: dict[int, None] = {}  # the operations that run as written; known after the first run

        def rule(interpreter: Interpreter, eqn: core.JaxprEqn, inputs: list[Any], caller: Caller) -> list[Any]:
            i = index[caller.key_of(eqn)]
            operation, sites = operations[i]
            if operation.as_written:
                return run_as_written(eqn, inputs)
            outputs = run_in_float32(eqn, inputs)
            if outputs is None:
                outputs = run_as_written(eqn, inputs)
                self.not_entered |= {i: None}
            return modal.run(Execution(interpreter, i), operation, inputs, outputs) if sites else outputs

        def run(inputs: list[Any], modes: jax.Array) -> tuple[list[Any], dict[int, jax.Array]]:
            recorded = [i for i, x in enumerate(operations) if x.sites and modal.columns and modal.records(x.operation)]
            interpreter = Interpreter(rule, modes, {i: jnp.zeros(modal.columns, np.float32) for i in recorded})
            values: dict[int, Any] = dict(zip(block.inputs, inputs, strict=True))
            for eqn, caller, operands, results in block.equations:
                read = [literal(x) if isinstance(x, core.Literal) else values[x] for x in operands]
                values.update(zip(results, interpreter.run_equation(eqn, read, caller), strict=True))
            return [values[i] for i in block.outputs], interpreter.current_records()

        self._run, self._calls = run, 0
        self._is_optimized = has_long_loop(eqn for eqn, *_ in block.equations)
        self._compiled = compiled(run, optimize=self._is_optimized)

    def run(self, inputs: list[Any], modes: np.ndarray) -> tuple[list[Any], dict[int, jax.Array]]:
        """Returns the outputs of the block, and what it records of its operations."""
        self._calls += 1
        if self._calls >= _MANY and not self._is_optimized:
            self._compiled, self._is_optimized = compiled(self._run, optimize=True), True
        return self._compiled(inputs, modes)


def _shortest(paths: Collection[Path]) -> dict[Path, Path]:
    """Returns for each path the shortest end of it that is a path, too.

    In the forward pass, JAX forgets the callers of a function with `jax.checkpoint`; in the backward pass it does not.
    """
    return {path: next(end for end in (path[-n:] for n in range(1, len(path) + 1)) if end in paths) for path in paths}
