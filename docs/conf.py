"""The documentation site, built from the root: `sphinx-build -W -c docs . build/site`. It includes the notebooks."""

import re

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

import jmpscale
import jmpscale.plots
import jmpscale.testing

project = "jmpscale"
author = "the jmpscale developers"
version = release = jmpscale.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "notebooks/*.ipynb", "CHANGELOG.md"]
exclude_patterns = ["**/_build/**", ".venv/**", "build/**"]

nb_execution_mode = "off"  # the committed outputs are shown; a test executes the notebooks
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings also give shapes and units
napoleon_google_docstring = True
napoleon_use_rtype = False
default_role = "code"  # docstrings write `code`, as Markdown does

html_theme = "furo"
html_title = "jmpscale"
html_extra_path = ["site_root"]  # an index.html that redirects to docs/index.html

PUBLIC = {name: f"jmpscale.{name}" for name in jmpscale.__all__}
for module in (jmpscale.testing, jmpscale.plots):
    for name, value in vars(module).items():
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_"):
            PUBLIC[f"{module.__name__.removeprefix('jmpscale.')}.{name}"] = f"{module.__name__}.{name}"
PUBLIC |= {name.removeprefix("testing."): target for name, target in PUBLIC.items() if name.startswith("testing.")}


class LinkNamesToTheApi(SphinxTransform):
    """Makes every `name` or `jmpscale.name(...)` of the public API that is written as code a link to its description.

    The pages stay plain Markdown, which every viewer renders.
    """

    default_priority = 500

    def apply(self, **kwargs):
        """Wraps the code in a reference that Sphinx resolves, except in headings, links and the API page itself."""
        if self.env.docname.endswith("/api"):
            return
        for code in list(self.document.findall(nodes.literal)):
            found = re.fullmatch(r"(?:jmpscale\.)?([\w.]+?)(?:\(.*\))?", code.astext(), flags=re.DOTALL)
            target = PUBLIC.get(found[1]) if found else None
            if target and not isinstance(code.parent, nodes.title | nodes.reference | addnodes.pending_xref):
                link = addnodes.pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=True
                )
                code.replace_self(link)
                link += code


def make_fenced_blocks_literal(app, what, name, obj, options, lines):
    """Converts the fenced blocks of a docstring, which are Markdown, to literal blocks."""
    converted, fenced = [], False
    for line in lines:
        if line.startswith("```"):
            converted += [] if fenced else ["::", ""]
            fenced = not fenced
        else:
            converted.append(f"    {line}" if fenced else line)
    lines[:] = converted


def setup(app):
    """Registers the transform and the conversion with Sphinx."""
    app.add_transform(LinkNamesToTheApi)
    app.connect("autodoc-process-docstring", make_fenced_blocks_literal)
