"""A compiled step costs little more than clipping, on CPU, GPUs and TPU: in memory, instructions and collectives.

Neither a GPU nor a TPU is needed, only the compiler: the dependency group `compile-h100` or `compile-tpu`, each in an
environment of its own. The limits compare with the same step with `optax.clip_by_global_norm`, which also needs all
gradients before it changes a parameter.
"""

import functools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale._autocast import rules

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks import autocast, columns, compilers, steps, targets

import meshes
import pages
from compiling import compiled, count, instructions
from tables import rows

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:the (scaler|optimizer state) is a constant"),  # these programs take one step
]
full = pytest.mark.full
METHODS = ("functional", "functional, norm as check", "optax wrapper", "optax wrapper, max_norm", "scaled_backward")
# The topologies for one device and for multiple devices; layers and width, so large that no on-chip memory holds a
# matrix; and the bytes by which the temporary memory may differ, because the compiler for TPU packs it differently.
TARGETS = {"h100": ("h100", "h100", (3, 2048), 0), "tpu": ("tpu-v5e", "tpu-v5p", (2, 8192), 2**19)}
# Kernels that a step may add on a GPU: four for six scalars of the state that change, and one for the clipping factor.
ADDED_KERNELS = {"functional": 4, "optax wrapper": 4, "scaled_backward": 4}
ADDED_KERNELS |= {"functional, norm as check": 5, "optax wrapper, max_norm": 5}
ADDED_KERNELS_ON_TPU = 4  # none with AdamW


@pytest.fixture(autouse=True, scope="module")
def _without_compilation_cache():
    """Turns the cache of conftest.py off, because JAX cannot serialize programs for devices that are absent."""
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    reset_cache()


def _mesh(backend, devices):
    if backend == "cpu":
        meshes.require_cpu()
        grid = np.array(jax.devices()[:devices]).reshape(targets.MESHES[devices])
        return Mesh(grid, targets.AXES, axis_types=(AxisType.Auto,) * 2)
    return targets.mesh(TARGETS[backend][devices > 1], devices)


@functools.cache
def _figures(backend, method, optimizer="adamw", devices=1, task="mlp"):
    compute = jnp.float32
    if task == "embedding":
        make = functools.partial(steps.embedding, 32_000, 1024, 256, 8)
    elif backend == "cpu":
        make = functools.partial(steps.mlp, 4, 64, 8)
    else:
        topology, _, (layers, width), _ = TARGETS[backend]
        if backend == "tpu" and devices > 8:
            layers = 3  # with two, the compiler sometimes keeps one more gathered matrix
        make = functools.partial(steps.mlp, layers, width, 32 if devices == 1 else 256)
        compute = compilers.HALF[topology]
    job = steps.make_job(targets.abstract(make), optimizer, compute)
    return compilers.measure(job, method, _mesh(backend, devices))


def _ratios(ours, baseline):
    return {name: ours[name] / baseline[name] for name in ("moved_bytes", "temp_bytes")}


def _check_collectives(ours, baseline):
    """Checks that no sharding is lost, and that no gather and at most one small all-reduce is added.

    The loss is reduced before the gradients are unscaled, the finiteness of the gradients afterwards.
    """
    gathered = [sum(n for name, n in x["collectives"].items() if name != "all-reduce") for x in (ours, baseline)]
    assert ours["sharded"] > 0
    assert ours["lost"] == 0
    assert gathered[0] <= gathered[1]
    assert ours["small_all_reduces"] <= baseline["small_all_reduces"] + 1


# A step costs as much as clipping on H100 and TPU

STEPS = [  # the number of devices, the optimizer and the method
    *((1, "adamw", method) for method in METHODS),
    *((1, optimizer, "optax wrapper") for optimizer in ("sgd", "momentum", "adafactor")),
    (8, "adamw", "functional"),
    (8, "adamw", "optax wrapper, max_norm"),
    (1024, "adamw", "optax wrapper"),
]


