"""The pytest plugin, in a run of its own as an application would have it."""

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
    with pytest.raises(TimeoutError, match="1 of 2 Happened came"):
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
    # Whether this very tree is installed or not.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TESTS)

    result = pytester.runpytest_subprocess(
        *("-q", "-p", "outbox.testing.plugin", "-p", "pytest_asyncio.plugin")
    )

    result.assert_outcomes(passed=3)


def test_the_distribution_registers_the_plugin() -> None:
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()

    assert 'pillarbox = "outbox.testing.plugin"' in pyproject
