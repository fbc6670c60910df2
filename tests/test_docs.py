"""The documentation: links lead somewhere, and commands have the options shown."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pillarbox.outbox.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / ".github").glob("*.md"),
        *ROOT.glob("*.md"),
    ]
)
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text) for text in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if link.startswith(("http:", "https:")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_runbook_has_every_warning() -> None:
    events = (ROOT / "docs" / "reference" / "events.md").read_text()
    warnings = re.findall(r"^`[\w.]+\.(\w+)`, .*WARNING", events, re.MULTILINE)
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    assert len(warnings) >= 17
    assert [name for name in warnings if f"`{name}`" not in runbook] == []


def commands() -> list[str]:
    """Return what the pages show of pillarbox's commands in a shell."""
    blocks = [
        text
        for page in PAGES
        for kind, text in BLOCK.findall(page.read_text())
        if kind == "console"
    ]
    lines = re.findall(r"^ *\$ (.*(?:\\\n.*)*)", "\n".join(blocks), re.MULTILINE)
    starts = (re.search(r"(?:^|\s)pillarbox (?=[a-z])", line) for line in lines)
    shown = (
        re.split(r"\s[#>|]\s|\s&$|\)", found.string[found.end() :])[0]
        for found in starts
        if found is not None
    )
    return [*dict.fromkeys(shown)]


@pytest.mark.parametrize("command", commands())
def test_every_command_on_a_page_is_understood(command: str) -> None:
    group: Any = get_command(app)
    words = shlex.split(command.replace("\\\n", " "))
    with group.make_context("pillarbox", [], resilient_parsing=True) as context:
        while hasattr(group, "commands"):
            _, group, words = group.resolve_command(context, words)
        # Parses the options; doesn't run it.
        group.make_context("command", words).close()


def test_the_pages_show_many_commands() -> None:
    assert len(commands()) > 40


@pytest.mark.parametrize("page", [*PAGES, ROOT / ".ci" / "run"], ids=name_of)
def test_every_make_target_exists_once(page: Path) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    prompt = "" if page.name == "run" else r"\$ "
    code = re.findall(
        rf"`make ([a-z]+)[ `]|^{prompt}make ([a-z]+)", page.read_text(), re.MULTILINE
    )
    words = {word for found in code for word in found if word}

    assert len(targets) == len({*targets})
    assert words <= {*targets}
