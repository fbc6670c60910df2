"""`pillarbox dead-letters`: list, show, retry, discard and export, on both sides."""

import json as json_module
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias
from uuid import UUID

import typer

from outbox.administration.sides import RetryOptions, Side, load_sides
from outbox.cli.command import (
    Broker,
    Codec,
    Database,
    Json,
    SideOption,
    command,
    database_url,
    duration_option,
    new_app,
    rate_option,
)
from outbox.cli.output import progress, warn, write_json, write_line, write_table
from outbox.cli.supervisor import Schedule, run_coroutine
from outbox.dead_letters.criteria import Criteria, IdPrefix
from outbox.dead_letters.events import DeadLetterFailed
from outbox.dead_letters.inspect import DeadLetterTable, open_dead_letters
from outbox.dead_letters.letter import Letter, Status, Summary, decode_json
from outbox.dead_letters.retry import (
    Candidate,
    Outcome,
    Retrier,
    RetryCounts,
    retry_all,
)
from outbox.dead_letters.statement import Statement
from outbox.duration import write_duration
from outbox.errors import ConfigError, UpkeepError
from outbox.events import Event, Observer
from outbox.logs.printable import printable

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
_FILTERS: Final = "Which ones"

app = new_app("List, show, retry, discard or export dead letters of both sides.")


def _text(name: str, meaning: str) -> Any:
    return typer.Option(
        f"--{name}", metavar=name.upper(), help=meaning, rich_help_panel=_FILTERS
    )


Ids: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...",
        help="Ids of dead letters, or prefixes of ids.",
        show_default=False,
    ),
]
StatusOption: TypeAlias = Annotated[
    Literal["PENDING", "SUCCEEDED", "DISCARDED", "ANY"],
    typer.Option(
        "--status", help="Status.", case_sensitive=False, rich_help_panel=_FILTERS
    ),
]
Limit: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--limit",
        metavar="N",
        min=1,
        help="Maximum number.",
        rich_help_panel=_FILTERS,
    ),
]
All: TypeAlias = Annotated[
    bool,
    typer.Option("--all", help="All that are PENDING.", rich_help_panel=_FILTERS),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="List them without changing anything.")
]


@dataclass(frozen=True, kw_only=True)
class Filters:
    """The options that select dead letters."""

    topic: Annotated[
        str | None, _text("topic", "Topic, or prefix followed by a star: 'orders.*'.")
    ] = None
    key: Annotated[str | None, _text("key", "Key.")] = None
    tenant: Annotated[str | None, _text("tenant", "Tenant.")] = None
    origin: Annotated[
        str | None,
        _text("origin", "Who gave it up, such as publisher:redis or consumer:billing."),
    ] = None
    message: Annotated[str | None, _text("message", "Id of the message.")] = None
    error: Annotated[str | None, _text("error", "Text in the reason.")] = None
    newer_than: Annotated[
        timedelta | None,
        duration_option(
            "--newer-than", help="Given up within this time.", panel=_FILTERS
        ),
    ] = None
    older_than: Annotated[
        timedelta | None,
        duration_option(
            "--older-than", help="Given up before this time.", panel=_FILTERS
        ),
    ] = None

    def criteria(self, status: Status | None, limit: int | None = None) -> Criteria:
        """Return the criteria for at most `limit` dead letters of this status."""
        chosen = asdict(self)
        message = chosen.pop("message")
        return Criteria(status=status, message_id=message, max_rows=limit, **chosen)


class _Found(NamedTuple):
    """A dead letter and its side."""

    side: Side
    letter: Summary

    def as_json(self) -> dict[str, Any]:
        return {"side": self.side.schema, **self.letter.as_json()}


@command(app, "list")
def _list(
    *,
    side: SideOption = None,
    filters: Filters,
    status: StatusOption = "PENDING",
    limit: Limit = 50,
    database: Database = None,
    json: Json = False,
) -> None:
    """List dead letters of both sides, the newest first."""
    criteria = filters.criteria(_status(status), limit)
    with _open_tables(database, load_sides(side)) as tables:
        found = [
            _Found(s, it) for s, table in tables for it in table.summaries(criteria)
        ]
    found.sort(key=lambda it: it.letter.created_at, reverse=True)
    _write(found[:limit], as_json=json)


