"""The package as a whole: its names, its imports, its documentation, its types."""

import ast
import importlib.metadata
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import jmpscale

pytestmark = pytest.mark.once

PACKAGE = pathlib.Path(jmpscale.__file__).parent
ROOT = pathlib.Path(__file__).parent.parent
MODULES = sorted(PACKAGE.glob("*.py"))
LAYERS = [  # from the lowest to the highest
    "_state",
    "_tree",
    "_finite",
    "_scaling",
    "_exchange",
    "_report",
    "_gate",
    "_step",
    "_optax",
    "__init__",
    "testing",
    "plots",
    "__main__",
]


def _run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_all_names_everything_that_is_public_and_nothing_else():
    names = [name for name, value in vars(jmpscale).items() if not name.startswith("_") and not inspect.ismodule(value)]
    assert sorted(names) == jmpscale.__all__
    assert jmpscale.__version__ == importlib.metadata.version("jmpscale")
    assert (PACKAGE / "py.typed").exists()


def test_the_api_page_lists_every_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, flags=re.MULTILINE)
    assert sorted(listed) == jmpscale.__all__


def test_skip_reason_has_three_values():
    assert {reason.name: int(reason) for reason in jmpscale.SkipReason} == {"NONE": 0, "GRADIENTS": 1, "LOSS": 2}


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.name)
def test_imports_go_from_higher_modules_to_lower_ones(path):
    layer = LAYERS.index(path.stem)
    for module in _imports(path):
        if module.startswith("jmpscale._"):
            assert path.stem != "__main__", "the demonstration uses public names only"
            assert LAYERS.index(module.removeprefix("jmpscale.")) < layer, module
        if module.split(".")[0] == "optax":
            assert path.stem in ("_optax", "__main__")
        assert module.split(".")[0] not in ("flax", "chex", "equinox", "haiku", "torch", "jmp")
        assert not module.startswith("jax._src")


@pytest.mark.parametrize("name", jmpscale.__all__)
def test_docstrings_document_exactly_the_parameters_there_are(name):
    thing = getattr(jmpscale, name)
    doc = inspect.getdoc(thing)
    assert re.match(r"[A-Z][^\n]*[.:;,]?\n", doc + "\n")
    if thing is jmpscale.SkipReason:
        return  # its members have docstrings of their own
    assert ">>> " in doc or name in ("ScalerState", "LossScalingState", "GradReport")
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ].*\n|\n)+)", doc + "\n", flags=re.MULTILINE)
    documented = re.findall(r"^  (?:\\?\*){0,2}(\w+): ", section[1], flags=re.MULTILINE) if section else []
    assert documented == list(inspect.signature(thing).parameters)
    if inspect.isfunction(thing):
        assert "Returns:\n" in doc or name == "raise_if_stuck"


def test_importing_the_package_imports_no_framework():
    program = "import sys, jmpscale; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = ast.literal_eval(_run(program).stdout)
    assert not {"flax", "chex", "equinox", "matplotlib", "PIL", "sklearn", "torch", "hypothesis"} & set(loaded)
    assert "optax" in loaded, "the program must list the imported modules"


def test_a_program_that_uses_no_flax_never_imports_it():
    program = "import sys, jmpscale; jmpscale.update(jmpscale.dynamic(), True); print('flax' in sys.modules)"
    assert _run(program).stdout.strip() == "False"


@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_type_checkers_accept_right_calls_and_refuse_wrong_ones(checker):
    pytest.importorskip(checker, reason="only installed with the dev extra")
    folder = pathlib.Path(__file__).parent / "types"
    command = [sys.executable, "-m", checker]
    command += ["--pythonpath", sys.executable] if checker == "pyright" else ["--ignore-missing-imports"]
    right = subprocess.run([*command, folder / "right.py"], capture_output=True, text=True, check=False)
    assert right.returncode == 0, right.stdout
    wrong = subprocess.run([*command, folder / "wrong.py"], capture_output=True, text=True, check=False)
    refused = {int(n) for n in re.findall(r"wrong\.py:(\d+)(?::\d+)?(?: -)?:? error", wrong.stdout)}
    lines = (folder / "wrong.py").read_text().splitlines()
    assert refused == {n for n, line in enumerate(lines, 1) if line.startswith("jmpscale.")}, wrong.stdout


def test_type_checkers_accept_the_package():
    pytest.importorskip("mypy", reason="only installed with the dev extra")
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", PACKAGE]
    accepted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert accepted.returncode == 0, accepted.stdout


def test_type_checkers_accept_the_examples_of_the_readme(tmp_path):
    pytest.importorskip("mypy", reason="only installed with the dev extra")
    program = tmp_path / "readme.py"
    text = (ROOT / "README.md").read_text()
    program.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)))
    command = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--ignore-missing-imports"]
    command += ["--disable-error-code=no-redef", program]  # the second example has a train_step of its own
    accepted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert accepted.returncode == 0, accepted.stdout
    program.write_text(program.read_text().replace("jmpscale.dynamic()", "jmpscale.dynamic('high')"))
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.stdout.count("error: ") == 1, refused.stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_the_package_uses_nothing_private_of_another_library(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            assert node.module.startswith("jmpscale") or not any(name.startswith("_") for name in names), node.module
        elif isinstance(node, ast.Import):
            assert not any("._" in alias.name for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            allowed = is_own or node.attr.startswith("__") or node.attr in ("_replace", "_asdict", "_fields", "_make")
            assert allowed, f"{ast.unparse(node)}: an attribute of another library that begins with an underscore"
