"""The documentation site: `sphinx-build -W -c docs . build/site`, from the root, since it shows the notebooks too."""

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
include_patterns = ["docs/**.md", "notebooks/*.ipynb"]
exclude_patterns = ["**/_build/**", ".venv/**", "build/**"]

nb_execution_mode = "off"  # shown with the outputs they are committed with; a test executes them
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say more: shapes and units
napoleon_google_docstring = True
napoleon_use_rtype = False
default_role = "code"  # docstrings write `code`, as Markdown does

html_theme = "furo"
html_title = "jmpscale"
html_extra_path = ["site_root"]  # an index.html that leads to docs/index.html

PUBLIC = {
    f"{prefix}{name}": f"{module.__name__}.{name}"
    for prefix, module in (("", jmpscale), ("testing.", jmpscale.testing), ("plots.", jmpscale.plots))
    for name, value in vars(module).items()
    if getattr(value, "__module__", "").startswith("jmpscale") and not name.startswith("_")
}
PUBLIC |= {name.removeprefix("testing."): target for name, target in PUBLIC.items() if name.startswith("testing.")}


class LinkNamesToTheApi(SphinxTransform):
    """Makes every `name` or `jmpscale.name(...)` of the public API, written as code, a link to its description.

    So that pages are plain Markdown, which looks right in any viewer.
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


def setup(app):
    """Registers the transform with Sphinx."""
    app.add_transform(LinkNamesToTheApi)
