"""`pillarbox dead-letters`: list, show, retry, discard and export, on both sides."""

import json as json_module
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from heapq import merge
from itertools import count, repeat
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias
from uuid import UUID

import typer

from pillarbox.outbox.administration.sides import RetryOptions, Side, load_sides
from pillarbox.outbox.cli.command import (
    Broker,
    Codec,
    ConsumerPath,
    Database,
    Databases,
    DryRun,
    Json,
    Key,
    Limit,
    Rate,
    Reason,
    SideOption,
    Since,
    Tenant,
    Topic,
    Until,
    broker_url_if_given,
    command,
    database_url,
    new_app,
    opened_all,
)
from pillarbox.outbox.cli.output import (
    progress,
    to_json,
    warn,
    write_json,
    write_line,
    write_table,
)
from pillarbox.outbox.cli.supervisor import run_coroutine
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.dead_letters.events import DeadLetterFailed
from pillarbox.outbox.dead_letters.inspect import DeadLetterTable
from pillarbox.outbox.dead_letters.letter import Letter, Status, Summary
from pillarbox.outbox.dead_letters.retry import Candidate, retry_all
from pillarbox.outbox.errors import ConfigError, shorten
from pillarbox.outbox.events import Event
from pillarbox.outbox.logs.printable import printable

_MAX_REASON: Final = 80
_COLUMNS: Final = (
    "id",
    "age",
    "side",
    "status",
    "topic",
    "key",
    "origin",
    "attempts",
    "retries",
    "reason",
)

_ROLES: Final = {"outbox": "pillarbox_relay", "inbox": "pillarbox_consumer"}

app = new_app("List, show, retry, discard or export dead letters of both sides.")

Ids: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...",
        help="Ids of dead letters, or of their messages.",
        show_default=False,
    ),
]
State: TypeAlias = Annotated[
    Literal["PENDING", "SUCCEEDED", "DISCARDED", "ANY"],
    typer.Option(help="State.", case_sensitive=False),
]


@dataclass(frozen=True, kw_only=True)
class Filters:
    """The options that select dead letters."""

    topic: Topic = None
    key: Key = None
    tenant: Tenant = None
    origin: Annotated[
        str | None,
        typer.Option(
            metavar="ORIGIN",
            help="What dead-lettered it: relay:main, consumer:billing.",
        ),
    ] = None
    error: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text in the reason.")
    ] = None
    since: Since = None
    until: Until = None

    @property
    def are_given(self) -> bool:
        """Whether there is any; an empty text is in every reason."""
        return replace(self, error=self.error or None) != Filters()

    def criteria(self, status: Status | None, limit: int | None = None) -> Criteria:
        """Return the criteria for at most `limit` dead letters of this status."""
        return Criteria(status=status, max_rows=limit, **asdict(self))


class _Table(NamedTuple):
    """The dead letters of one side of a database."""

    database: str
    side: Side
    rows: DeadLetterTable

    def as_json(self, letter: Summary) -> dict[str, Any]:
        return {
            "database": self.database,
            "side": self.side.schema,
            **letter.as_json(),
        }


_Tables: TypeAlias = Sequence[_Table]


class _Found(NamedTuple):
    """A dead letter and its table."""

    table: _Table
    letter: Summary


@command(app, "list")
def _list(
    *,
    side: SideOption = None,
    filters: Filters,
    state: State = "PENDING",
    limit: Limit = 50,
    database: Databases = None,
    json: Json = False,
) -> None:
    """List dead letters of both sides, the newest first."""
    criteria = filters.criteria(_status(state), limit)
    with _open_tables(database, load_sides(side)) as tables:
        found = _select(tables, criteria)
    newest_first = found[::-1][:limit]
    if json:
        write_json([it.table.as_json(it.letter) for it in newest_first])
    else:
        _write(newest_first, are_of_several=len({it.database for it in tables}) > 1)


@command(app)
def show(
    id: Annotated[
        str,
        typer.Argument(metavar="ID", help="Id of a dead letter, or of its message."),
    ],
    *,
    side: SideOption = None,
    database: Databases = None,
    json: Json = False,
) -> None:
    """Show one dead letter with everything that was stored."""
    with _open_tables(database, load_sides(side)) as tables:
        table, found = _find(id, tables)
        letter = table.rows.read(found.id)
    if json:
        write_json(table.as_json(letter))
    else:
        sys.stdout.write(_page_of(table, letter))


