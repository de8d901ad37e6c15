"""The package exports its documented names, its modules have layers, and type checkers accept it."""

import ast
import collections
import collections.abc
import enum
import functools
import graphlib
import importlib
import importlib.metadata
import inspect
import io
import operator
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import jmpscale
from jmpscale._base import compat

PACKAGE = pathlib.Path(jmpscale.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]
ROOT = TESTS.parent
# A module may import modules of its own part of the package, and of the parts before it.
PARTS = ["_base", "_state", "_guards", "_get_scaler", "_monitoring", "_algorithm", "_torch_state_dict", "_cast"]
PARTS += ["_programs", "_step", "_autocast", "_diagnosis", "_run", "__init__", "testing", "tools", "__main__"]
MODULES = sorted(str(path.relative_to(PACKAGE).with_suffix("")) for path in PACKAGE.rglob("*.py"))
MAY_IMPORT = {
    "_guards/checks": {"optax"},
    "_guards/optax": {"optax"},
    "_algorithm/master_params": {"optax"},
    "_algorithm/optax": {"optax"},
    "_algorithm/optax_step": {"optax"},
    "plots": {"matplotlib"},
    "__main__": {"optax"},
}
ALGORITHM = sorted(m for m in MODULES if m.startswith("_algorithm/") and m != "_algorithm/__init__")
GUARDS = sorted(m for m in MODULES if m.startswith("_guards/") and m != "_guards/__init__")
GUARDED = [m for m in ALGORITHM if m != "_algorithm/global_norm"]
ALWAYS = {*sys.stdlib_module_names, "jax", "jmpscale", "numpy"}


def _run(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)


def test_all_lists_the_public_names():
    names = [name for name, value in vars(jmpscale).items() if not name.startswith("_") and not inspect.ismodule(value)]
    assert sorted(names) == jmpscale.__all__
    assert jmpscale.__version__ == importlib.metadata.version("jmpscale")
    assert (PACKAGE / "py.typed").exists()


def _row_of_api_page(name):
    """Returns the row for a name: a link to its module, and the first sentence of its docstring."""
    thing = operator.attrgetter(name)(jmpscale)
    module = pathlib.Path(inspect.getsourcefile(inspect.unwrap(thing))).relative_to(PACKAGE)
    return f"| [`{name}`](../jmpscale/{module.as_posix()}) | {inspect.getdoc(thing).splitlines()[0]} |"


def test_api_page_lists_the_public_names():
    modules = {name: importlib.import_module(f"jmpscale.{name}") for name in ("testing", "plots")}
    tools = [f"{name}.{function}" for name, module in modules.items() for function in module.__all__]
    rows = re.findall(r"^\| \[.*$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(map(_row_of_api_page, jmpscale.__all__ + tools))


def test_changelog_names_the_public_names():
    named = set(re.findall(r"`(\w+)", (ROOT / "CHANGELOG.md").read_text()))
    assert set(jmpscale.__all__) <= named


@pytest.mark.parametrize("name", jmpscale.__all__)
def test_docstring_documents_the_parameters(name):
    thing = getattr(jmpscale, name)
    doc = inspect.getdoc(thing)
    assert re.match(r"[A-Z].*\.\n", doc + "\n"), "the first line must be a sentence"
    assert ">>> " in doc or (inspect.isclass(thing) and name != "ScalerConfig")
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ].*\n|\n)+)", doc + "\n", flags=re.MULTILINE)
    documented = re.findall(r"^  (?:\*){0,2}(\w+): ", section[1], flags=re.MULTILINE) if section else []
    assert documented == _names_to_document(thing)
    assert "Returns:\n" in doc or inspect.isclass(thing)


def _names_to_document(thing):
    """Returns the members of an enumeration, or the parameters of a function or class."""
    if isinstance(thing, enum.EnumType):
        return list(thing.__members__)
    if thing is jmpscale.ScalerConfig:
        return ["mode"]  # the settings are described once, as the arguments of `dynamic`
    return [name for name in inspect.signature(thing).parameters if not name.startswith("_")]


def _part(module):
    """Returns the number of the part that a module belongs to."""
    return PARTS.index(next(room for room in (*module.split("/"), "tools") if room in PARTS))


