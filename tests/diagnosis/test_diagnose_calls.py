"""The comparison of a diagnosis is float32: whatever of JAX remains in half precision in it is listed.

The functions are those that modules offer, found by introspection, so that new ones are tested, too.
"""

import functools
import inspect
import re
import sys

import jax
import jax.numpy as jnp
import jax.scipy
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.extend import core

from jmpscale._programs.float32 import run_as_written, run_in_float32
from jmpscale._programs.interpret import Interpreter, is_narrow
from jmpscale._programs.jaxpr import ENTERED, equations, type_of

H = jnp.float16
# Primitives that the comparison runs as written, if they have operands or results in half precision, and lists.
AS_WRITTEN = {
    "bits of a half-precision number": {"bitcast_convert_type", "nextafter", "reduce_precision"},
    "programs of fixed dtypes": {"custom_linear_solve", "custom_lin", "custom_jvp_call_jaxpr", "custom_transpose_call"}
    | {"remat_opt", "eval_jaxpr", "for", "call_exported", "run_state", "run_scoped", "core_map", "xla_pmap"}
    | {"call_hi_primitive", "call_hi_primitive_linearized", "jaxpr_call", "mpmd_map"},
    "kernels": {"pallas_call", "ffi_call", "custom_partitioning", "cudnn_fusion", "tpu_custom_call", "spsolve"}
    | {"scaled_dot", "scaled_matmul", "scaled_matmul_wrapper", "bias_fwd", "bias_bwd", "todense"}
    | {f"dot_product_attention_{x}{y}" for x in ("fwd", "bwd", "fp8_fwd", "fp8_bwd") for y in ("", "_wrapper")},
    "callbacks": {"pure_callback", "io_callback", "debug_callback", "debug_print", "inspect_sharding", "check"},
    "references and boxes": {"accum_grad_in_ref", "addupdate", "array_ref", "empty_ref", "free_ref", "freeze", "get"}
    | {"new_ref", "pin", "unpin", "swap", "create_linear", "with_memory_space_constraint", "box_get", "box_set"}
    | {"new_box", "new_log", "log_extend", "log_read"},
    "integers": {"iota_2x32_shape", "lu_pivots_to_permutation", "platform_index", "philox2x32", "philox4x32"}
    | {"threefry4x32", "random_bits", "random_clone", "random_unwrap", "random_wrap", "rng_bit_generator"}
    | {"rng_uniform", "dim_as_value", "dimension_size", "shape_assertion", "geqp3", "geqrf", "ormqr"}
    | {"eigh_jacobi", "unreachable"},
    "arrays of several processes": {"global_array_to_host_local_array", "host_local_array_to_global_array"},
    "communication by kernels": {"psend", "precv", "full_to_shard", "shard_to_full"}
    | {
        f"{x}_{y}"
        for x in ("all_gather", "all_gather_reduced", "all_to_all", "pbroadcast", "ppermute", "psum", "psum_invariant")
        for y in ("start", "done")
    }
    | {f"{x}_{y}" for x in ("reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter") for y in ("start", "done")},
}


def test_every_primitive_of_jax_computes_in_float32_or_is_known_to_run_as_written():
    modules = {name: module for name, module in sys.modules.items() if re.match("jax(?!.*(pallas|mosaic))", name)}
    found = {x.name for module in modules.values() for x in vars(module).values() if isinstance(x, core.Primitive)}
    assert len(found) > 200
    found = {name for name in found if not re.match("b?c(oo|sr)_", name)}  # sparse matrices
    unknown = found - ENTERED - set().union(*AS_WRITTEN.values()) - in_float32(found)
    assert not unknown, "decide whether these compute in float32"


def in_float32(primitives):
    """Returns the names of the primitives that the comparison computes in float32."""
    from jmpscale._programs.float32 import _KNOWN

    return primitives & _KNOWN


