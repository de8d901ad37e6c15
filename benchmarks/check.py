"""Compares the check alone, `jmpscale.all_finite`, with `all(isfinite)` and with a plain sum of the same tree."""

import functools
import time

import jax
import jax.numpy as jnp

import jmpscale
from benchmarks import steps, timing

DTYPES = ("float32", "float16", "bfloat16")
SIZES = {"256 kB": 2**18, "4 MB": 2**22, "100 MB": 10**8}  # for the L2 cache, for the L3 cache, and too large for both


def isfinite(tree):
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def total(tree):
    return jnp.stack([jnp.sum(x) for x in jax.tree.leaves(tree)])


def compare(tree, seconds, **others):
    """Times the functions in turns; each ratio is to the plain sum."""
    ways = {"jmpscale": jmpscale.all_finite, "isfinite": isfinite, "sum": total} | others
    turns, compiling = {}, {}
    for name, fn in ways.items():
        start = time.process_time()
        compiled = jax.jit(fn).lower(tree).compile()
        compiling[name] = {"compile_cpu_s": float(f"{time.process_time() - start:.3g}")}
        turns[name] = functools.partial(compiled, tree)
    figures = timing.summarize(timing.interleave(turns, seconds), "sum")
    size = steps.count(tree) * jax.tree.leaves(tree)[0].dtype.itemsize
    speed = {name: {"GB/s": float(f"{size / numbers['ms'] / 1e6:.3g}")} for name, numbers in figures.items()}
    return {name: figures[name] | speed[name] | compiling[name] for name in ways}


def measure(seconds):
    """Measures sixteen equal leaves of normally distributed numbers, for each dtype and size."""
    figures = {}
    for dtype in DTYPES:
        for name, size in SIZES.items():
            print(f"  {name} of {dtype}", flush=True)
            leaf = size // jnp.dtype(dtype).itemsize // 16
            tree = [jax.random.normal(k, leaf, dtype) for k in jax.random.split(jax.random.key(0), 16)]
            figures[f"{dtype}, {name}"] = compare(tree, seconds)
            print(figures[f"{dtype}, {name}"], flush=True)
    return figures
