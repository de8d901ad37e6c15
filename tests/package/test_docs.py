"""Runs the code of the README and of the documentation, and compares its output with the page."""

import contextlib
import functools
import io
import math
import re
import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest

import jmpscale
from jmpscale.testing import check_step

import pages
from messages import NEVER_SCALED, ONE_SCALER
from tables import rows

pytestmark = pytest.mark.usefixtures("standard_promotion", "nothing_scaled")

README = (pages.DOCS.parent / "README.md").read_text()
README_BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
README_PYTHON, README_TEXTS, README_DIFFS = (
    [x for language, x in README_BLOCKS if language == kind] for kind in ("python", "text", "diff")
)
[README_PROGRAM] = (code for code in README_PYTHON if "RunMonitor" in code)
[README_ADVICE] = re.findall(r"^diagnosis = .*?^    .*?\n", README_PROGRAM, flags=re.MULTILINE | re.DOTALL)
README_TRAINING = README_PROGRAM.replace(README_ADVICE, "")  # begins with the default scale
# `test_program_trains_before_and_after_the_first_diff` runs the programs before and after the diff of the overview.
# `tests/frameworks` runs the programs after the changes on the pages on frameworks, and `test_common_mistakes.py` the
# page on mistakes.
UNTESTED_DIFFS = {"index", "guides/levanter", "guides/training_loops", "guides/tunix", "common_mistakes"}
DIFFS = [(page, diff) for page in pages.PAGES if page not in UNTESTED_DIFFS for diff in pages.diffs(page)]
MIN_TRAINING_STEPS = 20  # a block with fewer losses is not a training run


@pytest.mark.full
def test_readme_runs_as_pasted(capsys):
    namespace = {"__name__": "README.md"}
    printed = []
    for code in README_PYTHON:
        run_block(code, "README.md", namespace)
        printed += filter(None, [capsys.readouterr().out])
    if jax.default_backend() == "cpu":  # other devices round differently
        for ours, theirs in zip(printed, README_TEXTS, strict=True):
            pages.assert_same_output(ours, theirs)


@pytest.mark.full
def test_functional_step_of_the_readme_passes_the_check(capsys):
    namespace = {"__name__": "README.md"}
    pages.run(README_PYTHON[0], namespace)
    arguments = (namespace[name] for name in ("params", "opt_state", "scaler"))
    check_step(namespace["train_step"])(*arguments, (namespace["x"], namespace["y"]))
    assert not capsys.readouterr().out


@pytest.mark.full
def test_readme_program_needs_loss_scaling():
    """The sentences below the program compare it with float32 and with float16 without loss scaling."""
    program = README_TRAINING
    [output] = (re.search(r".* nats per word", text)[0] for text in README_TEXTS if "nats per word" in text)
    [higher] = map(float, re.findall(r"the loss ends (\d\.\d) nats higher", README))
    changes = {"@jmpscale.autocast\n": "", "optax.adam(5e-3))": "optax.adam(5e-3), jmpscale.disabled())"}
    assert all(program.count(line) == 1 for line in changes)
    without = [program.replace(*change) for change in changes.items()]
    float32, float16 = (pages.run(code, {"__name__": "README.md"})[-1] for code in without)
    # The manual differs between versions of Python.
    assert float(output.split()[0]) == pytest.approx(float32, abs=0.15)
    assert float16 - float32 == pytest.approx(higher, abs=0.1)


def _train_with_invalid_steps(every):
    """Returns a step that applies one step in `every` of a training step, and skips the others."""

    def planted(train_step, step, params, opt_state, batch):
        if step % every == 0:
            return train_step(params, opt_state, batch)
        invalid = jax.tree.map(lambda x: x * float("nan"), params)
        return params, *train_step(invalid, opt_state, batch)[1:]

    return planted


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("every", "skips"),
    [
        pytest.param(2, None, marks=pytest.mark.full),
        (3, "27 of the last 40"),
        pytest.param(12, "19 of the last 20", marks=pytest.mark.full),
    ],
)
def test_monitor_of_the_readme_raises_if_most_steps_are_skipped(every, skips):
    program = README_TRAINING
    for line, planted in {
        "2048": "8",
        "train_step(params, opt_state, batch)\n    if": "planted(train_step, step, params, opt_state, batch)\n    if",
    }.items():
        assert program.count(line) == 1
        program = program.replace(line, planted)
    namespace = {"__name__": "README.md", "planted": _train_with_invalid_steps(every)}
    if skips is None:
        pages.run(program, namespace)
        return
    with pytest.raises(FloatingPointError, match=f"^{skips} steps were skipped"):
        pages.run(program, namespace)


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
def test_monitor_of_the_readme_warns_if_the_loop_loses_the_state():
    program = README_TRAINING.replace("2048", "8")
    assert program.count("params, opt_state, loss = train_step(") == 1
    program = program.replace("params, opt_state, loss = train_step(", "params, _, loss = train_step(")
    with pytest.raises(UserWarning, match=r"^At 3 calls total_steps of the scaler"):
        pages.run(program, {"__name__": "README.md"})


