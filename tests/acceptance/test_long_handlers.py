"""Processes with long handlers are stopped, killed, frozen and cancelled."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pillarbox import Message
from tests.acceptance.brokers import outbox
from tests.acceptance.inspection import Inspection
from tests.acceptance.printer import NAME, PAGES, TABLES, TOPIC
from tests.acceptance.relays import as_role
from tests.fixtures.processes import Processes, RunningProcess, command_line
from tests.fixtures.relay import insert
from tests.fixtures.variants import as_variant
from tests.fixtures.waiting import wait_for

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

BEFORE = 3
"""The number of pages printed before the fault."""


class Printers(Processes):
    """Starts consumer processes that print reports, and reads their output."""

    def __init__(self, url: str, directory: Path, inspection: Inspection) -> None:
        super().__init__(
            directory,
            "printer",
            PILLARBOX_BROKER_URL=outbox(url, TOPIC, consumer=NAME).url,
            PILLARBOX_DATABASE_URL=as_role(url, "pillarbox_consumer"),
        )
        self._inspection = inspection
        inspection.run(TABLES)

    def start(self, kind: str = "printer") -> RunningProcess:
        """Start another process, and return once it has reached its database."""
        consumer = f"tests.acceptance.printer:{kind}"
        printer = self.begin(
            command_line("pillarbox", "consume", consumer, "--log-level=debug")
        )
        printer.wait_for_log("ConsumerStarted")
        return printer

    def cancel(self, message: Message) -> int:
        """Run `pillarbox cancel`, and return its exit status."""
        return self.begin(command_line("pillarbox", "cancel", str(message.id))).wait()

    async def order(self) -> Message:
        """Order a report."""
        message = Message(TOPIC, b"", key="report")
        insert(self._inspection.url, message)
        return message

    def give_paper(self, sheets: int) -> None:
        """Provide paper for this many pages in total."""
        self._inspection.run(f"UPDATE paper SET sheets = {sheets}")

    def wait_for_worker(self) -> RunningProcess:
        """Wait until the first pages are printed and saved; return the process."""
        self.give_paper(BEFORE)
        query = "SELECT checkpoint FROM inbox.job"
        printed = [(BEFORE,)]
        wait_for("pages", lambda: self._inspection.rows(query) == printed)
        ((pid,),) = self._inspection.rows("SELECT DISTINCT pid FROM page")
        (worker,) = (printer for printer in self if printer.pid == pid)
        return worker

    def pages(self) -> list[tuple[int, int]]:
        """Return each page and the process that printed it."""
        return self._inspection.rows(
            "SELECT number, pid FROM page ORDER BY number, pid"
        )

    def reports(self) -> list[int]:
        """Return the processes that finished a report."""
        return [pid for (pid,) in self._inspection.rows("SELECT pid FROM report")]

    def expect_end(self, state: str, attempts: int, *, receipts: int) -> None:
        """Wait until all deliveries are acked, and check how the job has ended."""
        self._inspection.wait_until_settled()
        query = "SELECT state, attempts FROM inbox.job"
        assert self._inspection.rows(query) == [(state, attempts)]
        assert self._inspection.count("inbox.receipt") == receipts


@pytest.fixture
def printers(
    database_url: str, tmp_path: Path, inspection: Inspection
) -> Iterator[Printers]:
    with Printers(database_url, tmp_path, inspection) as started:
        yield started


def printed_by(first: RunningProcess, second: RunningProcess) -> list[tuple[int, int]]:
    """Return all pages once, with the second process continuing after the first."""
    return [
        (number, (first if number < BEFORE else second).pid) for number in range(PAGES)
    ]


async def test_after_a_deploy_another_process_resumes_the_job(
    printers: Printers,
) -> None:
    both = {printers.start(), printers.start()}
    await printers.order()
    stopped = printers.wait_for_worker()
    (other,) = both - {stopped}

    stopped.terminate()
    assert stopped.wait() == 0
    printers.give_paper(PAGES)
    printers.expect_end("success", 1, receipts=1)
    assert printers.pages() == printed_by(stopped, other)
    assert printers.reports() == [other.pid]


async def test_a_job_of_a_killed_process_is_taken_over_after_its_lease(
    printers: Printers,
) -> None:
    both = {printers.start(), printers.start()}
    await printers.order()
    killed = printers.wait_for_worker()
    (other,) = both - {killed}

    killed.kill()
    printers.give_paper(PAGES)
    printers.expect_end("success", 2, receipts=1)
    assert printers.pages() == printed_by(killed, other)
    assert printers.reports() == [other.pid]


@pytest.mark.parametrize("kind", [as_variant("printer"), "stubborn"])
async def test_a_process_frozen_for_longer_than_its_lease_prints_nothing_more(
    printers: Printers, kind: str
) -> None:
    both = {printers.start(kind), printers.start(kind)}
    await printers.order()
    frozen = printers.wait_for_worker()
    (other,) = both - {frozen}

    frozen.freeze()
    printers.give_paper(PAGES)
    wait_for("the other has done it", printers.reports, seconds=400)
    frozen.thaw()
    # It learns this from its own transaction or its next heartbeat.
    if kind == "stubborn":
        frozen.wait_for_log("told: JobLostError")
    frozen.wait_for_log("DuplicateSkipped")
    printers.expect_end("success", 2, receipts=1)
    assert printers.pages() == printed_by(frozen, other)
    assert printers.reports() == [other.pid]


async def test_a_cancel_reaches_the_process_that_runs_the_job(
    printers: Printers,
) -> None:
    both = {printers.start(), printers.start()}
    message = await printers.order()
    worker = printers.wait_for_worker()
    (other,) = both - {worker}

    assert printers.cancel(message) == 0
    worker.wait_for_log("MessageCancelled")
    printers.expect_end("cancelled", 1, receipts=0)
    printers.give_paper(PAGES)
    assert printers.cancel(message) == 1
    for process in both:
        process.terminate()
        assert process.wait() == 0
    assert [pid for _, pid in printers.pages()] == [worker.pid] * BEFORE
    assert printers.reports() == []
    assert "MessageCancelled" not in other.log()
