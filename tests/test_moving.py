"""The migration guides: the old program against the new one, and the promises of the examples."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpscale
from jmpscale.testing import assert_replicated, assert_step_is_noop

import pages
from cases import some

pytestmark = [
    pytest.mark.once,
    pytest.mark.usefixtures("standard_promotion"),  # optax, Flax and jmp rely on it
    pytest.mark.filterwarnings("ignore:jax.interpreters.batching.NotMapped"),  # Equinox does on JAX 0.7
]

GUIDES = [page for page in pages.PAGES if page.startswith("moving/")]


def _hunks(page, heading):
    """Returns the text before and after each diff under a heading."""
    text = (pages.DOCS / f"{page}.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    hunks = []
    for block in re.findall(r"^```diff\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        lines = [line or " " for line in block.splitlines()]
        hunks.append(tuple("".join(line[1:] + "\n" for line in lines if line[0] in keep) for keep in (" -", " +")))
    return hunks


@pytest.mark.parametrize("page", GUIDES)
def test_the_diffs_of_a_guide_end_in_its_examples(page):
    for heading, example in pages.examples(page).items():
        for _, after in _hunks(page, heading):
            assert example.count(after) == 1, (heading, after)


def _old_program(page, heading):
    """Returns the program from before the change: the example, with its diffs undone."""
    source = pages.examples(page)[heading]
    for before, after in _hunks(page, heading):
        source = source.replace(after, before)
    assert "jmpscale" not in source
    return source


def _batch(seed):
    x = np.random.default_rng(seed).standard_normal((8, 3), np.float32)
    return x, np.tanh(x.sum(1, keepdims=True))


OVERFLOW = _batch(0)[0], np.full((8, 1), 6e4, np.float32)  # a finite loss whose scaled gradient is no float16
NOT_A_NUMBER = np.full((8, 3), np.inf, np.float32), np.ones((8, 1), np.float32)  # tanh has no gradient there
PROGRAMS = {
    # page: the module that it needs, the names of the carry before and after the change, and a batch that is skipped
    "moving/jmp": ("jmp", ["params", "opt_state", "loss_scale"], ["params", "opt_state", "scaler"], OVERFLOW),
    "moving/flax": ("flax", ["state", "dynamic_scale"], ["state", "scaler"], OVERFLOW),
    "moving/mpx": ("mpx", ["model", "opt_state", "scaler"], ["model", "opt_state", "scaler"], OVERFLOW),
    "moving/apply_if_finite": ("optax", ["params", "opt_state"], ["params", "opt_state"], NOT_A_NUMBER),
}


def _arrays(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, (jax.Array, np.ndarray))]


def _copy(tree):
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, jax.Array) else x, tree)


@pytest.mark.parametrize("page", some(list(PROGRAMS), default=[]))
def test_the_old_program_and_the_new_one_train_alike(page):
    """Both start from the same parameters; on two of the batches the new program skips, and changes nothing."""
    module, old_names, new_names, skipped_batch = PROGRAMS[page]
    pytest.importorskip(module, reason=f"{module} is not installed")
    old = {}
    exec(compile(_old_program(page, "The training step"), f"docs/{page}.md, before", "exec"), old)
    new = pages.run(page, "The training step")
    old_carry, new_carry = [old[name] for name in old_names], [new[name] for name in new_names]
    for step in range(6):
        skip = step in (2, 3)
        batch = skipped_batch if skip else _batch(step)
        kept = _copy(new_carry[:2] if page != "moving/flax" else new_carry[0])
        scaler = _scaler_in(new_carry)
        skipped = scaler.skipped.item()
        old_carry = old["train_step"](*old_carry, batch)[: len(old_carry)]
        new_carry = new["train_step"](*new_carry, batch)[: len(new_carry)]
        scaler = _scaler_in(new_carry)
        assert scaler.skipped == skipped + skip
        if skip:
            trained = new_carry[:2] if page != "moving/flax" else new_carry[0]
            assert_step_is_noop(_without_scaler(kept), _without_scaler(trained))
        _assert_alike(page, old_carry, new_carry)


def _scaler_in(carry):
    return carry[-1] if isinstance(carry[-1], jmpscale.ScalerState) else jmpscale.get_scaler(carry[-1])


def _without_scaler(tree):
    """Returns the arrays of a tree, except those of its scaler."""
    return _arrays(jax.tree.map(lambda x: 0 if _is_scaler(x) else x, tree, is_leaf=_is_scaler))


def _is_scaler(x):
    return isinstance(x, jmpscale.ScalerState)


def _assert_alike(page, old_carry, new_carry):
    if page == "moving/flax":
        (old, dynamic_scale), (new, scaler) = old_carry, new_carry
        assert old.step == new.step + scaler.skipped, "Flax also counts the steps that it skips"
        assert dynamic_scale.scale == scaler.loss_scale
        old_carry, new_carry = (old.params, old.opt_state), (new.params, new.opt_state)
    elif page == "moving/apply_if_finite":
        old_carry, new_carry = (old_carry[0], old_carry[1].inner_state), (new_carry[0], new_carry[1].inner_state)
    else:
        theirs = old_carry[2].loss_scale if page == "moving/jmp" else old_carry[2].loss_scaling
        assert theirs == new_carry[2].loss_scale
        old_carry, new_carry = old_carry[:2], new_carry[:2]
    for a, b in zip(_arrays(old_carry), _arrays(new_carry), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_torchs_training_loop_and_its_translation_train_alike():
    """Runs the loop of the guide in torch, under float16 autocast on the CPU, and compares the example with it."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    new = pages.run("moving/torch", "The training loop")
    batches = [OVERFLOW if step in (3, 4) else _batch(step) for step in range(12)]
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.1)

    def loss_fn(model, batch):
        x, y = map(torch.from_numpy, batch)
        return torch.mean((torch.tanh(model(x)).float() - y) ** 2)

    old = {"torch": torch, "device": "cpu", "model": model, "batches": batches, "loss_fn": loss_fn}
    exec(_hunks("moving/torch", "The training loop")[0][0], old)
    params = {"w": jnp.full((3, 1), 0.1)}
    opt_state = new["tx"].init(params)
    scaler = jmpscale.dynamic(min_scale=2.0**-126, max_scale=2.0**126)
    for batch in batches:
        params, opt_state, scaler, _ = new["train_step"](params, opt_state, scaler, batch)
    assert scaler.skipped >= 2
    assert old["scaler"].get_scale() == scaler.loss_scale
    np.testing.assert_allclose(params["w"], model.weight.detach().numpy().T, rtol=1e-3)