FORGOTTEN = {  # a changed line of the README's program, the original line, and the type and start of the message
    "autocast": ("@jmpscale.autocast\n", "", None, None),  # a program in float32
    "with_loss_scaling": (
        "tx = jmpscale.with_loss_scaling(optax.adam(5e-3))",
        "tx = optax.adam(5e-3)",
        ValueError,
        f"scaler must contain {ONE_SCALER} 0",
    ),
    "value_and_grad": (
        "jmpscale.value_and_grad(loss_fn)(opt_state, params, batch)",
        "jax.value_and_grad(loss_fn)(params, batch)",
        UserWarning,
        NEVER_SCALED,
    ),
    "value": (", value=loss)", ")", UserWarning, "update does not see that the loss is not finite"),
}


@pytest.mark.full
@pytest.mark.guards
@pytest.mark.parametrize("forgotten", rows(FORGOTTEN, default={"with_loss_scaling", "value_and_grad"}))
def test_readme_program_reports_a_forgotten_line(forgotten):
    """The last of the four changed lines is missed by `check_step` only, as the README calls it."""
    new, old, kind, message = forgotten
    program, check = README_TRAINING, README_PYTHON[README_PYTHON.index(README_PROGRAM) + 1]
    assert program.count(new) == program.count("size=(90, 2048)") == 1
    program = program.replace(new, old).replace("size=(90, 2048)", "size=(2, 64)")
    with pytest.raises(kind, match=message) if kind else contextlib.nullcontext():  # warnings are errors
        pages.run(program + check, {"__name__": "README.md"})