def left_in_half(fun, *args):
    """Returns the narrow primitives of a program in float32, and the operations that it lists."""
    closed = jax.make_jaxpr(fun)(*args)
    listed = set()

    def rule(_, eqn, inputs, caller):
        if (outputs := run_in_float32(eqn, inputs)) is None:
            listed.add(eqn.primitive.name)
            return run_as_written(eqn, inputs)
        return outputs

    shapes = [jax.ShapeDtypeStruct(x.shape, np.float32 if is_narrow(x) else x.dtype) for x in jax.tree.leaves(args)]
    run = jax.make_jaxpr(lambda *inputs: Interpreter(rule).evaluate(closed, inputs)[0])(*shapes)
    narrow = {eqn.primitive.name for eqn, _ in equations(run.jaxpr) if computes_in_half(eqn)}
    return narrow, listed


def computes_in_half(eqn):
    """Tests whether a result is in half precision; the bits of integers, such as random ones, are exact."""
    if eqn.primitive.name == "bitcast_convert_type" and not is_narrow(type_of(eqn.invars[0])):
        return False
    return eqn.primitive.name == "reduce_precision" or any(is_narrow(type_of(x)) for x in eqn.outvars)


VECTOR = jnp.asarray(np.linspace(0.1, 0.9, 4).astype(H))
MATRIX = jnp.asarray((np.eye(4) + np.linspace(0, 0.2, 16).reshape(4, 4)).astype(H))
INDEX = jnp.asarray(np.arange(4, dtype=np.int32))
KEY = jax.random.key(0)
ARGUMENTS = [
    *((x,) * n for n in (1, 2, 3) for x in (MATRIX, VECTOR)),
    (MATRIX, VECTOR),
    (VECTOR, INDEX),
    (MATRIX, INDEX),
    (INDEX, VECTOR),
    ([VECTOR, VECTOR],),
]
KEYED = [(KEY,), (KEY, VECTOR), (KEY, VECTOR, VECTOR)]


def functions_of(module, prefix=""):
    public = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    tokens = {"after_all", "create_token"}  # have no arrays
    return {
        prefix + name: fun
        for name, fun in public.items()
        if callable(fun) and not isinstance(fun, type) and name not in tokens
    }


MODULES = {
    "jax.nn": (functions_of(jax.nn) | functions_of(jax.nn.initializers, "initializers."), ARGUMENTS),
    "jax.numpy": (functions_of(jnp) | functions_of(jnp.linalg, "linalg.") | functions_of(jnp.fft, "fft."), ARGUMENTS),
    "jax.lax": (functions_of(jax.lax), ARGUMENTS),
    "jax.scipy.special": (functions_of(jax.scipy.special), ARGUMENTS),
    "jax.scipy": (
        functions_of(jax.scipy.linalg) | functions_of(jax.scipy.signal) | functions_of(jax.scipy.ndimage),
        ARGUMENTS,
    ),
    "jax.scipy.stats": (
        {
            f"{name}.{method}": getattr(getattr(jax.scipy.stats, name), method)
            for name in dir(jax.scipy.stats)
            for method in ("logpdf", "cdf", "pmf")
            if hasattr(getattr(jax.scipy.stats, name), method)
        },
        ARGUMENTS,
    ),
    "jax.random": (functions_of(jax.random), KEYED),
    "optax.losses": (functions_of(optax.losses) | functions_of(optax.assignment), ARGUMENTS),
}
X2, X3 = MATRIX, jnp.stack([MATRIX, MATRIX])
INPUTS = [(X3,), (X2,), (X3, X3), (X2, X2), (INDEX,), (X3[None],), ((VECTOR, VECTOR), VECTOR), ((X3, X3), X3)]
# Arguments of the classes of layers of Flax, of which each class accepts at least one.
LINEN = [{}, {"features": 4}, {"num_heads": 2}, {"num_heads": 2, "deterministic": True}, {"rate": 0.5}]
LINEN += [{"features": 4, "kernel_size": (3,)}, {"num_embeddings": 4, "features": 4}, {"num_groups": 2}]
LINEN += [{"layers": [linen.Dense(4)]}, {"cell": linen.LSTMCell(4)}, {"cell": linen.GRUCell(4)}]
LINEN += [{"layer_instance": linen.Dense(4)}, {"use_running_average": False}]
NNX = [(), (4,), (4, 4), (4, 4, 4), (2, 4), (4, 4, (3,)), (0.5,), (2, 4, 4)]