@command(app)
def show(
    id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Id of a dead letter, or its first digits if no other begins with "
            "them.",
        ),
    ],
    *,
    side: SideOption = None,
    database: Database = None,
    json: Json = False,
) -> None:
    """Show one dead letter with everything that was stored."""
    with _open_tables(database, load_sides(side)) as tables:
        found, table, its_id = _find(IdPrefix.of(id), tables)
        letter = table.read(its_id)
    if json:
        write_json({"side": found.schema, **letter.as_json()})
    else:
        sys.stdout.write(_page_of(found, letter))


@command(app)
def discard(
    ids: Ids = None,
    *,
    reason: Annotated[
        str,
        typer.Option(
            "--reason", metavar="TEXT", help="Why; stored in the dead letter."
        ),
    ],
    side: SideOption = None,
    filters: Filters,
    limit: Limit = None,
    all: All = False,
    dry_run: DryRun = False,
    database: Database = None,
    json: Json = False,
) -> None:
    """Discard dead letters: they are never retried again."""
    criteria = filters.criteria(Status.PENDING)
    _check_choice(ids, filters, limit, all=all)
    if not reason.strip():
        raise ConfigError("--reason is empty: say why, for those who ask later")
    with _open_tables(database, load_sides(side)) as tables:
        chosen = _choose(tables, ids, criteria, limit)
        if dry_run:
            _write(chosen, as_json=json)
            return
        discarded = sum(
            table.discard(
                [
                    Candidate(it.letter.id, it.letter.created_at)
                    for it in chosen
                    if it.side is its_side
                ],
                reason,
            )
            for its_side, table in tables
        )
    settled = len(chosen) - discarded
    if json:
        write_json({"discarded": discarded, "settled": settled})
    else:
        said = f", {settled} were settled already" if settled else ""
        write_line(f"{discarded} discarded{said}")


@command(app)
def export(
    *,
    side: SideOption = None,
    filters: Filters,
    status: StatusOption = "ANY",
    limit: Limit = None,
    database: Database = None,
) -> None:
    """Print dead letters as JSON lines, with payloads, the oldest first."""
    criteria = filters.criteria(_status(status), limit)
    with _open_tables(database, load_sides(side)) as tables:
        candidates = [
            (candidate.created_at, its_side, table, candidate.id)
            for its_side, table in tables
            for candidate in table.find(criteria)
        ]
        candidates.sort(key=lambda it: it[0])
        for _, its_side, table, id in candidates[:limit]:
            letter = {"side": its_side.schema, **table.read(id).as_json()}
            sys.stdout.write(f"{json_module.dumps(letter)}\n")


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
    all: All = False,
    due: Annotated[
        bool,
        typer.Option(
            "--due",
            help="Those that the schedule would retry now, unless a replica is doing "
            "it.",
            rich_help_panel=_FILTERS,
        ),
    ] = False,
    dry_run: DryRun = False,
    rate: Annotated[
        float | None, rate_option("Maximum rate: 10/s, 90/m or 500/h.")
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            "--consumer",
            metavar="MODULE:NAME",
            help="Where the Consumer is whose handlers are called.",
        ),
    ] = None,
    broker: Broker = None,
    codec: Codec = None,
    schedule: Schedule,
    database: Database = None,
    json: Json = False,
) -> int:
    """Retry dead letters: publish those of the outbox, handle those of the inbox."""
    options = RetryOptions(
        database=database,
        broker=broker,
        codec=codec,
        consumer=consumer,
        schedule=schedule.read(),
    )
    criteria = filters.criteria(Status.PENDING)
    named = _check_choice(ids, filters, limit, all=all, or_due=due)
    if due and (named or dry_run):
        raise ConfigError("--due can't be combined with ids, filters or --dry-run")
    failures: list[DeadLetterFailed] = []

    def note(event: Event) -> None:
        if isinstance(event, DeadLetterFailed):
            failures.append(event)

    sides = _sides_to_retry(side, options)
    tallies: list[RetryCounts | None] = []

    async def run_schedules() -> None:
        tallies.extend([await s.run_due(options, note) for s in sides])

    async def retry_chosen() -> None:
        async with AsyncExitStack() as stack:
            chosen, retriers = await _choose_to_retry(
                stack, sides, options, note, ids, criteria, limit
            )
            if dry_run:
                _write(chosen, as_json=json)
                return
            for s in dict.fromkeys(it.side for it in chosen):
                if s.schema not in retriers:
                    opened = s.open_retrier(options, note)
                    retriers[s.schema] = await stack.enter_async_context(opened)
            tallies.append(await _retry_chosen(chosen, retriers, rate))

    try:
        run_coroutine(run_schedules() if due else retry_chosen())
    finally:
        # Also print what failed before the broker or the database became unavailable.
        if not json:
            for failure in failures:
                said = f"{failure.id} of {failure.topic} failed: {failure.reason}"
                write_line(" ".join(said.split()))
    if not tallies:
        return 0
    return _report(tallies, failures, as_json=json)