@pytest.fixture(params=TARGETS)
def target(request):
    if not targets.installed(request.param):
        pytest.skip(f"the group compile-{request.param} is not installed")
    return request.param


def _check_costs(target, method, ours, baseline, devices=1):
    ratios, slack = _ratios(ours, baseline), TARGETS[target][-1]
    assert ratios["moved_bytes"] < 1.0005
    assert ours["temp_bytes"] <= 1.01 * baseline["temp_bytes"] + slack
    assert (ours["copies_of_state"], ours["branches"], ours["loops"]) == (0, 0, 0)
    all_reduce = int(devices > 1)
    if target == "h100":
        assert ours["kernels"] <= baseline["kernels"] + ADDED_KERNELS[method] + all_reduce
        assert ours["copies"] <= baseline["copies"]
    else:  # the scalar unit of a TPU updates the state of the scaler
        kernels, clipped = (x["kernels"] - x["scalar_operations"] for x in (ours, baseline))
        assert kernels <= clipped + ADDED_KERNELS_ON_TPU + all_reduce


@pytest.mark.parametrize(("devices", "optimizer", "method"), STEPS)
def test_step_costs_as_much_as_clipping(target, devices, optimizer, method):
    ours, baseline = (_figures(target, name, optimizer, devices) for name in (method, steps.BASELINE))
    _check_costs(target, method, ours, baseline, devices)
    if devices > 1:
        _check_collectives(ours, baseline)


@pytest.mark.parametrize("target", ["h100"], indirect=True)
def test_step_with_embedding_costs_as_much_as_clipping(target):
    """XLA does not merge the zeros of the check with the zeros from which the gradient of the table starts."""
    figures = (_figures(target, name, task="embedding") for name in ("functional", steps.BASELINE))
    _check_costs(target, "functional", *figures)


def test_wrapper_with_warn_after_skips_moves_no_more_memory_than_clipping(target, monkeypatch):
    """All updates depend on the report about the step, which must not keep them from being fused with its end."""
    # A callback needs a device, so a value that the compiler does not know stands for its result.
    monkeypatch.setattr(jax, "pure_callback", lambda _, like, *args, **options: jax.lax.optimization_barrier(like))
    method = "optax wrapper, warn_after_skips"
    monkeypatch.setitem(steps.METHODS, method, functools.partial(steps.optax_wrapper, warn_after_skips=20))
    ours, baseline = (_figures(target, name) for name in (method, steps.BASELINE))
    assert _ratios(ours, baseline)["moved_bytes"] < 1.0005
    assert ours["temp_bytes"] <= 1.01 * baseline["temp_bytes"] + TARGETS[target][-1]
    assert (ours["copies_of_state"], ours["loops"]) == (0, 0)


# float32 copies of parameters in half precision are updated in the kernels that read them


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_with_master_params_moves_what_its_arrays_have(target, dtype):
    """An update reads and writes a parameter (4 bytes), its copy and two averages (24), and reads its gradient (2)."""
    topology, _, (_, width), _ = TARGETS[target]
    tx = jmpscale.with_master_params(optax.adamw(1e-3))

    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jax.ShapeDtypeStruct((width, width), dtype)}
    args = params, jax.eval_shape(tx.init, params), params
    everywhere = NamedSharding(targets.mesh(topology, 1), P())
    jitted = jax.jit(step, donate_argnums=(0, 1), in_shardings=everywhere)
    found = jitted.lower(*args).compile()
    assert "reduce-precision(" in found.as_text()  # XLA removes a conversion to half precision and back on a GPU
    assert compilers.traffic.moved_bytes(compilers.programs.parse(found.as_text())) / width**2 < 30.01
    assert found.memory_analysis().temp_size_in_bytes < 2**16


# A step with autocast costs little more than the step of a model that is cast by hand