def layers_of(flax, arguments):
    """Returns functions of the layers that a module of Flax offers, with the first arguments that they accept."""
    classes = [x for x in vars(flax).values() if isinstance(x, type) and issubclass(x, flax.Module)]
    functions = {}
    for cls in dict.fromkeys(classes):
        calls = [functools.partial(call_layer, cls, extra) for extra in arguments]
        if call := next((x for x in calls if traceable(x, INPUTS) is not None), None):
            functions[cls.__name__] = call
    return functions


def call_layer(cls, extra, *inputs):
    keys = {"params": KEY, "dropout": KEY}
    names = inspect.signature(cls.__init__).parameters
    dtypes = {name: H for name in ("dtype", "param_dtype") if name in names}
    if issubclass(cls, nnx.Module):
        rngs = {"rngs": nnx.Rngs(**keys)} if "rngs" in names else {}
        decode = {"decode": False} if "decode" in names else {}
        return cls(*extra, **dtypes, **decode, **rngs)(*inputs)
    return cls(**extra, **dtypes).init_with_output(keys, *inputs)[0]


@pytest.mark.full
@pytest.mark.parametrize(("flax", "arguments", "count"), [(linen, LINEN, 15), (nnx, NNX, 15)], ids=["Linen", "NNX"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("standard_promotion")
def test_layers_of_flax_run_in_float32_or_are_listed(flax, arguments, count):
    layers = layers_of(flax, arguments)
    assert len(layers) >= count, sorted(layers)
    wrong = []
    for name, fun in layers.items():
        args = traceable(fun, INPUTS)
        for how, transform in TRANSFORMED.items():
            inputs = args if how == "as it is" else jax.tree.map(lambda x: jnp.stack([x, x]), args)
            if traceable(transform(fun), [inputs]) is not None:
                narrow, listed = left_in_half(transform(fun), *inputs)
                wrong += [(name, how, narrow, listed)] if (narrow and not listed) or not listed <= LISTED else []
    assert not wrong, wrong


# Functions whose bits, programs or callbacks have a fixed dtype.
LISTED = {
    "call_hi_primitive",
    "custom_linear_solve",
    "pure_callback",
    "scaled_dot",
    "nextafter",
    "bitcast_convert_type",
    "reduce_precision",
}


def loop(fun):
    """Returns the scan of a function with a checkpoint; its gradient, if the function has one."""

    def step(_, args):
        run = jax.checkpoint(fun, policy=jax.checkpoint_policies.dots_saveable)
        try:
            return None, jax.vjp(run, *args)[1](run(*args))
        except Exception:  # the arguments are not all floating-point numbers
            return None, run(*args)

    return lambda *args: jax.lax.scan(step, None, args)[1]


TRANSFORMED = {"as it is": lambda fun: fun, "vmap": jax.vmap, "checkpoint in a scan": loop}


def traceable(fun, arguments):
    """Returns the first arguments with which a function can be traced, or None."""
    for args in arguments:
        try:
            jax.make_jaxpr(fun)(*args)
        except Exception:  # whatever a function raises for wrong arguments
            continue
        return args
    return None


@pytest.mark.full
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.filterwarnings("ignore")
def test_what_modules_offer_runs_in_float32_or_is_listed(module):
    functions, arguments = MODULES[module]
    tried, wrong = 0, []
    for name, fun in functions.items():
        if (args := traceable(fun, arguments)) is None:
            continue
        for how, transform in TRANSFORMED.items():
            inputs = args if how == "as it is" else jax.tree.map(lambda x: jnp.stack([x, x]), args)
            if traceable(transform(fun), [inputs]) is None:
                continue
            tried += 1
            narrow, listed = left_in_half(transform(fun), *inputs)
            if (narrow and not listed) or not listed <= LISTED:
                wrong.append((name, how, narrow, listed))
    assert not wrong, wrong
    assert tried > 30