def _nodes(module, *kinds):
    """Returns the nodes of these kinds in the syntax tree of a module."""
    return [node for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())) if isinstance(node, kinds)]


def _imports(module):
    """Returns the modules that a module imports, at its top or in a function."""
    found = {name.name for node in _nodes(module, ast.Import) for name in node.names}
    of_packages = [node for node in _nodes(module, ast.ImportFrom) if node.module == "jmpscale._guards"]
    found |= {f"{node.module}.{name.name}" for node in of_packages for name in node.names}
    return found | {node.module for node in _nodes(module, ast.ImportFrom)}


def _own_imports(module):
    names = [name.removeprefix("jmpscale.").replace(".", "/") for name in _imports(module) if "jmpscale" in name]
    return {name for name in names if name in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_its_own_part_and_lower_parts_only(module):
    assert all(_part(name) <= _part(module) for name in _own_imports(module))
    libraries = {name.partition(".")[0] for name in _imports(module)}
    assert libraries <= ALWAYS | MAY_IMPORT.get(module, set())


@pytest.mark.full
def test_imports_have_no_cycles():
    order = graphlib.TopologicalSorter({module: _own_imports(module) for module in MODULES}).static_order()
    assert sorted(order) == MODULES


def test_demonstration_uses_public_names():
    assert not any(name.startswith("_") for name in _own_imports("__main__"))


def test_package_uses_no_private_names_of_other_libraries():
    pytest.importorskip("ruff", reason="only installed with the group dev")
    found = _run("-m", "ruff", "check", "--isolated", "--preview", "--select=SLF001,PLC2701", PACKAGE)
    lines = [line for line in found.stdout.splitlines() if "jmpscale._" not in line]
    assert found.returncode == 0, lines


def test_unknown_jax_raises(monkeypatch):
    """Otherwise devices would seem to share no mesh axis, and make different decisions."""
    with pytest.raises(ImportError, match="jmpscale does not support JAX"):
        compat._find("unsafe_function_of_another_name")
    grads = jnp.ones(3)
    monkeypatch.setattr(jax, "typeof", lambda x: object())
    with pytest.raises(ImportError, match="jmpscale does not support JAX"):
        jmpscale.grad_report(grads)


@pytest.mark.guards
def test_unknown_jax_gives_no_warning_that_needs_a_missing_function(monkeypatch):
    def step(finite):
        return jmpscale.update(jmpscale.dynamic(), finite)

    finite = jnp.array(True)
    with pytest.warns(UserWarning, match="constant of the compiled program"):
        jax.eval_shape(step, finite)
    modules = [types.ModuleType("core"), types.ModuleType("core")]
    monkeypatch.setattr(jax, "core", modules[0])
    monkeypatch.setattr(jax.extend, "core", modules[1])
    for module in modules:  # the function may be in either
        assert not compat.is_compiling()
        with warnings.catch_warnings(action="error"):
            jax.eval_shape(step, finite)
        with monkeypatch.context() as patch:
            patch.setattr(module, "unsafe_am_i_under_a_jit_DO_NOT_USE", lambda: True, raising=False)
            assert compat.is_compiling()


# --- what the files of the repository name ---

# `jmpscale[flax]`, `".[test]"`, and the words "the extras `flax` and `plots`"
IN_BRACKETS = re.compile(r"""(?:\bjmpscale|["'`\s]\.)\[([a-z-]+(?:, ?[a-z-]+)*)\]""")
IN_WORDS = re.compile(r"\bextras? ((?:(?:, | and |, and )?`[a-z-]+`)+)")


def test_extras_that_are_named_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    paths = [*ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "pyproject.toml", *PACKAGE.rglob("*.py")]
    paths += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    texts = {path: path.read_text() for path in paths}
    named = {
        (path.name, extra)
        for path, text in texts.items()
        for found in IN_BRACKETS.findall(text) + IN_WORDS.findall(text)
        for extra in re.findall(r"[a-z-]+", found.replace(" and ", ","))
    }
    assert {(path, extra) for path, extra in named if extra not in extras} == set()
    assert {extra for _, extra in named} == extras, "the patterns find extras"


OF_OTHERS = {"_growth_tracker"}  # torch's
SOURCES = [path for part in ("jmpscale", "tests", "benchmarks") for path in (ROOT / part).rglob("*.py")]
PROSE = [*SOURCES, *ROOT.glob("*.py"), ROOT / "docs" / "contributing.md"]
PRIVATE_NAME = re.compile(r"`(_[a-z]\w*\*?)[`(]")
PATH = re.compile(r"`?((?:_?[a-z]\w*/)+\w*(?:\.py\b|`)|test_\w+\.py\b)")


@functools.cache
def _tokens(path):
    """Returns the names and comments of a file of Python as (kind, string)."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [(token.type, token.string) for token in tokens if token.type in (tokenize.NAME, tokenize.COMMENT)]


@functools.cache
def _comments_and_docstrings(path):
    text = path.read_text()
    if path.suffix == ".md":
        return text
    comments = [string for kind, string in _tokens(path) if kind == tokenize.COMMENT]
    nodes = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return "\n".join([*comments, *(ast.get_docstring(node) or "" for node in nodes)])


def _identifiers(path):
    """Returns all names that a file of Python defines or uses."""
    return {string for kind, string in _tokens(path) if kind == tokenize.NAME}


@pytest.mark.full
def test_private_names_in_comments_and_docstrings_exist():
    known = OF_OTHERS.union(*map(_identifiers, SOURCES))
    named = {(path.name, name) for path in PROSE for name in PRIVATE_NAME.findall(_comments_and_docstrings(path))}
    assert named, "the pattern finds names"
    assert {(path, name) for path, name in named if name not in known} == set()


@pytest.mark.full
def test_paths_in_comments_and_docstrings_exist():
    folders = {"benchmarks", "docs", "notebooks", "tests"} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    found = {(path, name.rstrip("`/")) for path in PROSE for name in PATH.findall(_comments_and_docstrings(path))}
    named = {(path, name) for path, name in found if name.partition("/")[0] in folders or name.startswith("test_")}
    assert len(named) > 10, "the pattern finds paths"
    places = (ROOT, PACKAGE, TESTS, *(path for path in TESTS.iterdir() if path.is_dir()))
    assert {(path.name, name) for path, name in named if not any((place / name).exists() for place in places)} == set()


def test_modules_in_the_picture_of_a_diagnosis_exist():
    text = (ROOT / "docs" / "contributing.md").read_text()
    [picture] = re.findall(r"^```text\n(trace_loss.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    named = [name for line in picture.splitlines() for name in re.split(r" {2,}", line.strip())[0].split(", ")]
    patterns = [name for name in named if name != "|"]
    assert len(patterns) > 20
    assert [name for name in patterns if not list((PACKAGE / "_diagnosis").rglob(f"{name}.py"))] == []


# --- the algorithm and its guards ---


@pytest.mark.parametrize("module", ALGORITHM)
def test_algorithm_neither_raises_nor_warns(module):
    assert not _nodes(module, ast.Raise, ast.Assert)
    assert not {"warnings", "jmpscale._base.marks", "jmpscale._base.warn"} & _imports(module)
    checks = [node for node in _nodes(module, ast.ImportFrom) if node.module == "jmpscale._base.arguments"]
    assert all(name.name.isupper() for node in checks for name in node.names)


@pytest.mark.parametrize("module", GUARDED)
def test_algorithm_calls_the_guards_of_its_name_and_uses_no_result(module):
    [guards] = [name for name in _imports(module) if name.startswith("jmpscale._guards.")]
    assert guards == f"jmpscale._guards.{module.removeprefix('_algorithm/')}"
    uses = [node for node in _nodes(module, ast.Name) if node.id == "guards"]
    calls = [node.value for node in _nodes(module, ast.Expr)]
    calls += [
        item.context_expr for node in _nodes(module, ast.With) for item in node.items if item.optional_vars is None
    ]
    called = [x.func for x in calls if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute)]
    called = [x.attr for x in called if isinstance(x.value, ast.Name) and x.value.id == "guards"]
    assert len(called) == len(uses) > 0
    for name in called:
        returns = inspect.signature(getattr(importlib.import_module(guards), name)).return_annotation
        assert returns is None or returns == collections.abc.Iterator[None]


@pytest.mark.full
def test_guards_are_events_that_the_algorithm_calls_and_checks_are_what_others_share():
    """A check that only one module of guards calls is in this module."""
    mirrored = {f"_guards/{module.removeprefix('_algorithm/')}" for module in GUARDED}
    assert set(GUARDS) == mirrored | {"_guards/checks"}
    used = {name for module in ALGORITHM for name in _own_imports(module) if name.startswith("_guards/")}
    assert used == mirrored
    others = [module for module in MODULES if module not in ALGORITHM]
    assert {name for module in others for name in _own_imports(module) if name in GUARDS} == {"_guards/checks"}
    callers = collections.Counter()
    for module in MODULES:
        imports = [node for node in _nodes(module, ast.ImportFrom) if node.module == "jmpscale._guards.checks"]
        callers.update({name.name for node in imports for name in node.names})
    for node in _nodes("_guards/checks", ast.Name):  # a check may also serve another check
        callers[node.id] += 1
    functions = [node.name for node in _nodes("_guards/checks", ast.FunctionDef) if not node.name.startswith("is_")]
    assert {name for name in functions if callers[name] < 2} == set()


def test_option_removes_all_guards(pytestconfig):
    modules = [importlib.import_module(f"jmpscale.{name.replace('/', '.')}") for name in GUARDED]
    has_guards = {inspect.ismodule(vars(module)["guards"]) for module in modules}
    assert has_guards == {not pytestconfig.getoption("--without-guards")}


FRAMES = {"currentframe", "_getframe", "f_back", "f_code", "f_globals", "f_locals", "walk_stack", "extract_stack"}
CLOSURES = {"__closure__", "__code__", "cell_contents", "getclosurevars", "getsource"}


@pytest.mark.parametrize("module", MODULES)
def test_only_warn_user_reads_frames_and_nothing_reads_closures(module):
    found = {node.attr for node in _nodes(module, ast.Attribute)} & (FRAMES | CLOSURES)
    [*functions] = [node for node in _nodes(module, ast.FunctionDef) if node.name == "warn_user"]
    allowed = {x.attr for function in functions for x in ast.walk(function) if isinstance(x, ast.Attribute)}
    assert found <= (allowed if module == "_base/warn" else set())


# --- types ---

MYPY = ["-m", "mypy", "--config-file", ROOT / "pyproject.toml"]
CHECKERS = {"pyright": ["-m", "pyright", "--pythonpath", sys.executable], "mypy": [*MYPY, "--strict"]}


@pytest.mark.full
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_accept_only_right_calls_and_strict_programs(checker):
    """The files are checked together, because the libraries that they import take most of the time."""
    pytest.importorskip(checker, reason="only installed with the group dev")
    files = [TESTS / "types" / f"{name}.py" for name in ("programs", "right", "wrong")]
    found = _run(*CHECKERS[checker], *files).stdout
    rejected = re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -)?:? error", found)
    lines = (TESTS / "types" / "wrong.py").read_text().splitlines()
    wrong = [("wrong.py", str(n)) for n, line in enumerate(lines, 1) if line.startswith("jmpscale.")]
    assert set(rejected) == set(wrong), found


@pytest.mark.full
def test_type_checkers_accept_the_package():
    pytest.importorskip("mypy", reason="only installed with the group dev")
    accepted = _run(*MYPY, PACKAGE)
    assert accepted.returncode == 0, accepted.stdout


@pytest.mark.full
def test_type_checkers_accept_the_readme(tmp_path):
    pytest.importorskip("mypy", reason="only installed with the group dev")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    program = tmp_path / "readme.py"
    command = [*MYPY, program]
    # As options of the command, they would also change how imported packages are checked, and mypy would do so again.
    blocks = ['# mypy: check-untyped-defs, disable-error-code="no-redef"', *blocks]
    program.write_text("\n".join(blocks))
    accepted = _run(*command)
    assert accepted.returncode == 0, accepted.stdout
    program.write_text("\n".join(blocks).replace("jmpscale.dynamic()", "jmpscale.dynamic('high')", 1))
    assert _run(*command).stdout.count("error: ") == 1