AUTOCAST = {  # the limits for the ratios of the bytes moved and of the temporary memory
    ("h100", "GPT-2 small, 2 layers", autocast.AUTOCAST): (1.12, 1.10),
    ("h100", "GPT-2 small, 2 layers, FSDP", autocast.AUTOCAST): (1.12, 1.10),
    # Autocast leaves the residual stream and the operand of max pooling in float32, unless the model converts them.
    ("h100", "ResNet-10", autocast.AUTOCAST): (1.40, 1.50),
    ("h100", "ResNet-10", autocast.STORED): (1.12, 1.10),
    ("h100", "U-Net", autocast.AUTOCAST): (1.35, 1.30),
    ("h100", "U-Net", autocast.STORED): (1.18, 1.12),
    # Devices whose matmuls are fast in float16 only.
    ("t4", "GPT-2 small, 2 layers", autocast.AUTOCAST): (1.06, 1.02),
    ("v100", "GPT-2 small, 2 layers", autocast.AUTOCAST): (1.06, 1.05),
    ("tpu-v5e", "GPT-2 small, 2 layers", autocast.AUTOCAST): (1.12, 1.10),
    # Float32 results are written to memory.
    ("h100", "GPT-2 small, 2 layers", autocast.RESULTS_IN_FLOAT32): (1.40, 1.40),
    ("t4", "GPT-2 small, 2 layers", autocast.RESULTS_IN_FLOAT32): (1.52, 1.42),
    ("tpu-v5e", "GPT-2 small, 2 layers", autocast.RESULTS_IN_FLOAT32): (1.32, 1.10),
    # The number of iterations of its loops is unknown, so the bytes are XLA's count, of one iteration.
    ("tpu-v5e", "GPT-2 small, 2 layers, FSDP", autocast.AUTOCAST): (1.12, 1.10),
}


@functools.cache
def _autocast_figures(backend, model, variant):
    targets.warm_up(backend)
    with jax.numpy_rank_promotion("allow"):
        return autocast.measure(backend, model, variant)


FAST = {row for row in AUTOCAST if row[0] in ("t4", "v100") or row[:2] == ("h100", "GPT-2 small, 2 layers, FSDP")}


@pytest.mark.parametrize(
    ("backend", "model", "variant"), [pytest.param(*row, marks=[full] * (row not in FAST)) for row in AUTOCAST]
)
def test_autocast_costs_little_more_than_casts_by_hand(backend, model, variant):
    if not targets.installed(backend):
        pytest.skip(f"the compiler for {backend} is not installed")
    ours, by_hand = (_autocast_figures(backend, model, cast) for cast in (variant, autocast.BY_HAND))
    ratios, (moved, memory) = compilers.ratios(ours, by_hand, autocast.RATIOS), AUTOCAST[backend, model, variant]
    count = "moved_bytes" if by_hand["moved_bytes"] else "xla_bytes"
    assert ours[count] / by_hand[count] <= moved
    assert ratios["temp_bytes"] <= memory
    assert ours["lost"] == 0


@pytest.mark.parametrize("backend", ["t4", "v100"])
def test_only_float16_matmuls_stay_in_half_precision_before_ampere(backend):
    """XLA converts bfloat16 operands to float32, so autocast to float16 is the dtype for these devices."""
    if not targets.installed(backend):
        pytest.skip(f"the compiler for {backend} is not installed")
    model = "GPT-2 small, 2 layers"
    by_hand, ours, in_float32, bfloat16 = (
        _autocast_figures(backend, model, variant)
        for variant in (autocast.BY_HAND, autocast.AUTOCAST, autocast.RESULTS_IN_FLOAT32, autocast.BFLOAT16)
    )
    assert ours["matmuls"] == in_float32["matmuls"] == by_hand["matmuls"] == {"f16": 39}
    assert bfloat16["matmuls"] == {"f32": 39}
    assert bfloat16["moved_bytes"] > 1.5 * by_hand["moved_bytes"]


# Every column that `benchmarks.accelerator` measures compiles for these devices, or is omitted for a known reason

CONVOLUTIONAL = ("ResNet-34", "U-Net")
UNSUPPORTED = {("t4", "BF16_BF16_F32"), ("v100", "BF16_BF16_F32")}


