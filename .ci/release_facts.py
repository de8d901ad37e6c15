"""Lists what a release still needs from a person: `python .ci/release_facts.py`. It fails while anything is missing.

Only the publisher knows these facts. RELEASING.md says where each of them belongs.
"""

import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
URLS = ("Repository", "Documentation", "Issues")
UNSET = ("not set yet", "not enabled yet", "not confirmed", "not checked")
TEXTS = ("CODE_OF_CONDUCT.md", "SECURITY.md", "RELEASING.md")
COMMIT = re.compile(r"\bcommit `?([0-9a-f]{7,40})\b|\"commit\": \"([0-9a-f]+)\"")  # on a page, or in a record


def missing_facts(root):
    """Returns a sentence for each fact that is missing in the files of a repository."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    citation = (root / "CITATION.cff").read_text()
    found = [
        f"pyproject.toml has no `{name}` in [project.urls]" for name in URLS if name not in project.get("urls", {})
    ]
    found += [f"CITATION.cff has no `{key}`" for key in ("repository-code", "url") if f"\n{key}: " not in citation]
    found += [f"{name} contains {mark!r}" for name in TEXTS for mark in UNSET if mark in (root / name).read_text()]
    for classifier in project["classifiers"]:
        if classifier.startswith("Private ::"):
            found.append(f"pyproject.toml has the classifier `{classifier}`, with which no index accepts the package")
    dated = rf"^## \[{re.escape(project['version'])}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(dated, (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE):
        found.append(f"CHANGELOG.md has no dated entry for {project['version']}")
    return found


def missing_commits(root):
    """Returns a sentence for each commit that a page or a record names, and that the history does not contain."""
    records = [*root.glob("benchmarks/results/*.json"), *root.glob("benchmarks/studies/*.json")]
    files = [root / "README.md", *sorted(root.glob("docs/**/*.md")), *sorted(records)]
    named = {}
    for path in files:
        for found in COMMIT.finditer(path.read_text()):
            named.setdefault(found[1] or found[2], path.relative_to(root))
    unknown = {name: path for name, path in named.items() if not _exists(root, name)}
    return [f"{path} names commit {name}, which is not in the history" for name, path in unknown.items()]


def _exists(root, commit):
    command = ["git", "-C", str(root), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main():
    """Prints what is missing, and returns whether anything is."""
    found = missing_facts(ROOT) + missing_commits(ROOT)
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
