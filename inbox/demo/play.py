"""The demo: place, publish and handle orders despite failures, and count them."""

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import uuid7
from pillarbox.inbox.demo import tally
from pillarbox.inbox.demo.model import Base, Outage
from pillarbox.inbox.demo.orders import CONSUMERS, TENANT_VARIABLE, Shop
from pillarbox.outbox.administration.migrate import migrate
from pillarbox.outbox.cli.command import BROKER_VARIABLE, DATABASE_VARIABLE
from pillarbox.outbox.dev.extensions import find_extensions
from pillarbox.outbox.dev.parts import Part, Parts
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.url import without_password

PAGE_PORT: Final = 8380

_CUSTOMERS: Final = 50
_REFUSED: Final = 5
"""The ledger refuses the invoices of this many customers; of 100 orders, some are
theirs."""
_BEFORE_KILL: Final = 5
_RELAY: Final = ("relay", "--lease", "3s")
_INFO: Final = ("--log-level", "info")  # whatever the environment says
_BILLING: Final = "pillarbox.inbox.demo.consumers:billing"
_TICK: Final = 0.5
_START_SECONDS: Final = 60.0
_LAST_LINES: Final = 15
_BETWEEN_LINES: Final = 2.0
_PATIENCE: Final = 120.0
_PAUSE: Final = 0.05

Logs: TypeAlias = defaultdict[str, list[str]]
"""The output of processes, by name."""


def say(line: str = "") -> None:
    """Print a line and flush it."""
    print(line, flush=True)


def show(url: str, broker: str, *, orders: int, web: int | None) -> int:
    """Set up the database, run the demo, and count.

    Args:
        orders: how many are placed, at least 100.
        web: the port of the page, which stays open until Ctrl-C; 0 for any free one,
            None for no page.

    Returns:
        0 only if every count is right, else 1.
    """
    engine = create_engine(sqlalchemy_url(url))
    partman, cron = find_extensions(url)
    say(f"database   {without_password(url)}")
    if broker != url:
        say(f"broker     {without_password(broker)}")
    migrate(url, with_cron=cron, partman_schema="partman" if partman else None)
    say(
        "schema     migrated: outbox, inbox, daily partitions by "
        + ("pg_partman" if partman else "pillarbox, without pg_partman")
        + (", upkeep by pg_cron" if cron else "; pg_cron does not run in this database")
    )
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA IF EXISTS pillarbox_demo CASCADE"))
        connection.execute(text("CREATE SCHEMA pillarbox_demo"))
        Base.metadata.create_all(connection)
    tenant = f"demo-{uuid7().hex[-8:]}"
    environment = {
        DATABASE_VARIABLE: url,
        BROKER_VARIABLE: broker,
        TENANT_VARIABLE: tenant,
    }
    try:
        return asyncio.run(_play(engine, environment, orders, web))
    finally:
        engine.dispose()


async def _play(
    engine: Engine, environment: Mapping[str, str], orders: int, web: int | None
) -> int:
    logs: Logs = defaultdict(list)
    async with Parts(environment, lambda name, it: logs[name].append(it)) as parts:
        url, broker = environment[DATABASE_VARIABLE], environment[BROKER_VARIABLE]
        tenant = environment[TENANT_VARIABLE]
        play = _Play(engine, parts, logs, tenant, has_broker=broker != url)
        return await play.run(orders, web)


