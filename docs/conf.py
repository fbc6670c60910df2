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
extensions = ["myst_parser"]
# Colours only: two blocks that run confuse the highlighter.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "pillarbox"
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]


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


def setup(app: Sphinx) -> ExtensionMetadata:
    """Add what the settings above can't say."""
    app.add_directive("mermaid", Picture)
    app.connect("doctree-read", leave_folders)
    return {"parallel_read_safe": True}
