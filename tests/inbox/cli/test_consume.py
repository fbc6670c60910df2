"""`pillarbox consume`: start, drain, kill and error messages."""

import re
import signal
import sys
from pathlib import Path

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.cli.main import main
from tests.fixtures.consumers import numbered
from tests.fixtures.sessions import execute
from tests.fixtures.site import APP, Site
from tests.fixtures.waiting import wait_for

CONSUMER = "shop_app:consumer"
PAYLOADS_LEFT = """
    SELECT convert_from(payload, 'UTF8') FROM outbox.message
      JOIN outbox.unsettled_message USING (id)
     WHERE reader <> 'main'
"""


async def test_sigterm_lets_handlers_finish_and_exits_with_0(site: Site) -> None:
    await site.publish(Message("orders", b"wait", key="k"), *numbered(3))
    with psycopg.connect(site.url, autocommit=True) as gate:
        gate.execute("SELECT pg_advisory_lock(1)")
        process = site.run("shop_app:make")
        process.wait_for_log("waiting")
        wait_for("the others are done", lambda: site.unacked() == 1)
        process.terminate()
        # Wait, because a second signal would end it at once.
        wait_for("it drains", lambda: not process.catches(signal.SIGTERM))
        await site.publish(Message("orders", b"too late"))
        gate.execute("SELECT pg_advisory_unlock(1)")
        assert process.wait() == 0, process.log()
    assert sorted(site.effects()) == ["0", "1", "2", "wait"]
    assert site.unacked() == 1
    assert "Traceback" not in process.log()


async def test_a_second_sigterm_ends_the_process_at_once(site: Site) -> None:
    await site.publish(Message("orders", b"hang"))
    process = site.run()
    process.wait_for_log("hanging", seconds=60)
    process.terminate()
    wait_for("it drains", lambda: not process.catches(signal.SIGTERM), seconds=60)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    assert site.unacked() == 1


async def test_a_hanging_handler_does_not_keep_the_process_from_exiting(
    site: Site,
) -> None:
    await site.publish(Message("orders", b"hang"))
    process = site.run(TEST_DRAIN="0.1")
    process.wait_for_log("hanging")
    process.terminate()
    assert process.wait() == 0, process.log()
    abandoned = re.search("WARNING HandlersAbandoned (.*)", process.log())
    assert abandoned is not None
    assert re.match(r"consumer=\S+ handlers=1 remedy='make the handlers", abandoned[1])
    assert site.effects() == []
    assert site.unacked() == 1


async def test_once_handles_what_is_waiting_and_exits(site: Site) -> None:
    numbers = numbered(20, keys=5)
    bulk, later = Message("bulk.a", b"bulk"), Message("orders", b"later", key="k")
    await site.publish(*numbers, bulk, later, Message("orders", b"exit"))
    process = site.run(CONSUMER, "--once", INTERVALS="idle=3")
    # A retry that is due later isn't waited for.
    assert process.wait(60) == 0, process.log()
    assert sorted(site.effects()) == sorted([*map(str, range(20)), "bulk"])
    assert sorted(execute(site.url, PAYLOADS_LEFT)) == [("exit",), ("later",)]
    assert "the handler raised SystemExit" in process.log()

    await site.publish(Message("orders", b"bad"), Message("orders", b"good"))
    process = site.run(CONSUMER, "--once", INTERVALS="idle=0.5")
    assert process.wait(60) == 1, process.log()
    assert "good" in site.effects()
    assert execute(site.url, "SELECT error_reason FROM inbox.dead_letter") == [
        ("DeadLetter: it is bad",)
    ]


async def test_only_the_named_queues_are_served(site: Site) -> None:
    await site.publish(Message("orders", b"order"), Message("bulk.a", b"bulk"))
    process = site.run(CONSUMER, "--queue=batch=3", "--once", INTERVALS="idle=0.5")
    assert process.wait(60) == 0, process.log()
    assert site.effects() == ["bulk"]
    assert execute(site.url, PAYLOADS_LEFT) == [("order",)]
    process = site.run(CONSUMER, "--queue", "default", "--queue", "batch=2")
    both = ["bulk", "order"]
    wait_for("both are served", lambda: sorted(site.effects()) == both, seconds=60)


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("shop_app:broken", [], "must be a Consumer"),
        ("shop_app:fail", [], "'fail' raised LookupError: no such setting"),
        (CONSUMER, ["--wait=0s"], "can't read the inbox"),
        (CONSUMER, ["--queue=batch=0"], "weight 0 of queue 'batch': must be a whole"),
        (CONSUMER, ["--queue=batch=two"], "weight 'two' is not a whole number"),
        (CONSUMER, ["--queue=batch", "--queue=batch=2"], "'batch' was given twice"),
        (CONSUMER, ["--queue=bacth"], "queue 'bacth': no handler uses this queue"),
        (CONSUMER, ["--listen=99999"], "listen=99999: not an address"),
        (CONSUMER, ["--processes=0"], "--processes 0: must be at least 1"),
        (CONSUMER, ["--processes=two"], "'--processes': 'two' is not a valid int"),
    ],
)
def test_an_error_at_start_prints_one_line_and_exits_with_2(
    path: str,
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "shop_app.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop_app", raising=False)
    monkeypatch.setenv("TEST_URL", "postgresql://127.0.0.1:1/x")
    monkeypatch.setenv("TEST_BROKER", "memory://")

    assert main(["consume", path, *options]) == 2

    # Dead letters may have been retried before the database was found unavailable.
    said = capsys.readouterr().err.splitlines()
    (line,) = (line for line in said if " INFO " not in line)
    assert words in line
