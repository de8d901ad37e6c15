"""Checks that devices and processes agree."""

import dataclasses
import json
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jmpscale._base.text import type_name
from jmpscale._base.tree import PyTree, bit_pattern, check_has_values, find_instances, is_array, named_leaves
from jmpscale._state import ScalerState
from jmpscale.testing._first_difference import first_difference

_Description = dict[str, Any]  # of a tree on one process, in JSON


def assert_replicated(tree: PyTree) -> None:
    """Raises unless devices that hold the same part of an array, and all processes, hold the same bits.

    A missing `axis_name` under `jax.pmap` or `check_vma=False` gives only a warning, and the array is then marked as
    replicated although devices have diverged. Call this function after a step that overflowed on one device.

    On multiple hosts, every process must call it, and either all of them raise or none does. It also compares the
    structures of the trees, the settings of their scalers, NumPy arrays, and texts, such as the program of a step:
    `step.lower(*args).as_text()`. Call it before the first step, because JAX does not notice that processes run
    different programs.

    Args:
      tree: a scaler, or any pytree of arrays and texts. The copies of each shard are compared; or the rows, if every
        JAX array has one row for each device, as `jax.pmap` returns them.

    Raises:
      AssertionError: two devices or two processes differ, or another process cannot read its tree. The message names
        the leaf or the setting; within a process, also the devices and the values.
      TypeError: a leaf is not an array or a text, or is an abstract or traced array.
      ValueError: an array was donated to a compiled function.

    >>> import jmpscale
    >>> from jmpscale import testing
    >>> testing.assert_replicated(jmpscale.dynamic())
    """
    if jax.process_count() == 1:
        _check_leaves(tree)
        check_copies(tree)
    else:
        _check_processes(tree)


def _check_leaves(tree: PyTree) -> None:
    check_has_values(tree, "tree", "assert_replicated")
    for path, leaf in named_leaves(tree):
        if not (is_array(leaf) or isinstance(leaf, str)):
            remedy = "Pass its text, .as_text()." if hasattr(leaf, "as_text") else "Pass the result of a step."
            raise TypeError(f"tree{path} must be an array or a text, got {type_name(leaf)}. {remedy}")


def check_copies(tree: PyTree, name: str = "tree") -> None:
    """Raises unless devices of this process that hold the same part of a JAX array hold the same bits."""
    by_rows = _has_rows(tree)
    for path, leaf in named_leaves(tree):
        first: dict[str, tuple[Any, object]] = {}  # the first shard of each part, and its bits
        is_shared = isinstance(leaf, jax.Array) and len(leaf.addressable_shards) > 1
        for part, shard in _shards(leaf, by_rows) if is_shared else ():
            bits = bit_pattern(shard.data)
            other, expected = first.setdefault(part, (shard, bits))
            if bits != expected:
                one, two, place = first_difference(other.data, shard.data)
                raise AssertionError(
                    f"{name}{path} differs between devices: {one} on {other.device}, {two} on {shard.device}{place}. "
                    "Each device has its own gradients or has decided independently: average the gradients with "
                    "jax.lax.pmean, and pass axis_name, with all mapped axes, to all_finite, unscale_and_check, update "
                    "or with_loss_scaling. If devices hold parts of the gradients, pass norm_axis_name, too."
                )


def check_addressable(tree: PyTree, name: str) -> None:
    """Raises if devices of other processes hold a part of a JAX array."""
    for path, leaf in named_leaves(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"{name} must be on devices of this process, but other processes hold parts of {name}{path}. Build "
                "the state and the batch on jax.local_devices(); or call jmpscale.testing.assert_replicated on all "
                "processes, after a step that overflowed."
            )


def _has_rows(tree: PyTree) -> bool:
    """Tests whether every JAX array of a tree has one row for each of several devices."""
    return all(_has_one_row_per_device(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


def _has_one_row_per_device(x: jax.Array) -> bool:
    devices = len(x.global_shards)
    return devices > 1 and x.shape[:1] == (devices,) and x.sharding.shard_shape(x.shape)[0] == 1


def _shards(x: jax.Array, by_rows: bool) -> Iterator[tuple[str, Any]]:
    """Yields each shard on devices of this process, with a name for the part of the array that it must equal."""
    for shard in x.addressable_shards:
        yield "" if by_rows else str(shard.index), shard


# On multiple hosts, each process sends a description of its tree and compares all descriptions, so that all processes
# reach the same result. If a process raised before it sent its description, the other processes would not return.


def _check_processes(tree: PyTree) -> None:
    error = None
    try:
        _check_leaves(tree)
        check_copies(tree)
        description = _description(tree)
    except Exception as raised:
        error, description = raised, {"error": f"{type(raised).__name__}: {raised}"}
    descriptions = [json.loads(text) for text in _gather(json.dumps(description))]
    if error is not None:
        raise error
    for process, other in enumerate(descriptions):
        if "error" in other:
            raise AssertionError(f"process {process} raised {other['error']}")
    if difference := _difference(descriptions):
        raise AssertionError(f"{difference} Give every process the same program, settings and data.")


def _description(tree: PyTree) -> _Description:
    by_rows = _has_rows(tree)
    leaves = named_leaves(tree)
    return {
        "types": {path: _type(leaf) for path, leaf in leaves},
        "settings": [
            scaler.config and dataclasses.asdict(scaler.config) for scaler in find_instances(tree, ScalerState)
        ],
        "parts": {path: _parts(leaf, by_rows) for path, leaf in leaves},
    }


def _type(leaf: Any) -> str:
    return "a text" if isinstance(leaf, str) else f"{leaf.dtype}{list(leaf.shape)}"


def _parts(leaf: Any, by_rows: bool) -> dict[str, int]:
    """Returns a checksum of each part of a leaf that this process holds."""
    if isinstance(leaf, jax.Array):
        return {part: _checksum(shard.data) for part, shard in _shards(leaf, by_rows)}
    whole = str((slice(None),) * np.ndim(leaf))  # as the index of the only shard of a JAX array
    return {whole: zlib.crc32(leaf.encode()) if isinstance(leaf, str) else _checksum(leaf)}


def _checksum(array: Any) -> int:
    bits: Any = bit_pattern(array)
    return zlib.crc32(bits[-1])


def _gather(text: str) -> list[str]:
    """Returns the texts of all processes, in their order."""
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.array(data.size, np.int32)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(lengths.size, -1)
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def _difference(descriptions: list[_Description]) -> str | None:
    """Returns the first difference between two processes as a sentence."""
    first = descriptions[0]
    for i, other in enumerate(descriptions):
        for path in _unequal_keys(first["types"], other["types"]):
            here, there = (x["types"].get(path, "absent") for x in (first, other))
            return f"tree{path} is {here} on process 0 and {there} on process {i}."
        for ours, theirs in zip(first["settings"], other["settings"], strict=False):
            for name in _unequal_keys(ours or {}, theirs or {}):
                here, there = ((x or {}).get(name) for x in (ours, theirs))
                return f"the setting {name} of the scaler is {here} on process 0 and {there} on process {i}."
    for path in first["types"]:
        holders: dict[str, tuple[int, int]] = {}  # the first process that holds each part, and its checksum
        for i, other in enumerate(descriptions):
            for part, checksum in other["parts"][path].items():
                holder, expected = holders.setdefault(part, (i, checksum))
                if checksum != expected:
                    return f"tree{path} differs between the processes {holder} and {i}."
    return None


def _unequal_keys(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [key for key in [*a, *b] if a.get(key) != b.get(key)]
