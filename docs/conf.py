"""Sphinx's settings, for `make site`."""

from importlib.metadata import version as version_of
from pathlib import Path
from typing import ClassVar

import mmdr
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import get_node_source
from sphinx.util.typing import ExtensionMetadata

project = "pillarbox"
version = version_of("pillarbox")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Colours only: two blocks that run confuse the highlighter.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "pillarbox"
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

# In docstrings, `name` is a link if the page documents it, and code otherwise.
default_role = "py:obj"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80


class Picture(SphinxDirective):
    """A picture in Mermaid, which GitHub draws itself."""

    has_content = True
    # Pictures are dark on white, also where the page is dark.
    TAG: ClassVar = '<div class="picture" style="background: white; margin: 1em 0">'

    def run(self) -> list[nodes.Node]:
        """Draw it while the site is built."""
        try:
            svg = mmdr.render("\n".join(self.content)).svg()
        except ValueError as error:
            raise self.error(str(error)) from None
        # Rules and markers are found by this id, and a page can have two pictures.
        name = f"picture-{self.env.new_serialno('picture')}"
        svg = svg.replace("merman", name)
        return [nodes.raw("", f"{self.TAG}{svg}</div>", format="html")]


def leave_folders(_app: Sphinx, page: nodes.document) -> None:
    """Show a link to a folder, which the site doesn't have, as its text."""
    for link in [*page.findall(pending_xref)]:
        folder = Path(get_node_source(link)).parent / link["reftarget"]
        if link["reftype"] == "myst" and folder.is_dir():
            link.replace_self(link.children)


def read_docstring(
    _app: Sphinx, what: str, _name: str, _value: object, _: object, lines: list[str]
) -> None:
    """Change what Sphinx would read otherwise than it was meant."""
    if what in {"attribute", "property"}:
        # Napoleon takes what is before the first line's colon for a type.
        lines[:0] = ["..", ""]
    for at in reversed(range(1, len(lines) - 1)):
        # As in Markdown, what is indented below a paragraph is code.
        if (
            not lines[at]
            and lines[at + 1].startswith("    ")
            and not lines[at - 1].startswith(" ")
        ):
            lines[at:at] = ["", "::"]


def setup(app: Sphinx) -> ExtensionMetadata:
    """Add what the settings above can't say."""
    app.add_directive("mermaid", Picture)
    app.connect("doctree-read", leave_folders)
    # Before Napoleon.
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    return {"parallel_read_safe": True}
