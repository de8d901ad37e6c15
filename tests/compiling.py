"""Compiles quickly, counts compilations, and reads the optimized programs of XLA."""

import contextlib
import re

import jax

FAST = {"compiler_options": {"xla_backend_optimization_level": 0}}  # of jax.jit; halves the compile time

# One listener for the whole process, because JAX can only remove all listeners at once.
_compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _compilations.append(event) if "backend_compile" in event else None
)


@contextlib.contextmanager
def count_compilations():
    """Yields a list that after the block has one entry for each program that was compiled within it."""
    before, compiled_inside = len(_compilations), []
    yield compiled_inside
    compiled_inside[:] = _compilations[before:]


def compiled(fn, *args, **jit_options):
    """Returns the optimized program of `fn` as text."""
    return jax.jit(fn, **jit_options).lower(*args).compile().as_text()


def instructions(text):
    """Returns the sorted operations of a program with their types, without names, layouts and metadata."""
    found = re.findall(r"^\s*(?:ROOT )?%?[\w.-]+ = (\([^=]*?\)|\S+) ([\w-]+)\(", text, flags=re.MULTILINE)
    return sorted(f"{op} {re.sub(r'{[^}]*}', '', shape)}" for shape, op in found if op not in ("parameter", "tuple"))


def count(text, *operations):
    """Counts the instructions that are one of `operations`, synchronous or asynchronous."""
    names = "|".join(operations)
    return len(re.findall(rf"^\s*(?:ROOT )?%?[\w.-]+ = .*? (?:{names})(?:-start)?\(", text, flags=re.MULTILINE))
