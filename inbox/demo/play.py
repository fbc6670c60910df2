"""The demo: place, publish and handle orders despite failures, and count them."""

import re
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from inbox.demo import tally
from inbox.demo.broker import Broker
from inbox.demo.model import Base, Outage
from inbox.demo.orders import CONSUMERS, Shop
from inbox.demo.processes import Processes
from outbox.administration.migrate import migrate
from outbox.dev.extensions import find_extensions
from outbox.errors import OutboxError
from outbox.postgres.connection import sqlalchemy_url
from outbox.url import without_password
from pillarbox import uuid7

PAGE_PORT: Final = 8380
SKIPPED: Final = "DuplicateSkipped"

_CUSTOMERS: Final = 50
_REFUSED: Final = 5
"""The ledger refuses the invoices of so many; in 100 orders, some are theirs."""
_BEFORE_KILL: Final = 5
_REPLAYED: Final = 6
_RELAY: Final = ("relay", "--lease", "3s")
_BILLING: Final = "inbox.demo.consumers:billing"
_TICK: Final = 0.5
_BETWEEN_LINES: Final = 2.0
_PATIENCE: Final = 120.0
_PAUSE: Final = 0.05
_ADDRESS: Final = re.compile(r"http://[\d.]+:\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The size of the demo.

    Attributes:
        orders: how many are placed, at least 100.
        web: the port of the page, which stays open until Ctrl-C; 0 for any free one,
            None for no page.
    """

    orders: int = 3000
    web: int | None = None


def say(line: str = "") -> None:
    """Print a line and flush it."""
    print(line, flush=True)


def show(url: str, chosen: Broker, options: Options) -> int:
    """Set up the database, run the demo, and count.

    Returns:
        0 only if every count is right, else 1.
    """
    engine = create_engine(sqlalchemy_url(url))
    partman, cron = find_extensions(url)
    say(f"database   {without_password(url)}")
    say(f"broker     {without_password(chosen.url)}")
    migrate(url, with_cron=cron, partman_schema="partman" if partman else None)
    say(
        "schema     migrated: outbox, inbox, daily partitions by "
        + ("pg_partman" if partman else "pillarbox: there is no pg_partman")
        + (", upkeep by pg_cron" if cron else "; pg_cron does not run in this database")
    )
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA IF EXISTS pillarbox_demo CASCADE"))
        connection.execute(text("CREATE SCHEMA pillarbox_demo"))
        Base.metadata.create_all(connection)
    tenant = f"demo-{uuid7().hex[-8:]}"
    with tempfile.TemporaryDirectory(prefix="pillarbox-demo-") as folder:
        logs = Path(folder)
        processes = Processes(url, chosen, logs, tenant=tenant)
        # Separate from the others, which are stopped before the count.
        pages = Processes(url, chosen, logs, tenant=tenant)
        try:
            if options.web is not None:
                _serve_page(pages, options.web)
            return _Play(engine, processes, tenant, chosen, options).run()
        finally:
            processes.stop_all()
            pages.stop_all()
            engine.dispose()


def _serve_page(processes: Processes, port: int) -> None:
    token = secrets.token_hex(16)
    tokens = processes.write("tokens", f"you {token} act payloads\n")
    options = ("--listen", f"127.0.0.1:{port}", "--tokens", str(tokens))
    processes.start("web", "web", *options, "--consumer", _BILLING)
    processes.wait_for("web", "WebStarted")
    found = _ADDRESS.search(processes.log("web"))
    assert found is not None
    say(f"page       {found[0]}/login#{token}")


class _Play:
    """One run: orders are placed while processes fail and die, then counted."""

    def __init__(
        self,
        engine: Engine,
        processes: Processes,
        tenant: str,
        chosen: Broker,
        options: Options,
    ) -> None:
        self._engine = engine
        self._processes = processes
        self._tenant = tenant
        self._chosen = chosen
        self._options = options
        self._shop = Shop(sessionmaker(engine), tenant=tenant, customers=_CUSTOMERS)
        self._good = True

    def run(self) -> int:
        """Return the exit status."""
        processes, orders = self._processes, self._options.orders
        self._start_all("relay-1")
        say()
        with Session(self._engine) as session, session.begin():
            refused = self._shop.customers[:_REFUSED]
            session.add_all(Outage(customer=customer) for customer in refused)
        say(f"  ⚠ the ledger is down for {_REFUSED} of {_CUSTOMERS} customers")
        with self._shop.ordering(orders) as placing:
            self._watch(lambda p: p.committed > orders * 2 // 5)
            processes.kill("relay-1")
            say("  ✂ SIGKILL relay-1, with messages in flight")
            self._start("relay-2", *_RELAY)
            self._watch(
                lambda p: (
                    p.failed >= _BEFORE_KILL or (p.settled and not placing.is_alive())
                )
            )
            processes.kill("billing")
            say("  ✂ SIGKILL billing: what it was handling is rolled back")
            self._start("billing", *_consume("billing"))
            self._watch(lambda p: p.published > orders * 3 // 5)
            with Session(self._engine) as session, session.begin():
                session.query(Outage).delete()
            say("  ☀ the ledger is back: billing recovers, its dead letters remain")
        self._watch(lambda p: p.settled)
        say()
        which = ("--side", "inbox", "--tenant", self._tenant)
        self._show("dead-letters", "list", *which, "--limit", "3")
        self._show("dead-letters", "retry", *which, "--consumer", _BILLING)
        self._replay()
        say()
        self._report()
        for name, status in processes.stop_all().items():
            self._verdict(f"{name} stopped with exit status", status, status == 0)
        if not self._good:
            say(processes.last_lines())
        say()
        say("everything holds" if self._good else "SOMETHING IS WRONG")
        if self._options.web is not None:
            self._keep_open()
        return 0 if self._good else 1

    def _start_all(self, relay: str) -> None:
        for name in CONSUMERS:
            self._start(name, *_consume(name))
        for name in CONSUMERS:
            # Otherwise a consumer would miss what is published before its first start.
            self._processes.wait_for(name, "ConsumerStarted")
        self._start(relay, *_RELAY)

    def _start(self, name: str, *arguments: str) -> None:
        pid = self._processes.start(name, *arguments)
        say(f"  ↻ started {name} (pid {pid})")

    def _show(self, *arguments: str) -> str:
        """Run a command, and show it with its output."""
        say(f"$ pillarbox {' '.join(arguments)}")
        shown = self._processes.run(*arguments)
        say("\n".join(f"  {line}" for line in shown.splitlines()))
        say()
        return shown

    def _watch(self, reached: Callable[[tally.Progress], bool]) -> None:
        """Show the progress until `reached` is true.

        Raises:
            OutboxError: the progress stopped.
        """
        seen = None
        moved = shown = time.monotonic()
        while True:
            now = tally.progress(self._engine, self._tenant)
            if now != seen:
                seen, moved = now, time.monotonic()
            done = reached(now)
            if done or time.monotonic() - shown > _BETWEEN_LINES:
                shown = time.monotonic()
                say(f"  {now}")
            if done:
                return
            ended = self._processes.ended()
            if ended or time.monotonic() - moved > _PATIENCE:
                raise OutboxError(
                    f"no progress; ended processes: {', '.join(ended) or 'none'}\n"
                    f"{self._processes.last_lines()}"
                )
            time.sleep(_TICK)

    def _replay(self) -> None:
        """Publish messages a second time; each consumer has to skip them."""
        count = {name: self._processes.logged(name, SKIPPED) for name in CONSUMERS}
        which = ("--since", "1h", "--tenant", self._tenant)
        limit = str(self._options.orders // _REPLAYED)
        replayed = int(self._show("replay", *which, "--limit", limit).split()[0])
        if not self._chosen.repeats:
            say("  (this broker deduplicates what is published twice)")
            replayed = 0

        def all_skipped() -> bool:
            return all(
                self._processes.logged(name, SKIPPED) >= count[name] + replayed
                for name in CONSUMERS
            )

        self._watch(lambda p: p.finished and all_skipped())
        for name in CONSUMERS:
            skipped = self._processes.logged(name, SKIPPED) - count[name]
            self._verdict(f"duplicates that {name} skipped", skipped, True)

    def _report(self) -> None:
        """Print every count with its verdict."""
        shop, progress = self._shop, tally.progress(self._engine, self._tenant)
        committed = shop.committed
        self._verdict("orders committed", committed, committed == progress.committed)
        self._verdict("orders rolled back on purpose", shop.rolled_back, True)
        for name in ("published", *CONSUMERS):
            count = getattr(progress, name)
            what = name if name == "published" else f"handled by {name}"
            self._verdict(what, count, count == committed)
        for name, count in tally.faults(self._engine, self._tenant).items():
            self._verdict(name, count, count == 0)
        letters = tally.dead_letters(self._engine, self._tenant)
        failed, succeeded = sum(letters.values()), letters.get("SUCCEEDED", 0)
        self._verdict("dead letters of billing", failed, failed > 0)
        self._verdict("dead letters handled by a retry", succeeded, succeeded == failed)

    def _verdict(self, what: str, count: int, right: bool) -> None:
        say(f"  {'✔' if right else '✘'} {what:<45} {count:>7,}")
        self._good &= right

    def _keep_open(self) -> None:
        """Keep placing orders until Ctrl-C, so that the page has something to show."""
        try:
            self._start_all("relay-3")
            say()
            say("The shop goes on, and the page stays open. Press Ctrl-C to end both.")
            with self._shop.ordering(None, _PAUSE):
                pass
        except KeyboardInterrupt:
            say()
            say("stopping")


def _consume(name: str) -> tuple[str, ...]:
    return "--log-level", "debug", "consume", f"inbox.demo.consumers:{name}"
