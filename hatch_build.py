"""Creates the README that the package index shows. hatchling runs this file as a hook at each build.

Readers of the index have no clone of the repository. Once `Repository` is set in `[project.urls]` of `pyproject.toml`,
their README has absolute links, to the files of the released version, and the commands in `pyproject.toml` that need no
clone. The addresses have the form of GitHub's. Until then, the README is unchanged.
"""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Code, in which nothing is a link; or a picture, or the end of a link, with a relative target.
CODE_OR_LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`]*`)|(?P<picture>!\[[^\[\]]*)?\]\((?!\w+:|#)(?P<target>[^)\s]+)\)",
    flags=re.MULTILINE | re.DOTALL,
)


def replace_commands(text, commands):
    """Returns a text with each command replaced, which the text must contain once."""
    for command, for_index in commands.items():
        if (count := text.count(command)) != 1:
            raise ValueError(f"README.md must contain {command!r} once, and contains it {count} times")
        text = text.replace(command, for_index)
    return text


def absolute_links(text, repository, version):
    """Returns a Markdown text whose relative links lead to the files of a version in the repository."""

    def absolute(found):
        if found["code"]:
            return found[0]
        view = "raw" if found["picture"] else "blob"
        return f"{found['picture'] or ''}]({repository.rstrip('/')}/{view}/v{version}/{found['target']})"

    return CODE_OR_LINK.sub(absolute, text)


class IndexReadme(MetadataHookInterface):
    """Sets `readme` in the metadata of the package."""

    def update(self, metadata):
        """Adds the README to the metadata, in place."""
        text = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository := metadata.get("urls", {}).get("Repository"):
            text = absolute_links(
                replace_commands(text, self.config.get("commands", {})), repository, metadata["version"]
            )
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
