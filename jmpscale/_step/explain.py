"""Explains errors of a training step that a tool traces."""

from jmpscale._programs.source import place_of_error
from jmpscale._step.call import reads_values


def explain_error(error: Exception, tool: str) -> None:
    """Says what to do about an error of a training step that is traced."""
    if reads_values(error):
        error.add_note(
            f"{tool} traces the step, as jax.jit does, so Python must not read the values of arrays in it, as it "
            f"does{place_of_error(error)}. Pass the part of the step that jax.jit accepts: the function that computes "
            "the gradients and the update."
        )
    elif isinstance(error, TypeError) and "lowered and compiled" in str(error):
        error.add_note(f"The step was compiled ahead of time. Pass the function that was compiled to {tool}.")
    elif isinstance(error, NameError) and "axis name" in str(error):
        error.add_note(
            "The step uses an axis of jax.pmap, jax.shard_map or jax.vmap: pass the function that maps it, with the "
            "arguments of all devices."
        )