async def _retry_chosen(
    chosen: Sequence[_Found], retriers: Mapping[str, Retrier], rate: float | None
) -> RetryCounts:
    counts: Counter[str] = Counter()
    with progress(len(chosen)) as bar:

        def show(outcome: Outcome) -> None:
            counts[outcome.value] += 1
            bar(counts.total(), counts)

        try:
            for schema, retrier in retriers.items():
                candidates = [
                    Candidate(it.letter.id, it.letter.created_at)
                    for it in chosen
                    if it.side.schema == schema
                ]
                await retry_all(
                    retrier, candidates, max_per_second=rate, on_outcome=show
                )
        finally:
            left = len(chosen) - counts.total()
            if left:
                sys.stderr.write(f"{left} of {len(chosen)} were not tried\n")
    return RetryCounts(**counts)


def _sides_to_retry(only: str | None, options: RetryOptions) -> list[Side]:
    """Return the sides that can be retried, and warn why the other one is left out.

    Raises:
        ConfigError: neither side can be retried, or the chosen one can't.
    """
    sides = load_sides(only)
    lacking = {side.schema: side.lacks(options) for side in sides}
    able = [side for side in sides if lacking[side.schema] is None]
    reasons = [reason for reason in lacking.values() if reason is not None]
    if not able:
        raise ConfigError("; ".join(reasons))
    for reason in reasons:
        warn(f"left out: {reason}")
    return able


async def _choose_to_retry(
    stack: AsyncExitStack,
    sides: Sequence[Side],
    options: RetryOptions,
    notify: Observer,
    ids: Sequence[str] | None,
    criteria: Criteria,
    limit: int | None,
) -> tuple[list[_Found], dict[str, Retrier]]:
    """Choose what to retry; return it with the retriers that were opened for that.

    If a consumer is given, the inbox is read from that consumer's database, through a
    retrier. Everything else is read directly, without a broker.
    """
    retriers: dict[str, Retrier] = {}
    tables: list[tuple[Side, DeadLetterTable | _Fetched]] = []
    others = [s for s in sides if s.schema != "inbox" or options.consumer is None]
    with ExitStack() as looking:
        if others:
            tables += looking.enter_context(_open_tables(options.database, others))
        for side in sides:
            if side not in others:
                opened = side.open_retrier(options, notify)
                retrier = await stack.enter_async_context(opened)
                retriers[side.schema] = retrier
                tables.append((side, await _Fetched.by(retrier, ids, criteria)))
        return _choose(tables, ids, criteria, limit), retriers


class _Fetched:
    """The chosen dead letters, as a retrier found them in its database."""

    def __init__(self) -> None:
        self._summaries: list[Summary] = []
        self._ids: dict[IdPrefix, list[UUID]] = {}
        self._letters: dict[UUID, Letter] = {}

    @classmethod
    async def by(
        cls, retrier: Retrier, ids: Sequence[str] | None, criteria: Criteria
    ) -> "_Fetched":
        found = cls()
        if not ids:
            rows = await retrier.fetch(Statement.LIST, criteria.parameters())
            found._summaries = [Summary.of(row) for row in rows]
        for prefix in map(IdPrefix.of, ids or ()):
            rows = await retrier.fetch(Statement.FIND_BY_PREFIX, prefix.parameters())
            found._ids[prefix] = [id for (id,) in rows]
            if len(rows) == 1:
                ((id,),) = rows
                (row,) = await retrier.fetch(Statement.READ, {"id": str(id)})
                found._letters[id] = Letter.of(row)
        return found

    def summaries(self, criteria: Criteria) -> list[Summary]:
        del criteria  # applied when they were found
        return self._summaries

    def ids_of(self, prefix: IdPrefix) -> list[UUID]:
        return self._ids[prefix]

    def read(self, id: UUID) -> Letter:
        return self._letters[id]


@contextmanager
def _open_tables(
    database: str | None, sides: Sequence[Side]
) -> Iterator[list[tuple[Side, DeadLetterTable]]]:
    """Open the dead letters of these sides.

    Raises:
        UpkeepError: a statement failed; if both sides were asked for, the message says
            how to ask for one.
    """
    url = database_url(database)
    try:
        with ExitStack() as stack:
            yield [
                (
                    side,
                    stack.enter_context(
                        open_dead_letters(url, side.schema, side.on_discard)
                    ),
                )
                for side in sides
            ]
    except UpkeepError as error:
        if len(sides) == 1:
            raise
        raise UpkeepError(
            f"{error}; --side outbox or --side inbox leaves the other side out"
        ) from error


