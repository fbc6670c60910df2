"""The Python and SQL on the pages runs.

A page is one program: a block can use the names of those before it and those of
`page_names`. An `invisible-code-block` comment contains what the page would only
repeat, a `skip` comment the reason for which the next block can't run. A block that is
part of a file in examples/ runs there. `test_tutorial` follows the tutorial.
"""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from unittest import SkipTest

import psycopg
import pytest
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from pillarbox import REGISTRY
from pillarbox.outbox.observability import opentelemetry
from tests.fixtures.postgres import MigratedData, copied_server

ROOT: Final = Path(__file__).parent.parent
NAMES: Final = Path(__file__).parent / "fixtures" / "page_names.py"
EXAMPLES: Final = "\n".join(
    path.read_text() for path in (ROOT / "examples").rglob("*.py")
)
PAGES: Final = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
OWN_TEST: Final = ROOT / "docs" / "tutorial.md"
SKIPPED: Final = 7

_evaluate: Final = PythonEvaluator()


def run_python(example: Example) -> None:
    """Run a block with a consumer that has no handlers yet."""
    if example.parsed.strip() not in EXAMPLES:
        example.namespace["consumer"] = runpy.run_path(str(NAMES))["consumer"]
        _evaluate(example)


def run_sql(example: Example) -> None:
    """Run a block in the page's transaction."""
    example.namespace["connection"].execute(example.parsed)


PARSERS: Final = (
    CodeBlockParser("python", run_python),
    CodeBlockParser("sql", run_sql),
    SkipParser(),
)


def blocks_of(page: Path) -> Document:
    return Document.parse(str(page), *PARSERS)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def connection(migrated_data: MigratedData) -> Iterator[psycopg.Connection]:
    """A superuser's connection to a database with the schema and pg_cron's jobs."""
    with (
        copied_server(migrated_data.directory(with_cron=True)) as server,
        psycopg.connect(server.url) as connection,
    ):
        yield connection


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers, it registers for itself."""
    for name in ("_topics", "_events"):
        monkeypatch.setattr(REGISTRY, name, {})
    monkeypatch.setattr(REGISTRY, "strict", False)


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p != OWN_TEST and blocks_of(p).regions], ids=name_of
)
def test_the_code_on_a_page_runs(
    page: Path, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILLARBOX_DATABASE_URL", "postgresql+psycopg://")
    monkeypatch.setenv("WEBHOOK_SECRET", "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz")
    document = blocks_of(page)
    document.namespace.update(runpy.run_path(str(NAMES)), connection=connection)
    try:
        for example in document:
            try:
                example.evaluate()
            except SkipTest:
                continue
            except Exception as error:
                error.add_note(f"in the block at {example.path}:{example.line}")
                raise
    finally:
        opentelemetry.uninstrument()
        connection.rollback()


def test_few_blocks_are_skipped() -> None:
    regions = [region for page in PAGES for _, region in blocks_of(page).regions]
    skips = [r.parsed for r in regions if r.evaluator not in (run_python, run_sql)]
    assert len(skips) == SKIPPED
    assert all(action == "next" and reason for action, reason in skips)
    assert len(regions) > 60
