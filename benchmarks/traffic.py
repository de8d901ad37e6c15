"""Counts the bytes that an optimized program reads, writes and communicates, by the types of its instructions.

An instruction reads the part of an operand that it slices or gathers, also inside a fusion, and the whole of any other
operand. An update in place reads and writes the part that changes. Loops count all their iterations. XLA's own count
follows the same rules, except that it counts one iteration; it is missing on CUDA.
"""

import re

from benchmarks.programs import COLLECTIVES, FLOW, FREE, WAITS, bytes_of, fetches

SLICES = ("slice", "dynamic-slice", "gather")  # these read a part of their first operand, of the size of their result
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # these replace a part of it: the operand with the new values
RENAMES = ("bitcast", "reshape")
FUSED = ("fusion", "async-start")  # these run another computation, as one kernel


class UnknownIterationsError(ValueError):
    """A program does not contain the number of iterations of one of its loops."""


def moved_bytes(program, computation=None):
    """Adds up the bytes that instructions read and write, of the largest branch, and of all iterations of a loop.

    Moves between a TPU's main memory and its on-chip memory do not count: the compiler prefetches as much as the
    on-chip memory can hold, which depends little on the program.

    Raises:
        UnknownIterationsError: The number of iterations of a loop is unknown.
    """
    instructions = program.computations[computation or program.entry]
    types, moved = {x.name: x.type for x in instructions}, 0
    for x in instructions:
        inside = [moved_bytes(program, name) for name in x.calls] if x.operation in FLOW else []
        if x.operation in FLOW:
            moved += _total(x, inside)
        elif x.operation not in FREE and not fetches(x, types):
            # An asynchronous operation writes its result when it is done; the type of its start repeats the operands.
            if not x.operation.endswith(WAITS):
                moved += sum(_used(program, x, name, types) for name in dict.fromkeys(x.operands))
            if not x.operation.endswith(("-start", "-update")):
                moved += _written(program, x, types)
    return moved


def communicated_bytes(program, computation=None):
    """Adds up the sizes of the results of collectives, of the largest branch, and of all iterations of a loop.

    Raises:
        UnknownIterationsError: The number of iterations of a loop that contains a collective is unknown.
    """
    total = 0
    for x in program.computations[computation or program.entry]:
        if x.operation in (*FLOW, *FUSED):
            total += _total(x, [communicated_bytes(program, name) for name in x.calls])
        elif re.fullmatch(f"(?:{COLLECTIVES})(?:-done)?", x.operation):
            total += bytes_of(x.type)  # the type of its start repeats the operands
    return total


def known(count, program):
    """Returns the bytes that `count` finds in a program, or None if a loop has an unknown number of iterations."""
    try:
        return count(program)
    except UnknownIterationsError:
        return None


def _total(x, inside):
    """Adds up the bytes of the computations that an instruction runs."""
    if x.operation == "conditional":
        return max(inside)
    if x.operation != "while" or not any(inside):
        return sum(inside)
    if x.iterations is None:
        raise UnknownIterationsError(f"the loop {x.name} has no known_trip_count, so its bytes cannot be counted")
    return x.iterations * sum(inside)


def _used(program, x, name, types):
    """Returns the bytes of an operand that an instruction reads."""
    if x.operation in FUSED:
        inside = program.computations[x.calls[0]]
        parameters = [y for y in inside if y.operation == "parameter" and x.operands[y.number] == name]
        return sum(_used_inside(program, inside, y.name) for y in parameters)
    if x.operands.index(name) == 0 and x.operands.count(name) == 1:
        if x.operation in SLICES:
            return bytes_of(x.type)
        if x.operation == "dynamic-update-slice":
            return 0
        if x.operation == "scatter":  # it adds to the values that it replaces
            return bytes_of(types[x.operands[UPDATES["scatter"]]])
    return bytes_of(types[name])


def _used_inside(program, instructions, name):
    """Returns the bytes of a value in a fusion that the other instructions of the fusion read, at most all of it."""
    types, used = {x.name: x.type for x in instructions}, 0
    for x in instructions:
        if name in x.operands:
            renamed = x.operation in RENAMES
            used += _used_inside(program, instructions, x.name) if renamed else _used(program, x, name, types)
    return min(used, bytes_of(types[name]))


def _written(program, x, types):
    """Returns the bytes that an instruction writes."""
    if x.operation in UPDATES:
        return bytes_of(types[x.operands[UPDATES[x.operation]]])
    if x.operation not in FUSED:
        return bytes_of(x.type)
    inside = {y.name: y for y in program.computations[x.calls[0]]}
    (root,) = (y for y in inside.values() if y.is_root)
    results = [inside[name] for name in root.operands] if root.operation == "tuple" else [root]
    return sum(_written_inside(program, inside, y) for y in results)


def _written_inside(program, inside, x):
    """Returns the bytes that a fusion writes for one of its results: in place if it updates a parameter."""
    x = _unnamed(inside, x)
    replaces = x.operation in UPDATES and _unnamed(inside, inside[x.operands[0]]).operation == "parameter"
    if replaces or x.operation in FUSED:
        return _written(program, x, {name: y.type for name, y in inside.items()})
    return bytes_of(x.type)


def _unnamed(inside, x):
    """Returns the instruction whose value another instruction renames."""
    return _unnamed(inside, inside[x.operands[0]]) if x.operation in RENAMES else x
