"""Reads optimized programs: which instructions they hold, whatever they are named."""

import re

import jax


def compiled(fn, *args, **jit_options):
    """Returns the optimized program of `fn` as text."""
    return jax.jit(fn, **jit_options).lower(*args).compile().as_text()


def instructions(text):
    """Returns the sorted operations with their types, computation by computation, without names and metadata."""
    found = re.findall(r"^\s*(?:ROOT )?%?[\w.-]+ = (\([^=]*?\)|\S+) ([\w-]+)\(", text, flags=re.MULTILINE)
    return sorted(f"{op} {re.sub(r'{[^}]*}', '', shape)}" for shape, op in found if op not in ("parameter", "tuple"))


def count(text, *operations):
    """Counts the instructions that are one of `operations`, whether or not they are asynchronous."""
    names = "|".join(operations)
    return len(re.findall(rf"^\s*(?:ROOT )?%?[\w.-]+ = .*? (?:{names})(?:-start)?\(", text, flags=re.MULTILINE))
