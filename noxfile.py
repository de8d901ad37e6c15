"""The checks that a change must pass. `nox --list` shows them, `nox -s lint` runs one, and `.ci/run` runs all of them.

Every environment is resolved as of RELEASES_UNTIL, so that a new release of a dependency cannot break a check. To
renew the versions, set a later date and run all checks; the session `latest` shows in advance what would break.
"""

import pathlib
import re
import shutil
import tarfile
import tomllib
import zipfile

import nox

RELEASES_UNTIL = "2026-11-20"
OLDEST_PYTHON, NEWEST_PYTHON = "3.11", "3.13"
FRAMEWORKS_PYTHON = "3.12"
FRAMEWORKS = {"frameworks": ("tunix", "kauldron", "keras"), "levanter": ("levanter",)}  # the tests for each group

# The tests of programs for one device, which run in every form that such a program can have.
CORE_TESTS = [
    f"tests/algorithm/test_{name}.py"
    for name in ("update", "scale", "all_finite", "apply_if", "value_and_grad", "scaled_backward", "with_loss_scaling")
]

# The tests of the functions that rewrite programs, whose form differs between versions of JAX.
REWRITING_TESTS = [
    f"tests/{name}.py"
    for name in (
        "autocast/test_autocast",
        "algorithm/test_scaled_backward",
        "programs/test_traced_functions",
        "diagnosis/test_diagnose",
        "diagnosis/test_diagnose_float32",
    )
]

# The tests that read other files of the repository, such as pages, notebooks and recorded runs, and so show whether a
# file is missing in the sdist. Most other tests depend only on the package and on the modules in `tests`.
SDIST_TESTS = ("package/test_package", "package/test_published", "package/test_docs", "algorithm/test_upstream")

SCHEMAS = {  # of the files that code hosts read
    "citation-file-format": ("CITATION.cff",),
    "github-issue-config": (".github/ISSUE_TEMPLATE/config.yml",),
    "github-issue-forms": (".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/proposal.yml"),
    "github-workflows": (".github/workflows/checks.yml", ".github/workflows/latest.yml"),
}

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
nox.options.stop_on_first_error = True


def install(session, *requirements, until=RELEASES_UNTIL):
    """Installs requirements in the versions that were the newest on a date."""
    session.install("--quiet", *requirements, env={"UV_EXCLUDE_NEWER": until} if until else {})


def clone(session):
    """Returns a clean clone of the repository."""
    folder = pathlib.Path(session.create_tmp()) / "clone"
    shutil.rmtree(folder, ignore_errors=True)
    session.run("git", "clone", "-q", ".", str(folder), external=True)
    return folder


def run_readme_command(session, word, folder):
    """Runs the command of the README that contains a word, as it is written there."""
    blocks = re.findall(r"^```bash\n(.*?)^```", pathlib.Path("README.md").read_text(), flags=re.M | re.S)
    commands = [block for block in blocks if word in block]
    if len(commands) != 1:
        session.error(f"README.md must have one command with {word!r}, but it has {len(commands)}")
    # pip reads the versions from a file of constraints, so that the command itself need not change.
    pins = pathlib.Path(session.create_tmp()).resolve() / "constraints.txt"
    session.run(
        *("uv", "pip", "compile", "--quiet", "pyproject.toml", "--extra", "test", "--python-version", OLDEST_PYTHON),
        *("--exclude-newer", RELEASES_UNTIL, "--no-header", "--output-file", str(pins)),
        external=True,
        silent=True,
    )
    with session.chdir(folder):
        session.run("bash", "-euc", commands[0], external=True, env={"PIP_CONSTRAINT": str(pins)})


@nox.session(python=False)
def readme_tests(session):
    """Runs the README's test command in a clean clone; `.ci/run` runs it alone, because its time is limited."""
    run_readme_command(session, "-m pytest", clone(session))


@nox.session(python=False, tags=["checks"])
def readme_demo(session):
    """Runs the README's main command in a clean clone."""
    run_readme_command(session, "-m jmpscale", clone(session))


