"""The pytest plugin, in a separate run as in an application's tests."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import outbox
from outbox.events import Event
from outbox.testing import added


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
        outbox.add(session, outbox.Message("orders.placed", {"order": n}))
        [message] = added(session, "orders.placed")
        assert message.json() == {"order": n}
    with engine.connect() as connection:
        count = text("SELECT count(*) FROM outbox.message")
        assert connection.scalar(count) == 1
    engine.dispose()
"""


def test_fixtures_work_in_another_project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    # The result must not depend on whether this tree is installed.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TESTS)

    result = pytester.runpytest_subprocess(
        *("-q", "-p", "outbox.testing.plugin", "-p", "pytest_asyncio.plugin")
    )

    result.assert_outcomes(passed=3)


UNSENT = """
import asyncio

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import outbox
from outbox.testing import added


@pytest.fixture
def session():
    with Session() as session:
        yield session


def test_closed():
    with Session() as session:
        outbox.add(session, outbox.Message("closed", b""))


def test_async():
    async def handle():
        async with AsyncSession() as session:
            outbox.add(session, outbox.Message("async", b""))

    asyncio.run(handle())


@pytest.mark.pillarbox_allow_unsent
def test_a_marked_test_may_leave_messages_unsent():
    test_closed()


def test_asked_for():
    with Session() as session:
        outbox.add(session, outbox.Message("asked", b""))
        assert added(session, "asked")


def test_messages_of_a_fixture_do_not_count(session):
    outbox.add(session, outbox.Message("fixture", b""))


def test_rolled_back():
    with pytest.raises(ValueError), Session() as session:
        outbox.add(session, outbox.Message("rolled back", b""))
        raise ValueError
"""


def test_a_test_that_leaves_messages_unsent_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(UNSENT)

    result = pytester.runpytest_subprocess("-q", "-p", "outbox.testing.plugin")

    result.assert_outcomes(failed=2, passed=4)
    result.stdout.fnmatch_lines_random(
        [
            "lost 1 message of topic 'closed': their session was closed without *",
            "lost 1 message of topic 'async': their session was closed without *",
        ]
    )


def test_the_distribution_registers_the_plugin() -> None:
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()

    assert 'pillarbox = "outbox.testing.plugin"' in pyproject