@command(app)
def discard(
    ids: Ids = None,
    *,
    reason: Reason,
    side: SideOption = None,
    filters: Filters,
    database: Databases = None,
) -> None:
    """Discard dead letters: they are never retried again."""
    if not reason.strip():
        raise ConfigError(
            "--reason is empty: state why; it is stored with the dead letter"
        )
    _check_choice(ids, filtered=filters.are_given)
    with _open_tables(database, load_sides(side)) as tables:
        chosen = _choose(tables, ids, filters.criteria(Status.PENDING))
        discarded = sum(
            it.rows.discard(_candidates(chosen, it), reason) for it in tables
        )
    settled = len(chosen) - discarded
    text = f", {settled} were settled already" if settled else ""
    write_line(f"{discarded} discarded{text}")


@command(app)
def export(
    *,
    side: SideOption = None,
    filters: Filters,
    state: State = "ANY",
    database: Databases = None,
) -> None:
    """Print dead letters as JSON lines, with payloads, the oldest first."""
    with _open_tables(database, load_sides(side)) as tables:
        criteria = filters.criteria(_status(state))
        streams = [zip(repeat(it), it.rows.oldest_first(criteria)) for it in tables]
        for table, candidate in merge(*streams, key=lambda it: it[1].created_at):
            values = table.as_json(table.rows.read(candidate.id))
            sys.stdout.write(f"{json_module.dumps(values, default=to_json)}\n")


@command(
    app,
    epilog="Dead letters of the outbox need --broker, those of the inbox --consumer. "
    "Exit status 1: some failed again.",
)
def retry(
    ids: Ids = None,
    *,
    side: SideOption = None,
    filters: Filters,
    limit: Limit = None,
    dry_run: DryRun = False,
    rate: Rate = None,
    consumer: ConsumerPath = None,
    broker: Broker = None,
    codec: Codec = None,
    database: Database = None,
) -> int:
    """Retry dead letters: publish those of the outbox, handle those of the inbox."""
    options = RetryOptions(
        database=database_url(database),
        broker=broker_url_if_given(broker),
        codec=codec,
        consumer=consumer,
        schedule=None,
    )
    _check_choice(ids, filtered=filters.are_given or limit is not None)
    sides = _sides_to_retry(side, options)

    def on_event(event: Event) -> None:
        if isinstance(event, DeadLetterFailed):
            text = f"{event.id} of {event.topic} failed: {event.reason}"
            write_line(" ".join(text.split()))

    async def retry_chosen() -> Counter[str] | None:
        counts: Counter[str] = Counter()
        async with AsyncExitStack() as stack:
            # They connect only when there is something to retry.
            retriers = {
                it: await stack.enter_async_context(it.open_retrier(options, on_event))
                for it in sides
            }
            with _open_tables([options.database], sides) as tables:
                found = _choose(tables, ids, filters.criteria(Status.PENDING))
            chosen = [
                it
                for it in found
                if ids or retriers[it.table.side].origin in {None, it.letter.origin}
            ][:limit]
            if dry_run:
                _write(chosen, are_of_several=False)
                return None
            with progress(len(chosen)) as show_progress:
                done = count(1)
                for table in tables:
                    retried = await retry_all(
                        retriers[table.side],
                        _candidates(chosen, table),
                        max_per_second=rate,
                        on_outcome=lambda _: show_progress(next(done)),
                    )
                    counts.update(retried)
        return counts

    counts = run_coroutine(retry_chosen())
    if counts is None:
        return 0
    text = ", ".join(f"{number} {name}" for name, number in counts.items())
    write_line(f"{counts.total()} retried: {text}")
    return 1 if counts["failed"] else 0


def _candidates(chosen: Sequence[_Found], table: _Table) -> list[Candidate]:
    return [
        Candidate(it.letter.id, it.letter.created_at)
        for it in chosen
        if it.table is table
    ]