def _operands(backend, name):
    """Returns the type that the matmuls of a column have: XLA converts bfloat16 operands before Ampere."""
    if name.startswith(("float32", "BF16")):
        return "f32"
    if "bfloat16" in name:
        return "bf16" if backend == "h100" else "f32"
    return "f16"


def _column(backend, row, name):
    """Returns the figures of a column, the words of an error of the compiler, or None if a library is missing."""
    column = columns.COLUMNS[name]
    try:
        job = column.job(targets.abstract(columns.ROWS[row].smallest))
        return compilers.measure(job, column.method, targets.mesh(backend, 1))
    except ModuleNotFoundError:
        return None
    except jax.errors.JaxRuntimeError as error:
        return str(error)


@pytest.mark.parametrize("backend", ["h100", "t4", "v100"])
@pytest.mark.parametrize("row", [pytest.param(row, marks=[full] * (i > 0)) for i, row in enumerate(columns.ROWS)])
def test_columns_of_the_accelerator_benchmark_compile(backend, row):
    if not targets.installed(backend):
        pytest.skip(f"the compiler for {backend} is not installed")
    targets.warm_up(backend)
    for name in columns.COLUMNS:
        found = _column(backend, row, name)
        if (backend, name) in UNSUPPORTED and row not in CONVOLUTIONAL:
            assert "Unsupported algorithm" in found
        elif found is None:
            assert columns.COLUMNS[name].method in steps.PEERS
        else:
            assert found["moved_bytes"] > 0, name
            # JAX's precision F16_F16_F32 leaves convolutions in float32.
            assert row in CONVOLUTIONAL or set(found["matmuls"]) == {_operands(backend, name)}, name


# Autocast makes infinite float16 results NaN in the kernels that read them


S = jax.ShapeDtypeStruct


def _arrays(*shapes):
    return [S(shape, jnp.float32) for shape in shapes]


def _two_convolutions(x, a, b):
    return jax.lax.conv(jax.nn.relu(jax.lax.conv(x, a, (1, 1), "SAME")), b, (1, 1), "SAME")


def _layers(policy):
    def fun(x, a, b):
        layer = jax.checkpoint(lambda x, w: (x + jax.nn.gelu(x @ w[0] + 1) @ w[1], None), policy=policy)
        return jax.lax.scan(layer, x, (a, b))[0]

    return fun


CHECKED = {  # a function, and its arguments
    "two matmuls": (lambda x, a, b: x @ a @ b, _arrays((2048, 512), (512, 64), (64, 512))),
    "ReLU": (lambda x, a, b: jax.nn.relu(x @ a) @ b, _arrays((2048, 512), (512, 512), (512, 512))),
    "convolutions": (_two_convolutions, _arrays((8, 64, 56, 56), (64, 64, 3, 3), (64, 64, 3, 3))),
    "scan": (_layers(jax.checkpoint_policies.everything_saveable), _arrays((512, 256), (4, 256, 512), (4, 512, 256))),
    "scan, dots saved": (
        _layers(jax.checkpoint_policies.dots_saveable),
        _arrays((512, 256), (4, 256, 512), (4, 512, 256)),
    ),
}


def _compiled_gradient(backend, fun, args, **options):
    """Returns the compiled gradient of a function with autocast for one device of a backend."""
    targets.warm_up(backend)
    sharding = NamedSharding(targets.mesh(backend, 1), P())
    half = jmpscale.autocast(fun, **options)
    grad = jax.value_and_grad(lambda *args: jnp.mean(half(*args) ** 2), argnums=tuple(range(len(args))))
    return jax.jit(grad, in_shardings=sharding).lower(*args).compile()


def _differences(text):
    """Counts the instructions that subtract a value from itself."""
    return len(re.findall(r" subtract\((?:\S+ )?(%[\w.-]+), (?:\S+ )?\1\)", text))


