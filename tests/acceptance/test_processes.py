"""`pillarbox consume --processes`: shared work, restarts, a common end."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.postgres.advisory_lock import reader_class
from tests.acceptance.brokers import Broker
from tests.acceptance.counters import Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.test_watching import STUCK, Watched
from tests.acceptance.writer import Writer
from tests.fixtures.processes import RunningProcess
from tests.fixtures.prometheus import scrape
from tests.fixtures.sessions import execute
from tests.fixtures.site import APP, Site
from tests.fixtures.variants import as_variant
from tests.fixtures.waiting import wait_for, wait_until_none

pytestmark = pytest.mark.fault

CAN_FAIL = f"""{APP}
from pathlib import Path

print("imported by", os.getpid(), flush=True)

def make_if_allowed():
    if Path(__file__).with_name("broken").exists():
        raise LookupError("no such setting")
    return consumer
"""
EXITS = f"""{APP}
@consumer.handles("exit")
def leave(session, message):
    os._exit(255)
"""
SHARES = """
    SELECT count(*) FROM pg_locks
     WHERE locktype = 'advisory' AND classid = %s AND objid < 48 AND granted
       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
     GROUP BY pid
"""


def children(parent: RunningProcess) -> dict[int, int]:
    """Return the id of each process that was started last, by its number."""
    found = re.findall(r"ProcessStarted process=(\d+) pid=(\d+)", parent.log())
    return {int(number): int(pid) for number, pid in found}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(pids: dict[int, int]) -> None:
    wait_for("all are gone", lambda: not any(map(is_running, pids.values())))


@contextmanager
def closed_gate(url: str) -> Iterator[psycopg.Connection]:
    """Let the handlers of `wait` wait until `open_gate`."""
    with psycopg.connect(url, autocommit=True) as gate:
        gate.execute("SELECT pg_advisory_lock(1)")
        yield gate


def open_gate(gate: psycopg.Connection) -> None:
    gate.execute("SELECT pg_advisory_unlock(1)")


async def waiting_in_both(site: Site, *options: str) -> RunningProcess:
    """Start two processes, each with some of eight handlers that wait."""
    parent = site.run("shop_app:make", "--processes=2", *options)
    classes = [reader_class("billing") & 0xFFFFFFFF]
    wait_for("they share", lambda: execute(site.url, SHARES, classes) == [(24,)] * 2)
    await site.publish(*(Message("orders", b"wait", key=f"{n}") for n in range(8)))
    parent.wait_for_log("waiting\n", times=8)
    return parent


@pytest.mark.parametrize("kind", ["redis", as_variant("postgres")])
@pytest.mark.timeout(900)
def test_processes_share_the_work_in_order_and_a_killed_one_is_replaced(
    kind: str,
    broker: Broker,
    relays: Relays,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
) -> None:
    parent = counters.start(broker.url, PILLARBOX_CONSUME_PROCESSES="3")
    parent.wait_for_log("ConsumerStarted", times=3)
    if broker.relayed:
        relays.start(broker.url)

    are = all if broker.shares else any

    def all_have_worked() -> bool:
        writer.add(120)
        counters.wait_for_count(writer.added)
        return are(map(counters.count_of, children(parent).values()))

    wait_for("each has handled messages", all_have_worked)
    before = children(parent)
    assert sorted(before) == [1, 2, 3]

    writer.add(1_000)
    counters.wait_for_count(writer.added - 900)
    os.kill(before[2], signal.SIGKILL)
    counters.wait_for_count(writer.added)
    parent.wait_for_log("ConsumerStarted", times=4)
    ended = f"ProcessEnded process=2 pid={before[2]} reason=SIGKILL"
    assert parent.log().count("ProcessEnded") == parent.log().count(ended) == 1
    after = children(parent)
    assert {**before, 2: after[2]} == after != before
    wait_for("so has the new one", all_have_worked)

    inspection.wait_until_settled()
    wait_until_none("deliveries wait", broker.waiting)
    counters.expect_each_once(writer.numbers(), ordered=broker.ordered)
    parent.terminate()
    assert parent.wait() == 0, parent.log()
    assert not any(map(is_running, after.values()))
    assert parent.log().count("ConsumerStopped") == 3


@pytest.mark.parametrize("signal_all", [as_variant(False), True])
async def test_a_signal_drains_all_even_if_each_gets_it_too(
    signal_all: bool, site: Site
) -> None:
    with closed_gate(site.url) as gate:
        parent = await waiting_in_both(site, "--listen=127.0.0.1:0")
        watched = Watched(parent)
        watched.wait_until(200)
        parent.terminate()
        for pid in children(parent).values() if signal_all else ():
            os.kill(pid, signal.SIGTERM)
        watched.wait_until(503, "end")
        await site.publish(Message("orders", b"too late"))
        open_gate(gate)
        assert parent.wait() == 0, parent.log()
    assert site.effects() == ["wait"] * 8
    assert site.unacked() == 1
    assert not any(map(is_running, children(parent).values()))
    assert "ProcessEnded" not in parent.log()


async def test_a_second_signal_ends_all_at_once(site: Site) -> None:
    with closed_gate(site.url):
        parent = await waiting_in_both(site, "--listen=127.0.0.1:0")
        parent.terminate()
        Watched(parent).wait_until(503, "end")
        parent.terminate()
        assert parent.wait(60) == 128 + signal.SIGTERM
        assert not any(map(is_running, children(parent).values()))
    assert site.effects() == []
    assert site.unacked() == 8


async def test_if_the_parent_is_killed_the_others_drain_and_end(site: Site) -> None:
    with closed_gate(site.url) as gate:
        parent = await waiting_in_both(site)
        parent.kill()
        await site.publish(Message("orders", b"too late"))
        open_gate(gate)
        wait_until_gone(children(parent))
    assert site.effects() == ["wait"] * 8
    assert site.unacked() == 1


def test_what_keeps_them_from_starting_is_printed_once(site: Site) -> None:
    parent = site.run("shop_app:fail", "--processes=3")
    assert parent.wait() == 2
    assert parent.log().count("no such setting") == 1
    assert sorted(children(parent)) == [1]


@pytest.mark.long
async def test_one_that_cannot_start_again_is_tried_again_while_the_others_work(
    site: Site, tmp_path: Path
) -> None:
    (tmp_path / "shop_app.py").write_text(CAN_FAIL)
    broken = tmp_path / "broken"
    parent = site.run("shop_app:make_if_allowed", "--processes=2")
    parent.wait_for_log("ConsumerStarted", times=2)
    imported = re.findall(r"imported by (\d+)", parent.log())
    assert sorted(map(int, imported)) == sorted(children(parent).values())
    broken.touch()
    os.kill(children(parent)[1], signal.SIGKILL)
    parent.wait_for_log("reason='exit status 2' seconds_until_start=2.0")
    await site.publish(Message("orders", b"1"))
    wait_for("it is handled", lambda: site.effects() == ["1"])
    broken.unlink()
    parent.wait_for_log("ConsumerStarted", times=3)
    parent.terminate()
    assert parent.wait() == 0, parent.log()


async def test_one_that_ends_with_any_signal_or_status_is_replaced(
    site: Site, tmp_path: Path
) -> None:
    (tmp_path / "shop_app.py").write_text(EXITS)
    parent = site.run("shop_app:make", "--processes=2")
    parent.wait_for_log("ConsumerStarted", times=2)
    unnamed = signal.SIGRTMIN + 1
    os.kill(children(parent)[2], unnamed)
    parent.wait_for_log(f"reason='signal {unnamed}'")
    await site.publish(Message("exit", b""))
    parent.wait_for_log("reason='exit status 255'")
    parent.terminate()
    assert parent.wait() == 0, parent.log()


async def test_one_whose_loop_is_blocked_is_replaced(
    site: Site, tmp_path: Path
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    parent = site.run("stuck:consumer", "--processes=2", "--watchdog=1s")
    parent.wait_for_log("ConsumerStarted", times=2)
    await site.publish(Message("orders", b""))
    parent.wait_for_log("reason='exit status 70'")
    parent.wait_for_log("ProcessStarted", times=3)


def test_one_address_serves_the_health_and_the_metrics_of_all(site: Site) -> None:
    parent = site.run("shop_app:make", "--processes=2", "--listen=127.0.0.1:0")
    watched = Watched(parent)
    watched.wait_until(200)
    lines = scrape(parent).splitlines()
    started = 'pillarbox_events_total{consumer="billing",event="ConsumerStarted",'
    for number in (1, 2):
        assert f'{started}process="{number}"}} 1.0' in lines
    both = 'pillarbox_events_total{consumer="",event="ProcessStarted",process="parent"}'
    assert f"{both} 2.0" in lines
    (kind,) = (it for it in lines if it.startswith("# TYPE pillarbox_events"))
    assert kind == "# TYPE pillarbox_events_total counter"

    frozen = children(parent)[2]
    os.kill(frozen, signal.SIGSTOP)
    watched.wait_until(503, "answer of process 2")
    os.kill(frozen, signal.SIGCONT)
    watched.wait_until(200)
    os.kill(frozen, signal.SIGKILL)
    watched.wait_until(503, "answer of process 2")
    watched.wait_until(200)
    assert children(parent)[2] != frozen


def test_log_lines_show_which_process_wrote_them(site: Site) -> None:
    for log_format, line in (
        ("text", r" INFO \[{}\] ConsumerStarted "),
        ("json", r'"pid": {}, "message": "ConsumerStarted '),
    ):
        parent = site.run(
            "shop_app:make", "--processes=2", PILLARBOX_LOG_FORMAT=log_format
        )
        parent.wait_for_log("ConsumerStarted consumer=", times=2)
        for pid in children(parent).values():
            assert re.search(line.format(pid), parent.log()), parent.log()


async def test_with_once_all_end_when_nothing_is_left(site: Site) -> None:
    await site.publish(*(Message("orders", b"%d" % n) for n in range(20)))
    parent = site.run("shop_app:make", "--processes=2", "--once")
    assert parent.wait() == 0, parent.log()
    assert len(site.effects()) == 20
    assert sorted(children(parent)) == [1, 2]
    assert "ProcessEnded" not in parent.log()
