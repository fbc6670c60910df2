"""The child processes of `pillarbox dev`: one log, and none left over."""

import asyncio
import signal
import subprocess
import sys

import pytest

from pillarbox.outbox.dev import parts as module
from pillarbox.outbox.dev.parts import Parts
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.testing.lifetime import is_running
from tests.fixtures.waiting import wait_for

# Prints when it has started, and when it is asked to stop.
PATIENT = "trap 'echo asked; exit 3' TERM; echo started; while :; do sleep 0.01; done"
STUBBORN = "trap '' TERM; echo started; while :; do sleep 0.01; done"
# Starts a process, prints the id of its shell, and is killed.
OWNER = """
import asyncio, os, signal
from pillarbox.outbox.dev.parts import Parts

async def main():
    async with Parts({}) as parts:
        await parts.start("one", "sh", "-c", "echo $$; exec sleep 1000")
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[str]:
    """The log, line by line."""
    lines: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(
        module, "say", lambda name, text: lines.put_nowait(f"{name}: {text}")
    )
    return lines


async def test_each_line_begins_with_the_name_of_its_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with Parts({"NAME": "value"}) as parts:
        part = await parts.start("one", "sh", "-c", "echo $NAME; echo error >&2")
        assert await part.ended == 0

    assert capsys.readouterr().out == "one      | value\none      | error\n"


async def test_the_process_that_started_first_stops_last(
    lines: asyncio.Queue[str],
) -> None:
    slow = PATIENT.replace("echo asked", "sleep 0.5; echo asked")
    async with Parts({}) as parts:
        database, relay = [
            await parts.start(name, "sh", "-c", command)
            for name, command in (("database", PATIENT), ("relay", slow))
        ]
        for _ in range(2):
            assert (await lines.get()).endswith(": started")

    assert (database.ended.result(), relay.ended.result()) == (3, 3)
    assert [lines.get_nowait(), lines.get_nowait()] == [
        "relay: asked",
        "database: asked",
    ]


async def test_a_process_that_does_not_stop_is_killed(
    lines: asyncio.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_SECONDS", 0.1)
    async with Parts({}) as parts:
        part = await parts.start("one", "sh", "-c", STUBBORN)
        assert await lines.get() == "one: started"

    assert part.ended.result() == -signal.SIGKILL
    assert "still runs after 0.1 s" in lines.get_nowait()


async def test_a_command_that_fails_is_an_error_that_names_it() -> None:
    async with Parts({}) as parts:
        with pytest.raises(
            OutboxError, match=r"pillarbox relay --nonsense ended with 2"
        ):
            await parts.run("relay", "--nonsense")


@pytest.mark.fault
def test_no_process_outlives_one_that_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline().split()[-1])
    finally:
        owner.kill()
        owner.communicate()
    wait_for(f"the end of {pid}", lambda: not is_running(pid))
