"""Readers of the package index and of the site need no clone: their links are absolute, and their commands work.

Tests that are marked full build the package and the site in a copy of the repository in which the address is set.
"""

import html.parser
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

import jmpscale

import tables

ROOT = pathlib.Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMMANDS = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"].get("commands", {})
REPOSITORY, SITE = "https://example.org/jmpscale", "https://example.org/site/"
SOURCES = ["docs", "jmpscale", "notebooks", "CHANGELOG.md", "LICENSE", "NOTICE", "README.md", "hatch_build.py"]


@pytest.fixture
def hatch_build(monkeypatch):
    pytest.importorskip("hatchling", reason="only installed with the extra test")
    monkeypatch.syspath_prepend(ROOT)
    import hatch_build

    return hatch_build


def test_readme_has_the_commands_that_need_a_clone():
    readme = (ROOT / "README.md").read_text()
    assert [command for command in COMMANDS if readme.count(command) != 1] == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_page_installs_from_the_index_once_the_commands_are_replaced(page):
    text = (ROOT / page).read_text()
    for command, for_index in COMMANDS.items():
        text = text.replace(command, for_index)
    assert "`pip install jmpscale`" in text
    assert "pip install ." not in text


ABSOLUTE_LINKS = {
    "link": ("[costs](docs/costs.md)", "[costs](R/blob/v1.2/docs/costs.md)"),
    "anchor": ("[`f`](docs/a.md#b-c)", "[`f`](R/blob/v1.2/docs/a.md#b-c)"),
    "code in two lines": ("`a\nb` `f[0](x)` [`a\nb`](c)", "`a\nb` `f[0](x)` [`a\nb`](R/blob/v1.2/c)"),
    "two lines": ("[a\nb](LICENSE)", "[a\nb](R/blob/v1.2/LICENSE)"),
    "picture": ("![a](docs/a.png)", "![a](R/raw/v1.2/docs/a.png)"),
    "picture in a link": ("[![a](b.png)](c)", "[![a](R/raw/v1.2/b.png)](R/blob/v1.2/c)"),
    "absolute": ("[a](https://b.c/d)", "[a](https://b.c/d)"),
    "own anchor": ("[a](#b)", "[a](#b)"),
    "code": ("`f[0](x)`", "`f[0](x)`"),
    "block": ("```python\nf[0](x)\n```\n[a](b)", "```python\nf[0](x)\n```\n[a](R/blob/v1.2/b)"),
}


@pytest.mark.parametrize("row", tables.rows(ABSOLUTE_LINKS))
def test_absolute_links(hatch_build, row):
    text, expected = row
    assert hatch_build.absolute_links(text, "R/", "1.2") == expected


def test_replace_commands_requires_each_command_once(hatch_build):
    assert hatch_build.replace_commands("run a, b", {"a": "c", "b": "d"}) == "run c, d"
    for text in "", "a a":
        with pytest.raises(ValueError, match=f"must contain 'a' once, and contains it {len(text.split())} times"):
            hatch_build.replace_commands(text, {"a": "c"})


def _copy(folder, urls):
    """Copies the sources of the package and of the site, with the addresses set."""
    for name in SOURCES:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    lines = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    text = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(f"{text}\n[project.urls]\n{lines}" if urls else text)


class _Targets(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("href", "src")]


