"""The documentation site: `sphinx-build -W -c docs . build/site` builds it."""

import enum
import functools
import html
import inspect
import itertools
import pathlib
import pydoc
import re
import textwrap
import tomllib

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

import jmpscale
import jmpscale.plots
import jmpscale.testing

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
urls = PYPROJECT["project"].get("urls", {})

project = "jmpscale"
author = PYPROJECT["project"]["authors"][0]["name"]
version = release = jmpscale.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "notebooks/*.ipynb", "CHANGELOG.md"]
exclude_patterns = ["**/_build/**", ".venv/**", "build/**"]

nb_execution_mode = "off"  # the committed outputs are shown
nb_code_prompt_show = "Show the code"  # of a cell with the tag hide-input
nb_code_prompt_hide = "Hide the code"
nb_merge_streams = True  # a table that several calls of `print` write is one block
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings also give shapes and units
autodoc_preserve_defaults = True  # 2.0**32, not 4294967296.0
python_maximum_signature_line_length = 36  # longer ones have an argument on each line
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_use_rtype = False
default_role = "code"  # docstrings write `code`, as Markdown does

html_theme = "furo"
pygments_style = "default"  # shows diffs in red and green
pygments_dark_style = "monokai"
html_title = "jmpscale"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["wrap.css"]
html_favicon = "static/favicon.svg"
html_baseurl = urls.get("Documentation", "")  # of the canonical URLs
if "Repository" in urls:  # the addresses have the form of GitHub's
    html_theme_options = {
        "source_view_link": urls["Repository"] + "/blob/main/{filename}",
        "source_edit_link": urls["Repository"] + "/edit/main/{filename}",
    }
html_extra_path = ["site_root"]  # an index.html that redirects to docs/index.html

PRINTED = {"text", "myst-ansi"}  # the languages of outputs, on pages and in notebooks
PRINTED_WIDTH = 100  # columns

PUBLIC = {name: f"jmpscale.{name}" for name in jmpscale.__all__}
for module in (jmpscale.testing, jmpscale.plots):
    for name in module.__all__:
        target = f"{module.__name__}.{name}"
        PUBLIC[target.removeprefix("jmpscale.")] = target
        if module is jmpscale.testing:
            PUBLIC[name] = target


class LinkNamesToTheApi(SphinxTransform):
    """Links every name of the public API that is written as code to its description.

    The pages, except the API reference, stay plain Markdown, which every viewer
    renders. In the description of an object, its own name and the names of its
    arguments stay code, and so does a call with an argument that the object lacks,
    such as `autocast(enabled=False)` of PyTorch.
    """

    default_priority = 500

    def apply(self, **kwargs):
        """Wraps the code in a reference, except in headings and links."""
        for code in list(self.document.findall(nodes.literal)):
            found = re.fullmatch(
                r"(?:jmpscale\.)?([\w.]+?)(?:\(.*\))?", code.astext(), flags=re.DOTALL
            )
            target = PUBLIC.get(found[1]) if found else None
            if target and not takes_arguments(target, code.astext()):
                continue
            if target in self._local_names(code):
                continue
            if target and not isinstance(
                code.parent, nodes.title | nodes.reference | addnodes.pending_xref
            ):
                link = addnodes.pending_xref(
                    "",
                    refdomain="py",
                    reftype="obj",
                    reftarget=target,
                    refexplicit=True,
                    refwarn=True,
                )
                code.replace_self(link)
                link += code

    def _local_names(self, node):
        """Returns the names that the descriptions around a node document or hide."""
        names = set()
        while node := node.parent:
            if isinstance(node, addnodes.desc):
                for signature in node.findall(addnodes.desc_signature):
                    names.add(f"{signature['module']}.{signature['fullname']}")
                    for parameters in signature.findall(addnodes.desc_parameterlist):
                        names |= {
                            f"jmpscale.{name.astext()}"
                            for name in parameters.findall(addnodes.desc_sig_name)
                        }
        return names


def takes_arguments(target, code):
    """Tests whether a public object takes the arguments that a call of it names."""
    call = re.fullmatch(r"[\w.]+\(([^()]*)\)", code, flags=re.DOTALL)
    named = set(re.findall(r"(\w+)=", call[1])) if call else set()
    if not named:
        return True
    parameters = inspect.signature(pydoc.locate(target)).parameters
    return named <= parameters.keys()


class WrapProseOutputs(SphinxTransform):
    """Marks printed prose, whose lines wrap on narrow screens. Printed tables do not.

    A block with prose and a table is divided into blocks without space between them.
    """

    default_priority = 500

    def apply(self, **kwargs):
        """Adds the classes `prose` and `joined` to the blocks."""
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") not in PRINTED:
                continue
            parts = []
            for is_table, lines in itertools.groupby(
                block.rawsource.rstrip("\n").split("\n"), key=is_row
            ):
                lines = list(lines)
                text = "\n".join(lines) if is_table else unfilled(lines)
                part = nodes.literal_block(text, text, **block.attributes)
                part["classes"] = [*block["classes"], *["prose"] * (not is_table)]
                part["classes"] += ["joined"] * bool(parts)
                parts.append(part)
            block.replace_self(parts)