def _sides_to_retry(only: str | None, options: RetryOptions) -> list[Side]:
    """Return the sides that can be retried, and warn why the other one is skipped.

    Raises:
        ConfigError: neither side can be retried, or the chosen one can't.
    """
    sides = load_sides(only)
    able = [side for side in sides if side.lacks(options) is None]
    reasons = [reason for side in sides if (reason := side.lacks(options)) is not None]
    if not able:
        raise ConfigError("; ".join(reasons))
    for reason in reasons:
        warn(f"skipped {reason}")
    return able


@contextmanager
def _open_tables(
    databases: Sequence[str] | None, sides: Sequence[Side]
) -> Iterator[_Tables]:
    """Open the dead letters of these sides of each database."""
    roles = " and ".join(_ROLES[side.schema] for side in sides)
    rights = f"GRANT {roles} TO its role; pillarbox_monitor is enough to list them"
    if len(sides) > 1:
        rights += "; --side outbox or --side inbox skips the other side"
    with opened_all(databases, "dead letters", rights=rights) as opened:
        yield [
            _Table(name, it, DeadLetterTable(connection, it.schema, it.on_discard))
            for name, connection in opened.items()
            for it in sides
        ]


def _select(tables: _Tables, criteria: Criteria) -> list[_Found]:
    """Return the dead letters that match, the oldest first."""
    found = [
        _Found(table, it) for table in tables for it in table.rows.summaries(criteria)
    ]
    return sorted(found, key=lambda it: it.letter.created_at)


def _find(id: str, tables: _Tables) -> _Found:
    """Find the only dead letter with this id, or whose message has it.

    Raises:
        ConfigError: there is none, or more than one.
    """
    found = []
    with suppress(ValueError):  # it isn't an id
        found = _select(tables, Criteria(status=None, ids=(UUID(id),)))
    if not found:
        names = " or ".join(
            f"{it.side.schema}.dead_letter of {it.database}" for it in tables
        )
        raise ConfigError(
            f"dead letter {shorten(id)}: not found in {names}; list shows them"
        )
    if len(found) > 1:
        ids = ", ".join(str(it.letter.id) for it in found)
        raise ConfigError(f"dead letter {id}: its message has several, give one: {ids}")
    return found[0]


def _choose(
    tables: _Tables, ids: Sequence[str] | None, criteria: Criteria
) -> list[_Found]:
    """Return the dead letters that are named, in order, or else those that match."""
    if ids:
        return list(dict.fromkeys(_find(id, tables) for id in ids))
    return _select(tables, criteria)


def _status(text: str) -> Status | None:
    return None if text == "ANY" else Status(text)


def _check_choice(ids: Sequence[str] | None, *, filtered: bool) -> None:
    """Refuse to select all dead letters unless a filter says so."""
    if bool(ids) == filtered:
        raise ConfigError("pass ids or a filter; --topic '*' selects all")


def _write(found: Sequence[_Found], *, are_of_several: bool) -> None:
    if not found:
        write_line("no dead letters")
        return
    now = datetime.now(UTC)
    write_table(
        _COLUMNS,
        [
            (
                it.letter.id,
                now - it.letter.created_at,
                f"{it.table.database} " * are_of_several + it.table.side.schema,
                it.letter.status,
                it.letter.topic,
                it.letter.key,
                it.letter.origin,
                it.letter.attempts,
                it.letter.retry_count,
                it.letter.error_reason[:_MAX_REASON],
            )
            for it in found
        ],
    )


def _page_of(table: _Table, letter: Letter) -> str:
    """Return all that is stored about one dead letter, as text."""
    values = table.as_json(letter)
    headers, trace = values.pop("headers"), values.pop("error_stacktrace")
    if "payload_json" in values:
        payload = _indented(values.pop("payload_json"))
    else:
        del values["payload_base64"]
        payload = bytes(letter.payload).decode(errors="backslashreplace")
    lines = [
        f"{name:<17} {printable(value)}"
        for name, value in values.items()
        if value is not None
    ]
    lines += ["", "headers", _indented(headers)]
    lines += ["", f"payload ({len(letter.payload)} bytes)", payload]
    if trace is not None:
        lines += ["", "stack trace", trace]
    return printable("\n".join(lines), lines=True) + "\n"


def _indented(value: object) -> str:
    return json_module.dumps(value, indent=2, ensure_ascii=False)
