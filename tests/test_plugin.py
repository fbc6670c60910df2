"""The pytest plugin, in a separate run as in an application's tests."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, text

from pillarbox.outbox.testing.databases import databases
from pillarbox.outbox.testing.postgres import PostgresServer

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import pillarbox
from pillarbox import Message
from pillarbox.outbox.events import Event
from pillarbox.outbox.testing import added

COUNT = text("SELECT count(*) FROM outbox.message")


class Happened(Event):
    pass


@pytest.mark.asyncio
async def test_events(recorded_events):
    recorded_events(Happened())
    assert await recorded_events.wait_for(Happened) == [Happened()]
    with pytest.raises(TimeoutError, match="1 of 2 Happened happened"):
        await recorded_events.wait_for(Happened, 2, timeout=0.01)


@pytest.mark.parametrize("n", [1, 2])
def test_database(pillarbox_database_url, n):
    engine = create_engine(pillarbox_database_url)
    with Session(engine) as session, session.begin():
        pillarbox.add(session, Message("orders.placed", {"order": n}))
        [message] = added(session, "orders.placed")
        assert message.json() == {"order": n}
    with engine.connect() as connection:
        assert connection.scalar(COUNT) == 1
    engine.dispose()


@pytest.mark.asyncio
async def test_async(pillarbox_database_url):
    engine = create_async_engine(pillarbox_database_url)
    async with AsyncSession(engine) as session:
        pillarbox.add(session, Message("orders.placed", b""))
        assert await session.scalar(COUNT) == 1
    await engine.dispose()


@pytest.fixture(scope="session")
def with_orders(pillarbox_databases):
    with pillarbox_databases.new() as url:
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE shop_order (id int)"))
        engine.dispose()
        yield url


@pytest.mark.parametrize("n", [1, 2])
def test_own_tables(pillarbox_databases, with_orders, n):
    with pillarbox_databases.new(like=with_orders) as url:
        engine = create_engine(url)
        with Session(engine) as session, session.begin():
            session.execute(text("INSERT INTO shop_order VALUES (1)"))
            count = text("SELECT count(*) FROM shop_order")
            assert session.scalar(count) == 1
        engine.dispose()
"""
STALE = "pillarbox_template_20200101_0123456789ab"
TEMPLATES = """
SELECT datname, oid FROM pg_database WHERE datname ^@ 'pillarbox_template_2'
"""


@pytest.fixture
def project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """The tests of an application, with a cache of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path))
    monkeypatch.setenv("PILLARBOX_DATABASE_URL", "postgresql://production.invalid/shop")
    # The result must not depend on whether this tree is installed.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester


def use_a_database(number: int) -> str:
    """Use a new database, as another run does."""
    with databases() as made, made.new() as url:
        engine = create_engine(url)
        with engine.connect() as connection:
            query = text("SELECT count(*) FROM outbox.message")
            assert connection.scalar(query) == 0, number
        engine.dispose()
    return url


def test_fixtures_work_in_another_project_and_keep_their_template(
    project: pytest.Pytester,
) -> None:
    def stamps() -> list[tuple[int, int]]:
        kept = (path.stat() for path in (project.path / "pillarbox").glob("2*"))
        return [(found.st_ino, found.st_mtime_ns) for found in kept]

    project.makeconftest('pytest_plugins = ["pillarbox.outbox.testing.plugin"]')
    project.makepyfile(TESTS)
    plugins = ("-p", "pytest_asyncio.plugin", "-p", "xdist.plugin")
    project.runpytest_subprocess("-q", *plugins, "-n2").assert_outcomes(passed=6)
    kept = stamps()

    use_a_database(1)

    assert len(kept) == 1
    assert stamps() == kept


def test_a_server_of_yours_keeps_one_template_of_today(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def templates() -> dict[str, int]:
        with psycopg.connect(server.url) as connection:
            return dict(connection.execute(TEMPLATES).fetchall())

    monkeypatch.setenv("PILLARBOX_TEST_DATABASE_URL", server.url)
    server.create_database(STALE)
    try:
        with ThreadPoolExecutor(2) as at_once:
            assert len({*at_once.map(use_a_database, range(2))}) == 2
        kept = templates()
        use_a_database(3)
        assert templates() == kept
    finally:
        for template in templates():
            server.drop_database(template)
    assert len(kept) == 1
    assert STALE not in kept


UNSENT = """
import pytest
from sqlalchemy.orm import Session

import pillarbox
from pillarbox.outbox.testing import added
from pillarbox import Message


def test_closed():
    with Session() as session:
        pillarbox.add(session, Message("closed", b""))


def test_asked_for():
    with Session() as session:
        pillarbox.add(session, Message("asked", b""))
        assert added(session, "asked")


def test_rolled_back():
    with pytest.raises(ValueError), Session() as session:
        pillarbox.add(session, Message("rolled back", b""))
        raise ValueError
"""


def test_messages_left_unsent_are_warnings(project: pytest.Pytester) -> None:
    project.makepyfile(UNSENT)

    result = project.runpytest_subprocess("-q")

    result.assert_outcomes(passed=3, warnings=1)
    result.stdout.fnmatch_lines(
        ["*lost 1 message of topic 'closed': their session was closed without *"]
    )


UNAWAITED = """
import asyncio

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession


async def handle(session):
    session.execute(text("SELECT 1"))


def test_unawaited():
    asyncio.run(handle(AsyncSession()))
"""


def test_the_filters_in_the_documentation_find_what_was_not_awaited_and_not_committed(
    project: pytest.Pytester,
) -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    filters = page.partition("```toml\n")[2].partition("```")[0]
    project.makepyprojecttoml(filters)
    project.makepyfile(test_unsent=UNSENT, test_unawaited=UNAWAITED)

    result = project.runpytest_subprocess("-q")

    result.assert_outcomes(failed=2, passed=2)
    result.stdout.fnmatch_lines_random(
        ["FAILED *::test_unawaited - *", "FAILED *::test_closed - *"]
    )