def _find(
    prefix: IdPrefix, tables: Sequence[tuple[Side, Any]]
) -> tuple[Side, Any, UUID]:
    """Find the only id with this prefix, on either side.

    Raises:
        ConfigError: there is none, or more than one.
    """
    found = [(side, table, id) for side, table in tables for id in table.ids_of(prefix)]
    names = " or ".join(f"{side.schema}.dead_letter" for side, _ in tables)
    id = prefix.choose([id for _, _, id in found], names)
    return next(it for it in found if it[2] == id)


def _choose(
    tables: Sequence[tuple[Side, Any]],
    ids: Sequence[str] | None,
    criteria: Criteria,
    limit: int | None,
) -> list[_Found]:
    """Return the matching dead letters, oldest first, or those named, in order."""
    if ids:
        named = dict.fromkeys(_find(IdPrefix.of(text), tables) for text in ids)
        return [_Found(side, table.read(id)) for side, table, id in named]
    found = [_Found(s, it) for s, table in tables for it in table.summaries(criteria)]
    found.sort(key=lambda it: it.letter.created_at)
    return found[:limit]


def _status(text: str) -> Status | None:
    return None if text == "ANY" else Status(text)


def _check_choice(
    ids: Sequence[str] | None,
    filters: Filters,
    limit: int | None,
    *,
    all: bool,
    or_due: bool = False,
) -> bool:
    """Return whether any are selected; selecting all of them needs `--all`."""
    asked = filters != Filters() or limit is not None
    if ids and (asked or all):
        raise ConfigError("give either ids or filters, not both")
    named = bool(ids or asked or all)
    if not named and not or_due:
        raise ConfigError(
            "which dead letters? give ids, a filter such as --topic, or --all"
        )
    return named


def _write(found: Sequence[_Found], *, as_json: bool) -> None:
    if as_json:
        write_json([it.as_json() for it in found])
        return
    if not found:
        write_line("no dead letters")
        return
    now = datetime.now(UTC)
    write_table(
        _COLUMNS,
        [
            (
                it.letter.id,
                write_duration(now - it.letter.created_at),
                it.side.schema,
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


def _report(
    tallies: Sequence[RetryCounts | None],
    failures: Sequence[DeadLetterFailed],
    *,
    as_json: bool,
) -> int:
    done = [tally for tally in tallies if tally is not None]
    tally = RetryCounts(
        succeeded=sum(it.succeeded for it in done),
        failed=sum(it.failed for it in done),
        skipped=sum(it.skipped for it in done),
    )
    if as_json:
        reasons = [
            {
                "id": str(failure.id),
                "message_id": failure.message_id,
                "topic": failure.topic,
                "retry_count": failure.retry_count,
                "reason": failure.reason,
            }
            for failure in failures
        ]
        write_json({**asdict(tally), "failures": reasons} if done else None)
        return 1 if tally.failed else 0
    if len(done) < len(tallies):
        write_line("another replica is retrying what is due")
    if done:
        said = ", ".join(f"{count} {name}" for name, count in asdict(tally).items())
        write_line(f"{tally.total} retried: {said}")
    return 1 if tally.failed else 0


def _page_of(side: Side, letter: Letter) -> str:
    """Return all that is stored about one dead letter, as text."""
    said = {"side": side.schema, **letter.as_json()}
    trace = said.pop("error_stacktrace")
    for name in ("headers", "payload_json", "payload_base64"):
        said.pop(name, None)
    lines = [
        f"{name:<17} {printable(value)}"
        for name, value in said.items()
        if value is not None
    ]
    lines += ["", "headers"]
    headers = (
        letter.headers if isinstance(letter.headers, dict) else {"": letter.headers}
    )
    lines += [
        f"  {printable(name)}: {printable(value)}" for name, value in headers.items()
    ]
    lines += ["", f"payload ({len(letter.payload)} bytes)", _payload(letter)]
    if trace is not None:
        lines += ["", "stack trace", trace]
    return printable("\n".join(lines), lines=True) + "\n"


def _payload(letter: Letter) -> str:
    payload = bytes(letter.payload)
    decoded = decode_json(letter.content_type, payload)
    if decoded is not None:
        return json_module.dumps(decoded[0], indent=2, ensure_ascii=False)
    return payload.decode(errors="backslashreplace")
