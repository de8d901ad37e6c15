"""Saves and restores in every format that the guide on checkpoints shows; what the tests about checkpoints share."""

import functools
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jmpscale

import pages


@functools.cache
def example(heading):
    """Runs an example once for all tests that use it."""
    return pages.run("guides/checkpoints", heading)


def same(one, other):
    """Whether two trees are the same in structure, shapes, dtypes and bits, whatever holds the numbers."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(
        (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
        for a, b in ((np.asarray(a), np.asarray(b)) for a, b in pairs)
    )


def orbax(folder, state, template):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", template)


FORMATS = {
    "orbax": orbax,
    "msgpack": lambda _, state, template: flax.serialization.from_bytes(template, flax.serialization.to_bytes(state)),
    "state dict": lambda _, state, template: flax.serialization.from_state_dict(
        template, flax.serialization.to_state_dict(state)
    ),
    "pickle": lambda _, state, template: pickle.loads(pickle.dumps(state)),
}


def of_another_layout(*without, **with_):
    """A scaler as a dictionary, which is how it lies in a checkpoint, of another version's or library's layout."""
    fields = {**jmpscale.dynamic(8.0)._asdict(), "config": None, **with_}
    return {name: value for name, value in fields.items() if name not in without}


def huge_scale(tree):
    scaler = jmpscale.get_scaler(tree)
    return jmpscale.replace_scaler(tree, scaler._replace(loss_scale=jnp.full_like(scaler.loss_scale, 2.0**22)))