@nox.session(python=OLDEST_PYTHON, tags=["checks"])
def lint(session):
    """Checks style, types, spelling, and the files for code hosts."""
    install(session, "-e", ".[test]", "--group", "dev")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("python", ".ci/language.py")  # suggestions, which fail nothing
    # pyproject.toml names the contributor's environment, so that a bare `pyright` works.
    session.run("pyright", "--pythonpath", str(pathlib.Path(session.bin, "python")))
    for schema, files in SCHEMAS.items():
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
    session.run("pytest", "-q", "--full", "-k", "type_checkers", "tests/package/test_package.py")


@nox.session(python=OLDEST_PYTHON)
def docs(session):
    """Builds the site, with warnings as errors. The session `release` builds it, too, from the sdist."""
    install(session, "-e", ".", "--group", "docs")
    session.run("sphinx-build", "-q", "-W", "--keep-going", "-c", "docs", ".", "build/site")


@nox.session(python=OLDEST_PYTHON, tags=["checks"])
def notebooks(session):
    """Executes the notebooks and compares their outputs."""
    install(session, "-e", ".[test]", "--group", "notebooks")
    session.run("pytest", "-q", "-n", "2", "--dist", "worksteal", "--full", "tests/package/test_notebooks.py")


@nox.session(python=NEWEST_PYTHON, tags=["tests"])
def tests_full(session):
    """Runs all tests with the newest JAX."""
    install(session, "-e", ".[test]", "diffrax")
    # The session `accelerator` runs the tests of devices, and of the command that times them.
    others = ("--ignore=tests/benchmarks/test_accelerator.py", "--ignore=tests/benchmarks/test_accelerator_command.py")
    session.run("pytest", "-q", "-n", "auto", "--dist", "worksteal", "--full", "--durations=30", *others)


@nox.session(python=OLDEST_PYTHON)
@nox.parametrize("tests", [nox.param("default", tags=["tests"]), nox.param("rewriting", tags=["weekly"])])
def tests_oldest(session, tests):
    """Runs tests with the oldest versions that pyproject.toml allows: the default ones, or all of REWRITING_TESTS."""
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["flax"]
    requirements.append("chex>=0.1.90")  # newer releases compare arrays with an argument of NumPy 2
    install(session, "-e", ".[test]", *(requirement.replace(">=", "==") for requirement in requirements))
    options = ("--full", "-m", "full", *REWRITING_TESTS) if tests == "rewriting" else ()
    session.run("pytest", "-q", "-n", "auto", *options)


@nox.session(python=OLDEST_PYTHON, tags=["tests"])
def tests_forms(session):
    """Runs the core tests on a single device, in the form that programs have on GPUs and TPUs."""
    install(session, "-e", ".[test]")
    one_device = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    session.run("pytest", "-q", "-n", "auto", "--default-form", *CORE_TESTS, env=one_device)


@nox.session(python=OLDEST_PYTHON, tags=["checks"])
def tests_without_guards(session):
    """Runs the core tests without guards: no result depends on one."""
    install(session, "-e", ".[test]")
    session.run("pytest", "-q", "-n", "auto", "--without-guards", *CORE_TESTS, "tests/package/test_package.py")


@nox.session(python=FRAMEWORKS_PYTHON)
@nox.parametrize("group", [nox.param("frameworks", tags=["checks"]), nox.param("levanter", tags=["weekly"])])
def frameworks(session, group):
    """Trains with other frameworks, each in a process of its own, because they configure JAX differently.

    Levanter, of which only development versions are released, is tested weekly, not before each change.
    """
    install(session, "-e", ".", "--group", group)
    for name in FRAMEWORKS[group]:
        command = ("pytest", "-q", "--confcutdir=tests/frameworks", "-W", "default")
        session.run(*command, f"tests/frameworks/test_{name}.py")


