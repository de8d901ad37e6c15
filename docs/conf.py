"""The documentation site: `sphinx-build -W -c docs . build/site`, from the root, since it shows the notebooks too."""

import jmpscale

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
