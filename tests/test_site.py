"""The site: built without a warning, complete, and the same without a network."""

import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import pillarbox

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [path for path in DOCS.rglob("*.md") if path != DOCS / "index.md"]
FROM_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=\"(?:https?:)?//[^>]*>"
    r"|<link\b[^>]*\bhref=\"(?:https?:)?//[^>]*>"
    r"|(?:url\(|@import )[\"']?(?:https?:)?//[^)]*"
)


def test_the_site_is_built_without_a_warning_and_asks_no_other_host(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site"
    command = ["-m", "sphinx", "-W", "--keep-going", "-q", "-j", "auto"]
    ran = subprocess.run(
        [sys.executable, *command, "-d", str(tmp_path / "doctrees"), "docs", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (0, "")

    pages = {path: path.read_text() for path in site.rglob("*.html")}
    asked = [
        found
        for text in [*pages.values(), *(it.read_text() for it in site.rglob("*.css"))]
        for found in FROM_ELSEWHERE.findall(text)
    ]
    assert asked == []

    in_text = sum(
        path.read_text().count("```mermaid\n") for path in [ROOT / "README.md", *PAGES]
    )
    drawn = sum(text.count('<div class="picture"') for text in pages.values())
    assert drawn == in_text > 0


def test_each_page_is_in_the_navigation_once() -> None:
    trees = re.findall(
        r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```",
        (DOCS / "index.md").read_text(),
        re.DOTALL,
    )
    entries = [line for tree in trees for line in tree.split()]
    reached = Counter(path for entry in entries for path in DOCS.glob(f"{entry}.md"))
    assert reached == Counter(PAGES)


@pytest.mark.parametrize("name", pillarbox.__all__)
def test_a_public_name_has_a_docstring(name: str) -> None:
    value = getattr(pillarbox, name)
    if not inspect.isroutine(value) and not isinstance(value, type):
        value = type(value)
    # Not one that is inherited; and a dataclass without one gets its signature.
    documented = value.__doc__ if inspect.isroutine(value) else vars(value)["__doc__"]
    assert documented
    assert not documented.startswith(f"{name}(")