@pytest.mark.full
@pytest.mark.parametrize("urls", [{}, {"Repository": REPOSITORY}], ids=["unset", "set"])
def test_readme_of_the_built_package(tmp_path, urls):
    pytest.importorskip("hatchling", reason="only installed with the extra test")
    markdown = pytest.importorskip("markdown_it", reason="only installed with the group docs")
    _copy(tmp_path, urls)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    [wheel] = tmp_path.glob("dist/*.whl")
    metadata = zipfile.ZipFile(wheel).read(f"jmpscale-{jmpscale.__version__}.dist-info/METADATA").decode()
    readme = metadata.partition("\n\n")[2]
    targets = _Targets(markdown.MarkdownIt().render(readme)).found
    relative = [target for target in targets if "://" not in target and not target.startswith("#")]
    if urls:
        assert "pip install jmpscale" in readme
        assert [command for command in COMMANDS if command in readme] == []
        assert relative == []
        assert f"{REPOSITORY}/raw/v{jmpscale.__version__}/docs/jmpscale.png" in targets
    else:
        assert readme == (ROOT / "README.md").read_text()
        assert len(relative) >= 8


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the site, by name, with the addresses set."""
    pytest.importorskip("furo", reason="only installed with the group docs")
    folder = tmp_path_factory.mktemp("repository")
    _copy(folder, {"Repository": REPOSITORY, "Documentation": SITE})
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "-c", "docs", ".", "site"]
    subprocess.run(build, cwd=folder, check=True)
    pages = (folder / "site").rglob("*.html")
    names = (path.relative_to(folder / "site").as_posix() for path in pages)
    return {name: (folder / "site" / name).read_text() for name in names if re.match("docs|notebooks|CHANGELOG", name)}


@pytest.mark.full
def test_site_has_descriptions_and_canonical_addresses(site):
    assert len(site) >= 38
    for name, page in site.items():
        [description] = re.findall(r'<meta name="description" content="(.*?)"', page)
        assert 20 <= len(html.unescape(description)) <= 160, name
        assert f'<link rel="canonical" href="{SITE}{name}"' in page
        assert '_static/favicon.svg"' in page
    assert "pip install jmpscale" in re.sub("<.*?>", "", site["docs/index.html"])
    assert f'href="{REPOSITORY}/blob/main/docs/index.md' in site["docs/index.html"]


@pytest.mark.full
def test_site_has_the_docstrings_of_the_public_names(site):
    page = site["docs/api.html"]
    assert set(jmpscale.__all__) <= set(re.findall(r'<dt [^>]*id="jmpscale\.(\w+)"', page))
    assert "../jmpscale/" not in page
    for member in "ScalerState.step_applied", "Diagnosis.describe", "GradReport.describe", "SkipReason.MIN_SCALE":
        assert f'id="jmpscale.{member}"' in page


def test_notice_names_the_sources_of_the_recorded_runs():
    notice = (ROOT / "NOTICE").read_text()
    runs = json.loads((ROOT / "tests" / "data" / "oracle_traces.json").read_text())["runs"]
    names = {re.sub(r"^NVIDIA |\W.*", "", run["from"].replace("torch", "PyTorch")) for run in runs}
    assert {name for name in names if name not in notice} == set()


def test_files_for_readers_agree_with_the_package():
    [author] = (author["name"] for author in PYPROJECT["project"]["authors"])
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {jmpscale.__version__}\n" in citation
    assert f"\n  - name: {author}\n" in citation
    for name in "LICENSE", "NOTICE":
        assert re.search(rf"Copyright \d+ {author}\n", (ROOT / name).read_text())

    [status] = re.findall(r"Development Status :: \d - (\w+)", " ".join(PYPROJECT["project"]["classifiers"]))
    versions = (ROOT / "docs" / "versions.md").read_text()
    assert (status == "Alpha") == (int(jmpscale.__version__.partition(".")[0]) < 1)
    assert "**Before 1.0,** a minor release may change any name or field" in " ".join(versions.split())


# --- what a release needs from a person ---


@pytest.fixture(scope="module")
def release_facts():
    spec = importlib.util.spec_from_file_location("release_facts", ROOT / ".ci" / "release_facts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PUBLISHED = {  # the files of a repository whose facts are complete
    "pyproject.toml": (
        '[project]\nversion = "1.2"\nclassifiers = ["Typing :: Typed"]\n[project.urls]\nRepository = "a"\n'
        'Documentation = "b"\nIssues = "c"\n'
    ),
    "CITATION.cff": "title: jmpscale\nrepository-code: a\nurl: b\n",
    "CODE_OF_CONDUCT.md": "Write to a@b.c.",
    "SECURITY.md": "Write to a@b.c.",
    "RELEASING.md": "| address | a@b.c |",
    "CHANGELOG.md": "## [1.2] - 2026-12-01\n",
}
MISSING_FACTS = {  # a file, a text and its replacement, and the start of the message
    "address": ("pyproject.toml", "Issues", "Homepage", "pyproject.toml has no `Issues`"),
    "classifier": ("pyproject.toml", "Typing ::", "Private ::", "pyproject.toml has the classifier `Private :: Typed`"),
    "citation": ("CITATION.cff", "repository-code", "version", "CITATION.cff has no `repository-code`"),
    "conduct": ("CODE_OF_CONDUCT.md", "a@b.c", "an address, not set yet", "CODE_OF_CONDUCT.md contains 'not set yet'"),
    "table": ("RELEASING.md", "a@b.c", "not checked", "RELEASING.md contains 'not checked'"),
    "date": ("CHANGELOG.md", "2026-12-01", "unreleased", "CHANGELOG.md has no dated entry for 1.2"),
}


@pytest.mark.parametrize("row", tables.rows(MISSING_FACTS))
def test_missing_facts_are_listed(release_facts, tmp_path, row):
    file, fact, unset, message = row
    for name, text in PUBLISHED.items():
        (tmp_path / name).write_text(text)
    assert release_facts.missing_facts(tmp_path) == []
    (tmp_path / file).write_text(PUBLISHED[file].replace(fact, unset))
    [found] = release_facts.missing_facts(tmp_path)
    assert found.startswith(message)


def test_missing_facts_are_none_once_the_repository_is_set(release_facts):
    found = [fact for fact in release_facts.missing_facts(ROOT) if "CHANGELOG" not in fact]  # dated at each release
    assert (found == []) == ("urls" in PYPROJECT["project"])


def test_pages_name_no_commit(release_facts):
    """Readers of the package index and of the site have no history; records may name its commits."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    assert [path for path in pages if release_facts.COMMIT.search(path.read_text())] == []


def test_missing_commits_are_those_outside_of_the_history(release_facts, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    known = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    (tmp_path / "README.md").write_text(f"measured with commit {known.stdout.strip()}")
    assert release_facts.missing_commits(tmp_path) == []
    (tmp_path / "docs" / "costs.md").write_text("measured with commit 1234567")
    (tmp_path / "benchmarks" / "results" / "cpu.json").write_text('{"commit": "abcdef7"}')
    assert release_facts.missing_commits(tmp_path) == [
        "docs/costs.md names commit 1234567, which is not in the history",
        "benchmarks/results/cpu.json names commit abcdef7, which is not in the history",
    ]
