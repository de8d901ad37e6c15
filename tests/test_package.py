"""The package as a whole: its names, its imports, its size, its documentation, its types."""

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
MODULES = sorted(PACKAGE.glob("*.py"))
FLOORS = [
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
PUBLIC = {
    "GradReport",
    "ScalerConfig",
    "ScalerState",
    "all_finite",
    "apply_if",
    "cast",
    "disabled",
    "dynamic",
    "from_torch_state_dict",
    "get_scaler",
    "grad_report",
    "metrics",
    "optax_step",
    "raise_if_stuck",
    "replace_scaler",
    "scale",
    "scaled_value_and_grad",
    "static",
    "to_torch_state_dict",
    "unscale",
    "unscale_and_check",
    "update",
    "value_and_grad",
    "with_loss_scaling",
}


def _run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_public_names_are_these():
    names = {name for name, value in vars(jmpscale).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert names == PUBLIC
    assert jmpscale.__version__ == importlib.metadata.version("jmpscale")
    assert (PACKAGE / "py.typed").exists()


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.name)
def test_imports_run_one_way(path):
    floor = FLOORS.index(path.stem)
    for module in _imports(path):
        if module.startswith("jmpscale._"):
            assert path.stem != "__main__", "the demonstration uses the public door only"
            assert FLOORS.index(module.removeprefix("jmpscale.")) < floor, module
        if module.split(".")[0] == "optax":
            assert path.stem in ("_optax", "__main__")
        assert module.split(".")[0] not in ("flax", "chex", "equinox", "haiku", "torch", "jmp")
        assert not module.startswith("jax._src")


def _code_lines(source, node):
    """Counts the lines of a module or function without blanks, comments and docstrings."""
    first, last = (1, source.count("\n") + 1) if isinstance(node, ast.Module) else (node.lineno, node.end_lineno)
    numbers = set(range(first, last + 1))
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if isinstance(body, list) and body and isinstance(inner, ast.Module | ast.ClassDef | ast.FunctionDef):
            doc = body[0]
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str):
                numbers -= set(range(doc.lineno, doc.end_lineno + 1))
    lines = source.splitlines()
    return sum(1 for n in numbers if n <= len(lines) and lines[n - 1].strip() and lines[n - 1].strip()[0] != "#")


def test_the_package_can_be_read_in_one_sitting():
    total = 0
    for path in MODULES:
        source = path.read_text()
        tree = ast.parse(source)
        size = _code_lines(source, tree)
        assert size <= 250, (path.name, size)
        # What `import jmpscale` brings; the demonstration, the pictures and the checks for tests only use it.
        total += size if path.stem == "__init__" or (path.name.startswith("_") and path.stem != "__main__") else 0
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Assert), f"{path.name}: an assert vanishes under -O; raise an error"
            if isinstance(node, ast.FunctionDef):
                assert _code_lines(source, node) <= 40, (path.name, node.name)
    assert total <= 1000


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_docstrings_document_exactly_the_parameters_there_are(name):
    thing = getattr(jmpscale, name)
    doc = inspect.getdoc(thing)
    assert re.match(r"[A-Z][^\n]*[.:;,]?\n", doc + "\n")
    assert ">>> " in doc or name in ("ScalerState", "GradReport")
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ].*\n|\n)+)", doc + "\n", flags=re.MULTILINE)
    documented = re.findall(r"^  \*{0,2}(\w+): ", section[1], flags=re.MULTILINE) if section else []
    documented += re.findall(r"^  \\?\*(\w+): ", section[1], flags=re.MULTILINE) if section else []
    assert list(dict.fromkeys(documented)) == list(inspect.signature(thing).parameters)
    if inspect.isfunction(thing):
        assert "Returns:\n" in doc or name == "raise_if_stuck"


def test_importing_it_imports_no_framework():
    program = "import sys, jmpscale; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = ast.literal_eval(_run(program).stdout)
    assert not {"flax", "chex", "equinox", "matplotlib", "PIL", "sklearn", "torch", "hypothesis"} & set(loaded)
    assert "optax" in loaded, "the check can see what is imported"


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


def test_type_checkers_accept_the_examples_of_the_readme(tmp_path):
    pytest.importorskip("mypy", reason="only installed with the dev extra")
    text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    program = tmp_path / "readme.py"
    program.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)))
    command = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--ignore-missing-imports"]
    command += ["--disable-error-code=no-redef", program]  # the second example has a train_step of its own
    accepted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert accepted.returncode == 0, accepted.stdout
    program.write_text(program.read_text().replace("jmpscale.dynamic()", "jmpscale.dynamic('high')"))
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.stdout.count("error: ") == 1, refused.stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_nothing_private_of_another_library_is_used(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            assert node.module.startswith("jmpscale") or not any(name.startswith("_") for name in names), node.module
        elif isinstance(node, ast.Import):
            assert not any("._" in alias.name for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            allowed = node.attr.startswith("__") or node.attr in ("_replace", "_asdict", "_fields")
            assert allowed, f"{ast.unparse(node)}: only a named tuple's own methods may begin with an underscore"