def _side(diff, sign):
    """Returns the program before (`-`) or after (`+`) a diff that shows all of its lines."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (sign, " "))


@pytest.mark.parametrize("diff", [README_DIFFS[0], *pages.diffs("index")], ids=["README", "index"])
def test_program_trains_before_and_after_the_first_diff(diff):
    """After the diff, a program whose gradients underflow in float16 trains as in float32."""

    def loss_fn(params, batch):
        return 2.0**-24 * jnp.square(batch @ params - 1).mean()

    def train(code):
        namespace = {"jax": jax, "jmpscale": jmpscale, "optax": optax, "loss_fn": loss_fn}
        exec(code, namespace)
        params, batch = jnp.zeros((8, 1)), jnp.eye(8)
        opt_state = namespace["tx"].init(params)
        for _ in range(40):
            params, opt_state, _ = namespace["train_step"](params, opt_state, batch)
        return params, opt_state

    (before, _), (after, opt_state) = train(_side(diff, "-")), train(_side(diff, "+"))
    assert jnp.all(before > 0.01)
    assert jnp.allclose(after, before, rtol=1e-2)
    assert jmpscale.get_scaler(opt_state).total_steps == 40


@pytest.mark.full
def test_readme_step_passes_the_check_after_the_diff(capsys):
    program = pages.apply_diff(README_DIFFS[-1], README_PYTHON[-1])
    pages.run(program, {"__name__": "README.md"})
    assert not capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(("size", "skips"), [(0.1, 0), pytest.param(30.0, 1, id="2^16 is too large")])
def test_scaler_that_the_readme_advises_skips_no_first_step(size, skips):
    """Runs the lines of the program; `skips` is what the default scale does to the first step."""

    def loss_fn(params, batch):
        return jnp.square(batch @ params).mean()

    def train_step(params, opt_state, batch):
        loss, grads = jmpscale.value_and_grad(jmpscale.autocast(loss_fn))(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return params + updates, opt_state, loss

    def skips_of_first_step(opt_state):
        return jmpscale.get_scaler(train_step(params, opt_state, batch)[1]).total_skips

    tx = jmpscale.with_loss_scaling(optax.adam(1e-3))
    params, batch = jnp.ones((8, 1)), jnp.full((8, 8), size / 8)
    default = tx.init(params)
    assert skips_of_first_step(default) == skips
    namespace = {"train_step": train_step, "params": params, "opt_state": default, "batches": [batch]}
    namespace |= {"jmpscale": jmpscale, "textwrap": textwrap}
    pages.run(README_ADVICE, namespace)
    assert (namespace["opt_state"] is default) == (skips == 0)
    assert skips_of_first_step(namespace["opt_state"]) == 0


def test_links_are_found_and_broken_links_do_not_resolve():
    readme = pages.ROOT / "README.md"
    assert len([target for target in pages.links(readme) if "://" not in target]) >= 8
    assert pages.resolves(readme, "docs/how_it_works.md#how-steps-are-skipped")
    assert not pages.resolves(readme, "docs/how_it_works.md#no-such-heading")
    assert not pages.resolves(readme, "docs/no_such_page.md")


@pytest.mark.parametrize("path", pages.TEXTS, ids=lambda path: str(path.relative_to(pages.ROOT)))
def test_links_resolve(path):
    """The anchors are tested as code hosts form them from headings; Sphinx tests the anchors of the site."""
    targets = [target for target in pages.links(path) if "://" not in target]
    assert [target for target in targets if not pages.resolves(path, target)] == []


def test_overview_links_every_page():
    linked = {(pages.DOCS / target.partition("#")[0]).resolve() for target in pages.links(pages.DOCS / "index.md")}
    missing = {path.resolve() for path in pages.TEXTS} - linked
    for_code_hosts = {"README.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"}
    assert {path.name for path in missing} == {"index.md"} | for_code_hosts


def run_block(code, name, namespace):
    """Runs a block of a page, requires that the loss of a training run falls, and returns the finite losses."""
    losses = pages.run(code, namespace)
    losses = [loss for loss in losses if math.isfinite(loss)]  # the loss of a skipped step may be NaN
    if len(losses) >= MIN_TRAINING_STEPS:
        assert sum(losses[-5:]) < sum(losses[:5]), f"{name}: the loss did not fall, {losses}"
    return losses


# The result of the first training run of a page, where lower is better; test_frameworks.py trains with frameworks.
RESULTS = {
    "guides/accumulation": "loss",
    "guides/devices": "loss",
    "guides/higher_order": "loss",
    "guides/multiple_losses": "loss",
    "guides/optax": "sum(losses[-20:])",
    "guides/reinforcement_learning": "-rewards[-1]",
    "guides/training_loops": "trainer.loss",
}


def result_of(page, namespace):
    """Returns the result of a page, or None if its blocks so far only define functions and data."""
    try:
        return float(eval(RESULTS[page], namespace))
    except NameError:
        return None


@functools.cache
def run_page(page):
    """Runs a page, and returns what each block prints with what the page shows, and the result of its first run."""
    namespace, outputs, result = {"__name__": f"docs/{page}.md"}, [], None
    for heading, code, expected in pages.blocks(page):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run_block(code, f"docs/{page}.md, {heading!r}", namespace)
        outputs.append((printed.getvalue(), expected))
        if page in RESULTS and result is None:
            result = result_of(page, namespace)
    return outputs, result


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in pages.PAGES if pages.blocks(page)])
def test_page_runs_as_pasted(page):
    for printed, expected in run_page(page)[0]:
        if expected is not None:
            pages.assert_same_output("\n".join(printed.splitlines()[-expected.count("\n") :]), expected)


@pytest.mark.full
@pytest.mark.parametrize("page", RESULTS)
def test_page_trains_as_well_as_float32(page, monkeypatch):
    _, ours = run_page(page)
    with_loss_scaling, disabled = jmpscale.with_loss_scaling, jmpscale.disabled()
    for name in "dynamic", "static":
        monkeypatch.setattr(jmpscale, name, lambda *_, **__: disabled)
    monkeypatch.setattr(
        jmpscale, "with_loss_scaling", lambda tx, _=None, **options: with_loss_scaling(tx, disabled, **options)
    )
    monkeypatch.setattr(jmpscale, "autocast", lambda fun: fun)
    namespace, float32 = {"__name__": f"docs/{page}.md"}, None
    for _, code, _ in pages.blocks(page):
        if float32 is None:
            pages.run(code.replace("jnp.float16", "jnp.float32"), namespace)
            float32 = result_of(page, namespace)
    assert ours - float32 <= 0.1 * abs(float32)


@pytest.mark.full
@pytest.mark.parametrize(("page", "diff"), DIFFS, ids=[page for page, _ in DIFFS])
def test_program_runs_after_a_diff(page, diff):
    """A diff changes the last block of its page that has all its lines."""
    blocks = [(heading, code) for heading, code, _ in pages.blocks(page)]
    changed = [pages.apply_diff(diff, code) for _, code in blocks]
    fitting = [i for i, code in enumerate(changed) if code is not None]
    assert fitting, "no block of the page has all lines of the diff"
    last = fitting[-1]
    namespace = {"__name__": f"docs/{page}.md"}
    for heading, code in [*blocks[:last], (blocks[last][0], changed[last])]:
        losses = run_block(code, f"docs/{page}.md, {heading!r}", namespace)
    assert len(losses) >= MIN_TRAINING_STEPS, "the changed block does not train"


@pytest.mark.full
def test_recurrent_state_that_is_not_gated_keeps_every_later_step_from_being_applied():
    """So the page on a loop of one's own says of its first program, and that check_step names the state."""
    (_, program, _), (_, check, _), *_ = pages.blocks("guides/your_own_loop")
    line = "state = jmpscale.select_tree(applied, new_state, state)"
    assert program.count(line) == 1
    program = program.replace(line, "state = new_state")
    with pytest.raises(FloatingPointError, match="51 consecutive steps were skipped"):
        pages.run(program, {"__name__": "your_own_loop.md"})
    namespace = {"__name__": "your_own_loop.md"}
    pages.run(program.replace("range(200)", "range(20)"), namespace)
    with pytest.raises(AssertionError, match=r"skipped step changed state\['hidden'\]"):
        pages.run(check, namespace)