@pytest.mark.parametrize("backend", ["h100", "t4", "tpu-v5e"])
@pytest.mark.parametrize("name", CHECKED)
def test_compilers_keep_the_check_for_infinity_and_fuse_it(backend, name, monkeypatch):
    if not targets.installed(backend):
        pytest.skip(f"the compiler for {backend} is not installed")
    fun, args = CHECKED[name]
    ours = _compiled_gradient(backend, fun, args)
    assert _differences(ours.as_text()) >= 1
    monkeypatch.setattr(rules, "_with_nan_for_infinity", jax.lax.convert_element_type)
    monkeypatch.setattr(rules, "_MEMOS", {(jnp.dtype(jnp.float16),) * 2: {}})
    unchecked = _compiled_gradient(backend, fun, args)
    assert _differences(unchecked.as_text()) == 0
    programs_of = [compilers.programs.parse(compiled.as_text()) for compiled in (ours, unchecked)]
    kernels, unchecked_kernels = map(compilers.programs.kernels, programs_of)
    # Before Ampere, XLA calls a library for a matmul, which cannot fuse the check between two matmuls.
    assert kernels <= unchecked_kernels + (backend == "t4")
    if backend != "tpu-v5e":  # its small matrices stay in on-chip memory
        moved, unchecked_moved = map(compilers.traffic.moved_bytes, programs_of)
        assert moved <= 1.02 * unchecked_moved
        assert ours.memory_analysis().temp_size_in_bytes <= 1.01 * unchecked.memory_analysis().temp_size_in_bytes


# Float32 results have operands in half precision, in the forward and the backward pass


def _attention(x, w):
    q, k, v = jnp.split((x @ w).reshape(1, 512, 24, 64), 3, axis=2)
    return jax.nn.dot_product_attention(q, k, v, implementation="xla")


WITH_RESULTS = {name: row for name, row in CHECKED.items() if name != "convolutions"}
WITH_RESULTS["attention"] = (_attention, _arrays((512, 512), (512, 1536)))
WITH_RESULTS["ragged_dot"] = (
    lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([200, 312], jnp.int32)),
    _arrays((512, 256), (2, 256, 128)),
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["h100", "t4", "tpu-v5e"])
@pytest.mark.parametrize("name", WITH_RESULTS)
def test_float32_results_have_operands_in_half_precision(backend, name, dtype):
    if not targets.installed(backend):
        pytest.skip(f"the compiler for {backend} is not installed")
    if (backend, dtype) == ("t4", "bfloat16"):
        pytest.skip("XLA converts bfloat16 operands to float32 before Ampere")
    program = _compiled_gradient(backend, *WITH_RESULTS[name], dtype=dtype, result_dtype=jnp.float32).as_text()
    parsed = compilers.programs.parse(program)
    operands = set()
    for found in parsed.computations.values():
        types = {x.name: x.type.partition("[")[0] for x in found}
        for x in found:
            if x.operation in ("dot", "convolution") or x.target.startswith("__cublas"):
                operands |= {types[operand] for operand in x.operands[:2]}
    assert operands == {dtype.replace("float", "f")}
    if dtype == "float16":
        assert _differences(program) >= 1  # NaN for infinity


@pytest.mark.parametrize(
    ("options", "dtype"), [({}, "f16"), ({"result_dtype": jnp.float32}, "f32")], ids=["half", "float32"]
)
def test_gradients_are_summed_over_devices_in_the_dtype_of_results(options, dtype):
    if not targets.installed("h100"):
        pytest.skip("the compiler for h100 is not installed")
    mesh = targets.mesh("h100", 8, shape=(8,))
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    loss_fn = jmpscale.autocast(lambda w, x: jnp.square(jnp.tanh(x) @ w).mean(), **options)
    arguments = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((256, 512), jnp.float32)
    lowered = jax.jit(jax.value_and_grad(loss_fn), in_shardings=shardings).lower(*arguments)
    reduced = re.findall(r"= (.*?) all-reduce(?:-start)?\(", lowered.compile().as_text())
    assert {found.partition("[")[0] for found in reduced if "[]" not in found} == {dtype}


# The remedies of the guide for memory use

