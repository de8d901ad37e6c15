"""Reads optimized programs: the instructions that run, their copies and collectives."""

import math
import re
from typing import NamedTuple

COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
# Instructions that only name an existing value, and suffixes of instructions that only wait for a started operation.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
WAITS = ("-done", "-update")
FLOW = ("conditional", "while", "call")
LARGE = 2**14  # bytes: smaller copies are not copies of parameters or moments
FEW = 256  # elements: a smaller all-reduce combines norms or flags, not gradients
BITS = {"pred": 8, "token": 0, "opaque": 0}  # of the element types whose names do not contain it


class Instruction(NamedTuple):
    """One line of a program. Types are text, such as `f32[8,128]{1,0}` or a tuple of such in parentheses."""

    name: str
    type: str
    operation: str
    operands: tuple[str, ...]
    calls: tuple[str, ...]  # the computations that it runs or applies
    is_root: bool
    iterations: int | None  # of a loop, if known
    target: str  # of a call to a library, such as __cublas$gemm
    number: int | None  # of a parameter


class Program(NamedTuple):
    """An optimized program: its computations by name."""

    entry: str
    computations: dict[str, list[Instruction]]


def parse(text):
    """Parses the text of a compiled function."""
    text, entry, computations, found = re.sub(r"/\*.*?\*/", "", text), None, {}, []
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .* )?{", line):
            found = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif instruction := re.match(r"\s*(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\(", line):
            root, name, kind, operation = instruction.groups()
            operands, rest = _until_closed(line[instruction.end() :])
            called = re.findall(r"(?:calls|to_apply|body|condition|\w+_computations?)=({[^}]*}|%?[\w.-]+)", rest)
            calls = tuple(re.findall(r"[\w.-]+", " ".join(called)))
            named = tuple(re.findall(r"%([\w.-]+)", operands))
            iterations = re.search(r'"known_trip_count":{"n":"(\d+)"', rest)
            target = re.search(r'custom_call_target="([^"]*)"', rest)
            found.append(
                Instruction(
                    *(name, kind, operation, named, calls, bool(root)),
                    iterations=int(iterations[1]) if iterations else None,
                    target=target[1] if target else "",
                    number=int(operands) if operation == "parameter" else None,
                )
            )
    return Program(entry, computations)


def _until_closed(text):
    """Splits the text after an opening parenthesis at the closing one."""
    depth = 1
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if not depth:
            return text[:place], text[place:]
    return text, ""


def bytes_of(kind):
    """Returns the number of bytes of a value by its type; a tuple is the sum of its parts."""
    parts = re.findall(r"([a-z]\w*)\[([\d,]*)\]", kind)
    return sum(_bits(name) * math.prod(int(n) for n in shape.split(",") if n) for name, shape in parts) // 8


def _bits(name):
    return BITS.get(name) if name in BITS else int(re.search(r"\d+", name)[0])


def running(program, computation=None):
    """Yields the instructions that run, in the entry, in branches, in loops and in called computations."""
    for instruction in program.computations[computation or program.entry]:
        if instruction.operation not in FREE and not instruction.operation.endswith(WAITS):
            yield instruction
        if instruction.operation in FLOW:
            for name in instruction.calls:
                yield from running(program, name)


def fetches(x, types):
    """Tests whether an instruction moves a value between the memories of a TPU."""
    if x.operation.startswith("slice-"):
        return True
    started = types[x.operands[0]] if x.operation == "copy-done" else x.type
    parts = re.findall(r"[a-z]\w*\[[\d,]*\]\{[^}]*\}", started)
    return x.operation in ("copy-start", "copy-done") and _place(parts[0]) != _place(parts[1])


def copies(program):
    """Returns the types of the large values that are copied, within one kind of memory."""
    types = {x.name: x.type for found in program.computations.values() for x in found}
    copied = []
    for x in running(program):
        if x.operation == "copy-start":
            copied += [types[x.operands[0]]] if _place(x.type) == _place(types[x.operands[0]]) else []
        elif x.operation == "copy" or _only_copies(program, x):
            copied.append(x.type)
    return [kind for kind in copied if bytes_of(kind) >= LARGE]


def _place(kind):
    """Returns the memory space of the first value of a type; TPUs prefetch by copies into another space."""
    return re.search(r"S\(\d+\)", kind.split("]")[1].split("[")[0]) and re.search(r"S\(\d+\)", kind)[0]


def _only_copies(program, x):
    if x.operation != "fusion":
        return False
    inside = {y.operation for name in x.calls for y in program.computations[name]}
    return "copy" in inside and inside <= {"copy", *FREE}


def communicating(program, computation=None):
    """Yields the collectives that run, also inside fusions and asynchronous computations."""
    for x in running(program, computation):
        if re.fullmatch(f"(?:{COLLECTIVES})(?:-start)?", x.operation):
            yield x
        elif x.operation in ("async-start", "fusion"):
            for name in x.calls:
                yield from communicating(program, name)


def collectives(program):
    """Counts the collectives that run, by operation."""
    counted = {}
    for x in communicating(program):
        name = x.operation.removesuffix("-start")
        counted[name] = counted.get(name, 0) + 1
    return counted


def small_all_reduces(program):
    """Counts the all-reduces of a few numbers, such as norms or flags; XLA combines all leaves into one."""
    reduced = [x for x in communicating(program) if x.operation.removesuffix("-start") == "all-reduce"]
    return sum(_elements(x.type) <= FEW for x in reduced)


def _elements(kind):
    shapes = re.findall(r"\w\[([\d,]*)\]", kind)
    return sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def matmuls(program):
    """Counts the matmuls and convolutions that run, by the element type of their first operand, such as `f16`."""
    counted = {}
    for found in program.computations.values():
        types = {x.name: x.type for x in found}
        for x in found:
            if x.operation in ("dot", "convolution") or re.match(r"__cublas|__cudnn\$conv", x.target):
                name = types[x.operands[0]].partition("[")[0]
                counted[name] = counted.get(name, 0) + 1
    return counted


def count(program, *operations):
    """Counts the instructions that run and are one of the operations."""
    return sum(x.operation.removesuffix("-start") in operations for x in running(program))


def scalar_operations(program):
    """Counts the operations outside of fusions whose result is a scalar: on a TPU, its scalar unit runs them."""
    scalars = [x.operation for x in program.computations[program.entry] if re.match(r"\w+\[\]", x.type)]
    others = ("fusion", "custom-call", *FREE, *FLOW)
    return sum(x not in others and not re.match(COLLECTIVES, x) for x in scalars)


def kernels(program, computation=None):
    """Counts the kernels that run on the device; a conditional counts as its branch with the most kernels."""
    n = 0
    for x in program.computations[computation or program.entry]:
        inside = [kernels(program, name) for name in x.calls] if x.operation in FLOW else []
        if x.operation in FLOW:
            n += max(inside) if x.operation == "conditional" else sum(inside)
        else:
            n += x.operation not in FREE and not x.operation.endswith(WAITS)
    return n
