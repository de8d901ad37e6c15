"""Compiles for accelerators that are not present, with their own compilers. Import it before JAX starts a backend.

One process compiles for one kind. `jax-cuda12-plugin` contains the compiler for GPUs, and `libtpu` the one for TPU.
"""

import importlib.util
import math
import os
from typing import NamedTuple

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # compiling needs no driver
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # this host has no TPU
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no process here uses a TPU
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")  # runs everything except the programs for the target

# The properties of the devices that XLA needs to compile for them: of an H100 SXM as it reports them
# (openxla/xla#25919), of the others from NVIDIA's tables of compute capabilities and data sheets.
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  {properties}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""
GPUS = {
    "h100": _GPU.format(
        name="NVIDIA H100 80GB HBM3",
        properties="""cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_core_limit: 2048 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84929347584""",
    ),
    "v100": _GPU.format(
        name="Tesla V100-SXM2-16GB",
        properties="""cuda_compute_capability { major: 7 minor: 0 }
  core_count: 80 fpus_per_core: 64 clock_rate_ghz: 1.53
  threads_per_core_limit: 2048 shared_memory_per_core: 98304 shared_memory_per_block_optin: 98304
  memory_bandwidth: 900000000000 l2_cache_size: 6291456 device_memory_size: 16945512448""",
    ),
    "t4": _GPU.format(
        name="Tesla T4",
        properties="""cuda_compute_capability { major: 7 minor: 5 }
  core_count: 40 fpus_per_core: 64 clock_rate_ghz: 1.59
  threads_per_core_limit: 1024 shared_memory_per_core: 65536 shared_memory_per_block_optin: 65536
  memory_bandwidth: 320000000000 l2_cache_size: 4194304 device_memory_size: 15843721216""",
    ),
}
TOPOLOGIES = {  # by the number of devices; for one device, the smallest topology, of which one device is used
    "h100": {1: "1x1x1", 8: "1x1x8", 64: "1x8x8", 1024: "1x128x8"},  # slices, hosts, devices of a host
    "v100": {1: "1x1x1", 8: "1x1x8"},
    "t4": {1: "1x1x1", 8: "1x1x8"},
    "tpu-v5e": {1: "v5e:2x2", 4: "v5e:2x2", 8: "v5e:2x4", 256: "v5e:16x16"},
    "tpu-v5p": {1: "v5p:2x2x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2", 256: "v5p:4x8x8", 1024: "v5p:8x8x16"},
}
MESHES = {1: (1, 1), 4: (2, 2), 8: (4, 2), 64: (64, 1), 256: (256, 1), 1024: (128, 8)}
AXES = ("data", "model")


def installed(backend):
    """Tests whether the compiler for a backend can be imported here."""
    return importlib.util.find_spec("jax_cuda12_plugin" if backend in GPUS else "libtpu") is not None


def mesh(backend, devices, shape=None):
    """Returns a mesh of devices of the backend, which need not exist."""
    if (name := TOPOLOGIES[backend].get(devices)) is None:
        known = sorted(TOPOLOGIES[backend])
        raise ValueError(f"{backend} is known with {known} devices, got {devices}: add its topology to TOPOLOGIES")
    if backend in GPUS:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=name, target_config=GPUS[backend].strip()
        )
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    shape = shape or MESHES[devices]
    found = np.array(topology.devices[:devices]).reshape(shape)
    return Mesh(found, AXES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def warm_up(backend):
    """Compiles a small program, so that the first measurement does not include the start of the compiler."""
    everywhere = NamedSharding(mesh(backend, 1), PartitionSpec())
    number = jax.ShapeDtypeStruct((8, 8), np.float32)
    jax.jit(lambda x: x @ x, in_shardings=everywhere).lower(number).compile()


def spread(tree, mesh):
    """Returns the shardings of a training state: matrices are sharded if the mesh divides them."""

    def one(x):
        matrix = len(x.shape) >= 2 and all(n % m == 0 for n, m in zip(x.shape[-2:], mesh.devices.shape, strict=True))
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(x.shape) - 2), *AXES) if matrix else PartitionSpec())

    return jax.tree.map(one, tree)


def batches(tree, mesh):
    """Returns the shardings of a batch: its first axis is sharded over the first axis of the mesh."""
    return jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(AXES[0])), tree)


class Abstract(NamedTuple):
    """A task, `(loss_fn, params, batch)`, without arrays."""

    loss_fn: object
    params: object
    batch: object


def abstract(task):
    """Creates a task of shapes and dtypes alone, which needs no memory."""
    loss_fn = []

    def make():
        fn, params, batch = task()
        loss_fn.append(fn)
        return params, batch

    params, batch = jax.eval_shape(make)
    return Abstract(loss_fn[0], params, batch)


def shards(tree, shardings):
    """Returns the XLA types of the shards of all floating-point leaves, such as `f32[512,1024]`."""
    leaves = zip(*map(jax.tree.leaves, (tree, shardings)), strict=True)
    parts = [(x.dtype, sharding.shard_shape(x.shape)) for x, sharding in leaves]
    names = {np.dtype("float32"): "f32", np.dtype("float16"): "f16", np.dtype("bfloat16"): "bf16"}
    return {f"{names[dtype]}[{','.join(map(str, shape))}]" for dtype, shape in parts if dtype in names}


def lost(given, returned, tree):
    """Counts the leaves that are sharded before a step, and the ones whose sharding differs after the step."""
    leaves = zip(*(jax.tree.leaves(x) for x in (given, returned, tree)), strict=True)
    pairs = [(a, b, len(x.shape)) for a, b, x in leaves if math.prod(a.shard_shape(x.shape)) < math.prod(x.shape)]
    return len(pairs), sum(not a.is_equivalent_to(b, ndim) for a, b, ndim in pairs)