class _Play:
    """One run: orders are placed while processes fail and die, then counted."""

    def __init__(
        self,
        engine: Engine,
        parts: Parts,
        logs: Logs,
        tenant: str,
        *,
        has_broker: bool,
    ) -> None:
        self._has_broker = has_broker
        self._engine = engine
        self._parts = parts
        self._logs = logs
        self._tenant = tenant
        self._running: dict[str, Part] = {}
        self._shop = Shop(sessionmaker(engine), tenant=tenant, customers=_CUSTOMERS)
        self._good = True

    async def run(self, orders: int, port: int | None) -> int:
        """Return the exit status."""
        if port is not None:
            page = await self._parts.pillarbox(
                "web", "web", "--listen", f"127.0.0.1:{port}", *_INFO
            )
            link = await self._logged(page, "Log in at ")
            say(f"page       {link.partition('Log in at ')[2]}")
        await self._start_all("relay-1")
        say()
        with Session(self._engine) as session, session.begin():
            refused = self._shop.customers[:_REFUSED]
            session.add_all(Outage(customer=customer) for customer in refused)
        say(f"  ⚠ the ledger is down for {_REFUSED} of {_CUSTOMERS} customers")
        with self._shop.ordering(orders) as placing:
            await self._watch(lambda p: p.committed > orders * 2 // 5)
            first = "relay-1" if self._has_broker else "shipping"
            await self._kill(first)
            say(f"  ✂ SIGKILL {first}, with messages in flight")
            if self._has_broker:
                await self._start("relay-2", *_RELAY)
            else:
                await self._start("shipping", *_consume("shipping"))
            await self._watch(
                lambda p: (
                    p.failed >= _BEFORE_KILL or (p.settled and not placing.is_alive())
                )
            )
            await self._kill("billing")
            say("  ✂ SIGKILL billing: what it was handling is rolled back")
            await self._start("billing", *_consume("billing"))
            await self._watch(lambda p: p.shipping > orders * 3 // 5)
            with Session(self._engine) as session, session.begin():
                session.query(Outage).delete()
            say("  ☀ the ledger is up again; the dead letters of billing remain")
            await self._watch(lambda p: p.settled and not placing.is_alive())
        say()
        which = ("--side", "inbox", "--tenant", self._tenant)
        await self._show("dead-letters", "list", *which, "--limit", "3")
        await self._show("dead-letters", "retry", *which, "--consumer", _BILLING)
        self._report()
        await self._stop_all()
        if not self._good:
            say(self._last_lines())
        say()
        say("everything holds" if self._good else "SOMETHING IS WRONG")
        if port is not None:
            await self._keep_open()
        return 0 if self._good else 1

    async def _start_all(self, relay: str) -> None:
        for name in CONSUMERS:
            await self._start(name, *_consume(name))
        for name in CONSUMERS:
            # Otherwise a consumer would miss what is added before its first start.
            await self._logged(self._running[name], "ConsumerStarted")
        if self._has_broker:
            await self._start(relay, *_RELAY)

    async def _start(self, name: str, *arguments: str) -> None:
        started = await self._parts.pillarbox(name, *arguments, *_INFO)
        part = self._running[name] = started
        say(f"  ↻ started {name} (pid {part.pid})")

    async def _logged(self, part: Part, text: str) -> str:
        """Return the first line with this text, once it is there."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            for line in self._logs[part.name]:
                if text in line:
                    return line
            if part.ended.done() or time.monotonic() > deadline:
                raise OutboxError(f"{part.name} doesn't start: {self._last_lines()}")
            await asyncio.sleep(_TICK)

    async def _kill(self, name: str) -> None:
        """End a process with SIGKILL: it can't clean up."""
        part = self._running.pop(name)
        part.send(signal.SIGKILL)
        await part.ended

    async def _stop_all(self) -> None:
        await asyncio.gather(*(part.stop() for part in self._running.values()))
        for name, part in self._running.items():
            status = part.ended.result()
            self._verdict(f"{name} stopped with exit status", status, status == 0)
        self._running.clear()

    async def _show(self, *arguments: str) -> None:
        """Run a command, and show it with its output."""
        say(f"$ pillarbox {' '.join(arguments)}")
        name = " ".join(arguments[:2])
        part = await self._parts.pillarbox(name, *arguments, "--log-level", "error")
        status = await part.ended
        for line in self._logs[name]:
            say(f"  {line}")
        say()
        if status != 0:
            raise OutboxError(f"pillarbox {name} ended with {status}")

    async def _watch(self, reached: Callable[[tally.Progress], bool]) -> None:
        """Show the progress until `reached` is true.

        Raises:
            OutboxError: the progress stopped.
        """
        seen = None
        moved = shown = time.monotonic()
        while True:
            now = self._progress()
            if now != seen:
                seen, moved = now, time.monotonic()
            done = reached(now)
            if done or time.monotonic() - shown > _BETWEEN_LINES:
                shown = time.monotonic()
                say(f"  {now}")
            if done:
                return
            ended = [name for name, it in self._running.items() if it.ended.done()]
            if ended or time.monotonic() - moved > _PATIENCE:
                raise OutboxError(
                    f"no progress; ended processes: {', '.join(ended) or 'none'}\n"
                    f"{self._last_lines()}"
                )
            await asyncio.sleep(_TICK)

    def _progress(self) -> tally.Progress:
        return tally.progress(self._engine, self._tenant, relayed=self._has_broker)

    def _last_lines(self) -> str:
        ends = (
            "\n".join([f"--- {name}", *lines[-_LAST_LINES:]])
            for name, lines in sorted(self._logs.items())
        )
        return "\n".join(ends)

    def _report(self) -> None:
        """Print every count with its verdict."""
        shop, progress = self._shop, self._progress()
        committed = shop.committed
        self._verdict("orders committed", committed, committed == progress.committed)
        self._verdict("orders rolled back on purpose", shop.rolled_back, True)
        if progress.published is not None:
            self._verdict(
                "published", progress.published, progress.published == committed
            )
        for name in CONSUMERS:
            count = getattr(progress, name)
            self._verdict(f"handled by {name}", count, count == committed)
        for name, count in tally.faults(self._engine, self._tenant).items():
            self._verdict(name, count, count == 0)
        letters = tally.dead_letters(self._engine, self._tenant)
        failed, succeeded = sum(letters.values()), letters.get("SUCCEEDED", 0)
        self._verdict("dead letters of billing", failed, failed > 0)
        self._verdict("dead letters handled by a retry", succeeded, succeeded == failed)

    def _verdict(self, what: str, count: int, right: bool) -> None:
        say(f"  {'✔' if right else '✘'} {what:<45} {count:>7,}")
        self._good &= right

    async def _keep_open(self) -> None:
        """Keep placing orders until Ctrl-C, so that the page has something to show."""
        try:
            await self._start_all("relay-3")
            say()
            say("The shop and the page keep running. Press Ctrl-C to stop them.")
            with self._shop.ordering(None, _PAUSE):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            say()
            say("stopping")


def _consume(name: str) -> tuple[str, ...]:
    return "consume", f"pillarbox.inbox.demo.consumers:{name}"
