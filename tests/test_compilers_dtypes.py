"""The page on dtypes: which products XLA compiles for which GPU. Needs the compiler for NVIDIA's GPUs, and no GPU."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import targets

if not targets.installed("h100"):
    pytest.skip("the compiler for NVIDIA's GPUs is not installed", allow_module_level=True)

pytestmark = pytest.mark.once


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("capability", "widened"),
    [("major: 7 minor: 0", True), ("major: 7 minor: 5", True), ("major: 8 minor: 0", False), ("major: 9", False)],
    ids=["V100", "T4", "A100", "H100"],
)
def test_a_product_of_bfloat16_is_one_of_float32_before_ampere_and_float16_never(capability, widened, dtype):
    assert targets.H100.count("cuda_compute_capability { major: 9 }") == 1
    card = targets.H100.replace("{ major: 9 }", f"{{ {capability} }}").strip()
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x1", target_config=card)
    there = SingleDeviceSharding(topology.devices[0])
    x = jax.ShapeDtypeStruct((1024, 1024), dtype)
    program = jax.jit(jnp.matmul, in_shardings=there).lower(x, x).compile().as_text()
    converts = re.findall(r"= f32\[1024,1024\]\S* convert\(", program)
    assert len(converts) == (2 if widened and dtype == jnp.bfloat16 else 0), program