def _assert_equals_an_unscaled_step(example, before, batch, after):
    """Compares parameters and optimizer state with those of a step on gradients that were never scaled."""

    @jax.jit
    def step(params, opt_state):
        grads = jax.grad(example["loss_fn"])(params, batch)
        updates, opt_state = example["tx"].update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-2), after, step(*before))


def test_the_example_of_the_training_loop_trains_and_skips_whole():
    example = pages.run("moving/torch", "The training loop")
    start = {"w": jnp.full((3, 1), 0.1)}
    params, opt_state, scaler = (example[name] for name in ("params", "opt_state", "scaler"))
    assert example["loss_fn"](params, _batch(1)) < 0.9 * example["loss_fn"](start, _batch(1))
    kept, before = _copy((params, opt_state)), jmpscale.to_torch_state_dict(scaler)
    params, opt_state, scaler, _ = example["train_step"](params, opt_state, scaler, OVERFLOW)
    assert_step_is_noop(kept, (params, opt_state))
    assert jmpscale.to_torch_state_dict(scaler) == before | {"scale": before["scale"] / 2, "_growth_tracker": 0}
    params, opt_state, _, _ = example["train_step"](params, opt_state, scaler, _batch(2))
    _assert_equals_an_unscaled_step(example, kept, _batch(2), (params, opt_state))


@pytest.mark.full
def test_the_example_of_accumulation_equals_the_full_batch_and_skips_the_window():
    example = pages.run("moving/torch", "Gradient accumulation")
    names = ("params", "opt_state", "scaler")
    start = [example[name] for name in names]
    window = [np.stack(parts) for parts in zip(*map(_batch, range(4)), strict=True)]
    *after, _ = example["train_step"](*start, tuple(window))
    full_batch = tuple(part.reshape(32, -1) for part in window)
    _assert_equals_an_unscaled_step(example, start[:2], full_batch, tuple(after))
    for position in range(4):
        overflowing = tuple(part.copy() for part in window)
        for part, overflow_part in zip(overflowing, OVERFLOW, strict=True):
            part[position] = overflow_part
        *trained, scaler = example["train_step"](*start, overflowing)
        assert_step_is_noop(start[:2], trained)
        assert scaler.loss_scale == start[2].loss_scale / 2