@nox.session(python=OLDEST_PYTHON)
@nox.parametrize("device", ["h100", "tpu"])
@nox.parametrize("tests", [nox.param("default", tags=["checks"]), nox.param("full", tags=["weekly"])])
def compilers(session, device, tests):
    """Compiles training steps for a GPU or TPU. The device itself is not needed."""
    install(session, "-e", ".", "--group", f"compile-{device}", "--group", "benchmarks")
    options = ("--full", "-m", "full") if tests == "full" else ()
    session.run("pytest", "-q", *options, "tests/benchmarks/test_compiled.py")


@nox.session(python=OLDEST_PYTHON, tags=["weekly"])
def accelerator(session):
    """Rehearses the command that times an accelerator, on the CPU: its tests on the device, and its own tests.

    The README's test command has run the default ones; the rest is for those who change the command.
    """
    install(session, "-e", ".", "--group", "benchmarks")
    out = ("--out", str(pathlib.Path(session.create_tmp()).resolve() / "record.json"))
    session.run("python", "-m", "benchmarks.accelerator", "--only", "tests", "--minutes", "9", *out)
    session.run("pytest", "-q", "--full", "tests/benchmarks/test_accelerator_command.py")


@nox.session(python=OLDEST_PYTHON, tags=["tests"])
def release(session):
    """Rehearses a release: builds a clean clone, checks both files, and works from each of them alone."""
    folder = pathlib.Path(session.create_tmp()).resolve() / "built"
    shutil.rmtree(folder, ignore_errors=True)
    source = clone(session)
    install(session, "build", "twine", "pytest")
    session.run("python", "-m", "build", "--outdir", str(folder), str(source), silent=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    session.run("twine", "check", "--strict", str(wheel), str(sdist))
    check_contents(session, wheel, sdist, source)
    use_wheel(session, wheel)
    use_sdist(session, sdist)


def check_contents(session, wheel, sdist, source):
    """Requires that the wheel has the package, and the sdist all files of the repository, and nothing else."""
    package = {str(path.relative_to(source)) for path in (source / "jmpscale").rglob("*") if path.is_file()}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = session.run("git", "-C", str(source), "ls-files", external=True, silent=True).splitlines()
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    differences = {"wheel": in_wheel ^ package, "sdist": in_sdist ^ {*tracked, "PKG-INFO"}}
    if any(differences.values()):
        session.error(f"files are missing, or should not be there: {differences}")


def use_wheel(session, wheel):
    """Runs the doctests of the wheel in an environment without any extra."""
    install(session, str(wheel))
    with session.chdir(wheel.parent):
        command = ("pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--doctest-modules")
        # The modules that need matplotlib cannot be imported.
        session.run(*command, "--doctest-ignore-import-errors", "--pyargs", "jmpscale")


def use_sdist(session, sdist):
    """Installs the sdist, and uses the files in it: runs the tests that read other files, which also build the site."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    with session.chdir(sdist.parent / sdist.name.removesuffix(".tar.gz")):
        install(session, "--reinstall-package", "jmpscale", f"{sdist}[test]", "--group", "docs")
        tests = [f"tests/{name}.py" for name in SDIST_TESTS]
        # The programs of the pages read no files.
        session.run("pytest", "-q", "-n", "2", "-k", "not runs_as_pasted", *tests)
        session.run("pytest", "-q", "--full", "-m", "full", "tests/package/test_published.py")


@nox.session(python=NEWEST_PYTHON, default=False)
def latest(session):
    """Runs all tests with the latest releases, and fails at deprecation warnings. No change has to pass it."""
    install(session, "-e", ".[test]", "diffrax", until=None)
    session.run("pytest", "-q", "-n", "auto", "--full", "-W", "error::DeprecationWarning")


@nox.session(python=OLDEST_PYTHON, default=False)
def links(session):
    """Opens the external links of the site. It needs access to the internet."""
    install(session, "-e", ".", "--group", "docs")
    session.run("sphinx-build", "-q", "-b", "linkcheck", "-c", "docs", ".", "build/links")


@nox.session(python=OLDEST_PYTHON, default=False)
def audit(session):
    """Looks up known vulnerabilities of the package's dependencies. It needs access to their database."""
    install(session, "pip-audit", ".")
    session.run("pip-audit", "--skip-editable")