RECIPES = {  # steps of the recipes from PyTorch; their optimizers and data, if not `tx` and `batch`
    "train_step": {},
    "clipped_step": {"tx": "clipped_tx"},
    "accumulated_step": {"batch": "micro_batches"},
    "penalized_step": {},
    "custom_step": {},
    "partly_half_step": {},
    "inspected_step": {},
}


@pytest.mark.full
def test_recipes_from_torch_pass_the_check():
    namespace = {"__name__": "docs/moving/torch_recipes.md"}
    for _, code, _ in pages.blocks("moving/torch_recipes"):
        pages.run(code, namespace)
    for name, other in RECIPES.items():
        tx, batch = namespace[other.get("tx", "tx")], namespace[other.get("batch", "batch")]
        params = namespace["start"]
        check_step(namespace[name])(params, tx.init(params), jmpscale.dynamic(), batch)
    models = {name: namespace["init"](jax.random.key(0)) for name in namespace["optimizers"]}
    opt_states = {name: tx.init(models[name]) for name, tx in namespace["optimizers"].items()}
    check = check_step(namespace["two_models_step"], ignore=("models", "opt_states"))
    check(models, opt_states, jmpscale.dynamic(), namespace["batch"])


WIDTH = 100  # characters of output or of a notebook's code that the site shows without a scroll bar


def _too_long(*texts):
    return [line for text in texts for line in text.splitlines() if len(line) > WIDTH]


@pytest.mark.parametrize("path", pages.TEXTS, ids=lambda path: str(path.relative_to(pages.ROOT)))
def test_printed_lines_fit_the_site(path):
    assert _too_long(*pages.printed(path)) == []


NOTEBOOKS = [path for path in pages.TEXTS if path.suffix == ".ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_of_notebook_fits_the_site(path):
    assert _too_long(*(code for code, _ in pages.cells(path))) == []


def test_pages_and_notebooks_print():
    """The tests of the widths find the lines."""
    printing = {path.stem for path in pages.TEXTS if any(pages.printed(path))}
    assert {path.stem for path in NOTEBOOKS} | {"README", "diagnose"} <= printing


def test_pages_have_only_known_kinds_of_blocks():
    """A block with another language on its fence would not run."""
    languages = {
        fence
        for page in pages.PAGES
        for fence in re.findall(r"^```(.+)$", (pages.DOCS / f"{page}.md").read_text(), re.M)
    }
    assert languages <= {"python", "text", "bash", "diff", "py", "{toctree}"}


def test_assert_same_output_tolerates_the_last_digit():
    pages.assert_same_output("loss 0.196, 1 of 200", "loss 0.194, 1 of 200")
    for printed in ("loss 0.199, 1 of 200", "loss 0.194, 2 of 200", "loss 0.194, 1 of 200 steps"):
        with pytest.raises(AssertionError):
            pages.assert_same_output(printed, "loss 0.194, 1 of 200")