def test_the_example_of_several_optimizers_skips_each_alone_and_backs_off_for_any():
    example = pages.run("moving/torch", "Several optimizers")
    x, tx = _batch(0)[0], example["optimizers"]
    # With these parameters the second loss is 0, and one gradient is 0.7 / 0.3 times the other: some power of two lies
    # between the scales at which each of them begins to overflow.
    params = {"a": jnp.full((3, 1), 0.5), "b": jnp.full((3, 1), 0.75)}
    states = {name: tx[name].init(params[name]) for name in tx}
    seen = set()
    for exponent in range(14, 22):
        scaler = jmpscale.dynamic(2.0**exponent)
        new_params, new_states, after = example["train_step"](params, states, scaler, x)
        moved = {name: bool((new_params[name] != params[name]).any()) for name in params}
        for name in (name for name in moved if not moved[name]):
            assert_step_is_noop((params[name], states[name]), (new_params[name], new_states[name]))
        assert after.loss_scale == (scaler.loss_scale if all(moved.values()) else scaler.loss_scale / 2)
        seen.add(tuple(moved.items()))
    assert (("a", True), ("b", False)) in seen
    assert (("a", True), ("b", True)) in seen


def test_the_example_of_a_penalty_recovers_from_an_inner_overflow():
    example = pages.run("moving/torch", "Gradient penalty")
    params, batch = {"w": jnp.full((3, 1), 0.1)}, _batch(0)
    scaler = jmpscale.dynamic(2.0**22)
    after, scaler = example["train_step"](params, scaler, batch)
    while scaler.consecutive_skips > 0:
        assert_step_is_noop(params, after)
        assert scaler.last_skip == jmpscale.SkipReason.GRADIENTS, "the plain loss is finite"
        after, scaler = example["train_step"](params, scaler, batch)
    assert scaler.skipped > 0
    plain = example["plain_loss"]

    @jax.jit
    @jax.value_and_grad
    def reference(params):
        return plain(params, batch) + optax.tree.norm(jax.grad(plain)(params, batch))

    loss, grads = reference(params)
    np.testing.assert_allclose(jax.jit(example["loss_fn"])(params, scaler, batch)[0], loss, rtol=1e-3)
    np.testing.assert_allclose(after["w"], params["w"] - 0.1 * grads["w"], rtol=2e-3)


@pytest.mark.full
def test_the_example_of_sharded_training_skips_on_every_device():
    example = pages.run("moving/torch", "ShardedGradScaler")
    params, opt_state, scaler = (example[name] for name in ("params", "opt_state", "scaler"))
    assert len(params["w"].sharding.device_set) == 8
    x, y = example["batch"]
    with jax.set_mesh(example["mesh"]):
        overflowing = jax.device_put((x, y.at[-1].set(6e4)), example["shard"])  # a row of the last device
        *trained, after, _ = example["train_step"](params, opt_state, scaler, overflowing)
        assert_step_is_noop((params, opt_state), tuple(trained))
        assert_replicated(after)
        assert (after.loss_scale, after.consecutive_skips) == (scaler.loss_scale / 2, 1)
        moved, *_ = example["train_step"](params, opt_state, scaler, (x, y))
    assert (moved["w"] != params["w"]).all()


def test_the_example_of_a_running_jobs_state_continues_where_torch_stopped():
    example = pages.run("moving/torch", "A running job's state")
    assert example["scaler"].loss_scale == 16384.0
    assert example["saved"] == example["checkpoint"]["scaler"] | {"scale": 16384.0, "_growth_tracker": 0}


def test_the_example_with_a_loss_scale_skips_and_keeps_the_inner_state():
    example = pages.run("moving/apply_if_finite", "With a loss scale")
    params, opt_state = example["params"], example["opt_state"]
    kept, before = _copy((params, opt_state.inner_state)), float(jmpscale.get_scaler(opt_state).loss_scale)
    params, opt_state, _ = example["train_step"](params, opt_state, OVERFLOW)
    assert_step_is_noop(kept, (params, opt_state.inner_state))
    assert jmpscale.get_scaler(opt_state).loss_scale == before / 2