def is_row(line):
    """Tests whether a printed line belongs to a table: it has a gap, or is indented."""
    return bool(re.search(r"  ", line))


def unfilled(lines):
    """Returns printed lines as one text, without the breaks of `textwrap.fill`."""
    text = lines[0]
    for line, following in itertools.pairwise(lines):
        word = following.partition(" ")[0]
        is_filled = len(f"{line} {word}") > PRINTED_WIDTH
        text += f"{' ' if is_filled else chr(10)}{following}"
    return text


def use_index_commands(app, docname, source):
    """Gives the commands of the package index, once the repository is set."""
    if docname == root_doc and "Repository" in urls:
        hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]
        for command, for_index in hook.get("commands", {}).items():
            source[0] = source[0].replace(command, for_index)


def add_docstrings(app, docname, source):
    """Adds the docstrings of the names in each table to the API reference.

    In a repository the names lead to the modules; on the site, to the docstrings.
    """
    if docname == "docs/api":
        text = re.sub(r"\[(`[\w.]+`)\]\(\.\./jmpscale/\S+?\)", r"\1", source[0])
        source[0] = re.sub(r"(?:^\|.*\n)+", _table_and_docstrings, text, flags=re.M)


def _table_and_docstrings(table):
    """Returns a table of names, followed by the directives for their docstrings."""
    names = re.findall(r"^\| `([\w.]+)` \|", table[0], flags=re.MULTILINE)
    directives = [
        f".. autoclass:: jmpscale.{name}\n   :members:"
        if inspect.isclass(getattr(jmpscale, name, None))
        else f".. autofunction:: jmpscale.{name}"
        for name in names
    ]
    return "\n".join([table[0], "```{eval-rst}", *directives, "```", ""])


def skip_attributes(app, what, name, obj, skip, options):
    """Omits the attributes of a class, which its docstring describes."""
    computed = inspect.isroutine(obj) or isinstance(
        obj, property | functools.cached_property
    )
    return skip or not computed


def make_fenced_blocks_literal(app, what, name, obj, options, lines):
    """Converts the fenced blocks of a docstring to literal blocks."""
    converted, fenced = [], False
    for line in lines:
        if line.startswith("```"):
            converted += [] if fenced else ["::", ""]
            fenced = not fenced
        else:
            converted.append(f"    {line}" if fenced else line)
    lines[:] = converted


def show_public_types(app, what, name, obj, options, lines):
    """Writes the type of an attribute behind its name, without private modules."""
    shown, option = [], 0
    for line in lines:
        line = line.replace("jax.jaxlib._jax.Array", "jax.Array")
        line = re.sub(r"\bjmpscale(\._\w+)+\.", "", line)
        if line.startswith("   :type: "):
            shown.insert(option, line)
            continue
        shown.append(line)
        if line.startswith(".. attribute:: "):
            option = len(shown)
    lines[:] = shown


def show_public_defaults(app, what, name, obj, options, signature, return_annotation):
    """Writes defaults as users do, and omits the signatures that users do not call."""
    summary = (inspect.getdoc(obj) or "").partition("\n")[0]
    if isinstance(obj, enum.EnumType) or "; created by" in summary:
        return "", None
    defaults = {
        "SMALLEST_SCALE": "2.0**-126",
        "LARGEST_SCALE": "2.0**126",
        "4294967296.0": "2.0**32",
    }
    for private, public in defaults.items():
        signature = signature and signature.replace(private, public)
    return signature, return_annotation


def add_description(app, pagename, templatename, context, doctree):
    """Describes a page by its first paragraph, unless the page has a description."""
    if doctree is None or 'name="description"' in context["metatags"]:
        return
    paragraphs = doctree.findall(nodes.paragraph)
    first = next(text for text in paragraphs if isinstance(text.parent, nodes.section))
    content = html.escape(textwrap.shorten(first.astext(), 160, placeholder=" ..."))
    context["metatags"] += f'<meta name="description" content="{content}">\n'


def setup(app):
    """Registers the transform and the conversions with Sphinx."""
    app.add_transform(LinkNamesToTheApi)
    app.add_transform(WrapProseOutputs)
    app.connect("source-read", use_index_commands)
    app.connect("source-read", add_docstrings)
    app.connect("html-page-context", add_description)
    app.connect("autodoc-skip-member", skip_attributes)
    app.connect("autodoc-process-docstring", make_fenced_blocks_literal)
    app.connect("autodoc-process-docstring", show_public_types)
    app.connect("autodoc-process-signature", show_public_defaults)