BLOCK, BODY, EMBEDDING = "a block's result", "a scan's body", "before indexing"
HALF = r"\.astype\(jnp\.float16\)"


def _remedies(without=None):
    """Returns the functions of the guide's program, whose lines are marked with comments, without one of the lines."""
    (code,) = (code for _, code, _ in pages.blocks("guides/autocast") if BLOCK in code)
    if without:
        call, other = (r"jax\.checkpoint\(layer, policy=policy\)", "layer") if without == BODY else (HALF, "")
        code, count = re.subn(rf"{call}(?=  # {without}$)", other, code, flags=re.MULTILINE)
        assert count == 1
    namespace = {"jax": jax, "jnp": jnp}
    exec(code, namespace)
    return namespace


def _blocks_loss(functions):
    def loss(kernels, images):
        for kernel in kernels:
            images = functions["block"](kernel, images)
        return jnp.mean(images.astype(jnp.float32) ** 2)

    return loss


def _words_loss(functions):
    def loss(params, tokens):
        logits = functions["predict"](params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def _words(layers, words, width, length, batch):
    layers = {"up": S((layers, width, 2 * width), jnp.float32), "down": S((layers, 2 * width, width), jnp.float32)}
    return {"embedding": S((words, width), jnp.float32), "layers": layers}, S((batch, length), jnp.int32)


REMEDIES = {  # the loss, its arguments, the number of devices, the figure, and the largest ratio to it without the line
    BLOCK: (_blocks_loss, (_arrays(*[(64, 64, 3, 3)] * 4), S((32, 64, 56, 56), jnp.float32)), 1, "temp", 0.85),
    BODY: (_words_loss, _words(4, 8192, 512, 257, 8), 1, "temp", 0.7),
    EMBEDDING: (_words_loss, _words(2, 8192, 512, 257, 64), 8, "communicated", 0.97),
}


def _figure(figure, make_loss, args, devices, without):
    targets.warm_up("h100")
    mesh = targets.mesh("h100", devices, (devices, 1))
    # Parameters are sharded along their first axis, or the first axis of each layer, and the batch along its own.
    params = jax.tree.map(lambda x: NamedSharding(mesh, P(*(None,) * (len(x.shape) - 2), "data")), args[0])
    batch = NamedSharding(mesh, P("data"))
    grad = jax.grad(jmpscale.autocast(make_loss(_remedies(without))))
    compiled = jax.jit(grad, in_shardings=(params, batch), out_shardings=params).lower(*args).compile()
    if figure == "temp":
        return compiled.memory_analysis().temp_size_in_bytes
    return compilers.traffic.communicated_bytes(compilers.programs.parse(compiled.as_text()))


@pytest.mark.parametrize("line", REMEDIES)
def test_remedy_of_the_guide_saves_memory_or_communication(line):
    if not targets.installed("h100"):
        pytest.skip("the compiler for h100 is not installed")
    make_loss, args, devices, figure, limit = REMEDIES[line]
    with_line, without = (_figure(figure, make_loss, args, devices, without) for without in (None, line))
    assert with_line <= limit * without


# A step costs little more than clipping on CPU


# The kernels have a margin of 5 for a few more counters in the state, each of which costs one on CPU.
LIMITS_ON_CPU = {
    "functional": {"moved_bytes": 0.95, "temp_bytes": 0.7, "added_kernels": 24},
    "optax wrapper": {"moved_bytes": 1.09, "temp_bytes": 0.7, "added_kernels": 32},
    "optax wrapper, max_norm": {"moved_bytes": 1.17, "temp_bytes": 0.8, "added_kernels": 26},
    "scaled_backward": {"moved_bytes": 1.09, "temp_bytes": 0.7, "added_kernels": 27},
}


@full
@pytest.mark.parametrize("method", LIMITS_ON_CPU)
def test_step_on_cpu_costs_little_more_than_clipping(method):
    ours, baseline = (_figures("cpu", name) for name in (method, steps.BASELINE))
    costs = _ratios(ours, baseline) | {"added_kernels": ours["kernels"] - baseline["kernels"]}
    assert not {name: cost for name, cost in costs.items() if cost > LIMITS_ON_CPU[method][name]}
    assert (ours["copies_of_state"], ours["branches"], ours["collectives"]) == (0, 1, {})


@full
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_wrapper_on_cpu_holds_one_more_gradient(optimizer):
    """A gradient is in memory both before and after it is unscaled."""
    ours, baseline = (_figures("cpu", name, optimizer) for name in ("optax wrapper", steps.BASELINE))
    assert ours["temp_bytes"] <= baseline["temp_bytes"] + 1.3 * 4 * 64**2


@full
@pytest.mark.parametrize("method", ["functional", "optax wrapper, max_norm"])
def test_sharded_step_on_cpu_adds_no_gathers(method):
    _check_collectives(*(_figures("cpu", name, devices=8) for name in (method, steps.BASELINE)))


@full
@pytest.mark.parametrize("method", [steps.optax_wrapper, steps.functional], ids=["wrapper", "functional"])
def test_disabled_scaler_compiles_to_the_bare_step(method):
    job = steps.make_job(steps.mlp(1, 8, 4))
    programs = []
    for init, step in (steps.bare(job), method(job, scaler=jmpscale.disabled())):
        programs.append(instructions(compiled(step, init(job.params), job.batch, donate_argnums=0)))
    assert programs[0] == programs[1]


# Few collectives are added


def _wrapped(grads, loss, **options):
    tx = jmpscale.with_loss_scaling(optax.scale(-1.0), **options)
    updates, state = tx.update(grads, tx.init(grads), value=loss)
    return updates, state.scaler


def _updated(grads, loss):
    scaler = jmpscale.dynamic()
    grads, finite = jmpscale.unscale_and_check(scaler, grads)
    return grads, jmpscale.update(scaler, finite, loss=loss)


BOTH = P(("data", "model"))
COLLECTIVES = {  # the function, the specs of the gradients and of the loss, and the number of collectives
    "everything summed": (_wrapped, P(), P(), 0),
    "gradients sharded": (_wrapped, P("data"), P(), 1),
    "loss sharded": (_wrapped, P(), P("data"), 1),
    "sharded along different axes": (_wrapped, P("model"), P("data"), 1),
    "sharded along both axes": (_wrapped, BOTH, BOTH, 1),
    "max_norm": (functools.partial(_wrapped, max_norm=1.0), P("model"), P("data"), 2),
    "all_finite and update": (_updated, P("model"), P("data"), 2),
    "grad_report": (lambda grads, _: (grads, jmpscale.grad_report(grads)), P("data"), P(), 2),
}
DEFAULT = ("sharded along both axes", "max_norm", "all_finite and update", "grad_report")


@pytest.mark.parametrize("row", rows(COLLECTIVES, default=DEFAULT))
def test_functions_lower_to_few_collectives(row):
    """The collectives are counted before XLA combines them, for ten leaves."""
    call, grads_spec, loss_spec, expected = row
    mesh = meshes.make_mesh()
    fn = jax.shard_map(call, mesh=mesh, in_specs=(grads_spec, loss_spec), out_specs=(grads_spec, P()))
    program = jax.jit(fn).lower([np.ones((8, 8), np.float32)] * 10, np.ones(8, np.float32)).as_text()
    found = re.findall(r"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_\w+)", program)
    assert found == ["all_reduce"] * expected


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_unscale_and_check_of_shards_reduces_only_scalars(axis_type):
    mesh = meshes.make_mesh(axis_type)
    specs = [P("data", "model"), P("model"), P(), P("data")]
    with jax.set_mesh(mesh):
        grads = [jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, spec)) for spec in specs]
        program = compiled(_updated, grads, None)
    reduced = re.findall(r"= (.*?) all-reduce(?:-start)?\(", program)
    assert reduced
    assert not re.findall(r"\[\d", "".join(reduced))
    assert count(program, "all-gather", "reduce-scatter", "all-to-all", "collective-permute") == 0
