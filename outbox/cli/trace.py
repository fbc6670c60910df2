"""`pillarbox trace`: the life of a message, and the tree of what it caused."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import typer

from outbox.administration.connection import administration
from outbox.cli.command import (
    Database,
    Duration,
    Json,
    command,
    database_url,
    duration_option,
    new_app,
)
from outbox.cli.output import write_json, write_line, write_table
from outbox.duration import brief_duration, exact_duration
from outbox.errors import ConfigError, shorten
from outbox.logs.printable import printable
from outbox.observability.message_life import (
    MOST_MESSAGES,
    Branch,
    Databases,
    Found,
    Handling,
    Life,
    LifeStep,
    Progress,
    State,
    Trace,
    read_lives_of_key,
    read_trace,
)

INBOX_VARIABLE: Final = "PILLARBOX_INBOX_DATABASE_URL"

_STATUS: Final = {Found.FOUND: 0, Found.NOT_FOUND: 1, Found.NOT_KNOWABLE: 4}
_STEPS: Final = ("at (UTC)", "after", "step", "who", "details")
_MESSAGES: Final = ("message", "added (UTC)", "topic", "state", "consumers")
_DAY: Final = timedelta(days=1)
_MAX_REASON: Final = 200

app = new_app()


@command(
    app,
    epilog="Exit status: 0 found; 1 not found; 4 not knowable, because days were "
    "dropped in which it may have been; 2 it could not look.",
)
def trace(
    id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Id of the message.", show_default=False),
    ] = None,
    *,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="The messages of this key instead."),
    ] = None,
    within: Annotated[
        timedelta,
        duration_option("--within", help="How far back to look for a key."),
    ] = Duration.of(_DAY),
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help="Maximum number of messages: of a key, or of the tree.",
        ),
    ] = MOST_MESSAGES,
    database: Database = None,
    inbox_database: Annotated[
        list[str] | None,
        typer.Option(
            "--inbox-database",
            metavar="URL",
            envvar=INBOX_VARIABLE,
            help="Another database to look in, such as that of a consumer; may be "
            "repeated. The variable takes several, with spaces between them.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Show the life of a message, and the messages that it caused, as a tree."""
    if (id is None) == (key is None):
        raise ConfigError("give the id of a message, or --key KEY, and not both")
    urls = list(dict.fromkeys([database_url(database), *(inbox_database or ())]))
    with _opened(urls) as databases:
        if id is not None:
            found = read_trace(databases, id, max_messages=limit)
            return _show_message(found, as_json=json)
        assert key is not None
        return _show_key(databases, key, within, limit, as_json=json)


@contextmanager
def _opened(urls: Sequence[str]) -> Iterator[Databases]:
    """Open the databases, by name; a name that occurs twice gets its host added."""
    with ExitStack() as stack:
        connections = [
            stack.enter_context(
                administration(
                    url,
                    application_name="pillarbox trace",
                    rights="GRANT pillarbox_monitor TO its role",
                )
            )
            for url in urls
        ]
        names: list[str] = []
        for connection in connections:
            name = connection.info.dbname
            if name in names:
                name = f"{name}@{connection.info.host}:{connection.info.port}"
            names.append(name if name not in names else f"{name} ({len(names) + 1})")
        yield dict(zip(names, connections, strict=True))


def _show_message(found: Trace, *, as_json: bool) -> int:
    if as_json:
        write_json(_as_json(found))
    else:
        _write_trace(found)
    return _STATUS[found.found]


def _show_key(
    databases: Databases, key: str, within: timedelta, limit: int, *, as_json: bool
) -> int:
    since = datetime.now(UTC) - within
    found = read_lives_of_key(databases, key, since=since, max_messages=limit)
    if as_json:
        write_json(
            {
                "found": found.found,
                "key": key,
                "since": found.since,
                "messages": [_life_as_json(life) for life in found.lives],
                "unknown": found.unknown,
            }
        )
        return _STATUS[found.found]
    window = f"of key {shorten(key)} in the last {exact_duration(within)}"
    if found.lives:
        count = len(found.lives)
        newest = f", the newest {limit}" if count == limit else ""
        write_line(f"{count} message{'' if count == 1 else 's'} {window}{newest}")
        write_line("")
        write_table(
            _MESSAGES,
            [
                (life.id, _moment(life.added_at), life.topic, _state(life), _who(life))
                for life in found.lives
            ],
        )
        write_line("")
        write_line("pillarbox trace ID shows the life of one")
    else:
        write_line(f"no message {window}; --within 7d looks further back")
    _write_unknown(found.unknown)
    return _STATUS[found.found]


def _write_trace(found: Trace) -> None:
    life = found.life
    match found.found:
        case Found.NOT_FOUND:
            write_line(f"{life.id}: not found in any of the databases")
        case Found.NOT_KNOWABLE:
            write_line(f"{life.id}: not found, but it is unknown whether it exists")
        case Found.FOUND:
            _write_life(life)
            if found.causes or found.branch.caused or found.branch.is_cut:
                write_line("")
                for line in _tree(found):
                    write_line(line)
    _write_unknown(found.unknown)


def _write_life(life: Life) -> None:
    write_line(f"{life.topic}  {life.id}")
    write_line(": ".join(filter(None, (_state(life), life.waits))))
    for handling in life.handlings:
        write_line(f"{handling.consumer}: {_progress(handling)}")
    write_line("")
    databases = {it.database for it in life.steps}
    for envelope in life.envelopes:
        about = {
            "key": envelope.key,
            "tenant": envelope.tenant,
            "lane": f"{envelope.lane} ({envelope.priority})",
            "content": f"{envelope.payload_bytes:,} bytes of {envelope.content_type}",
            "schema version": envelope.schema_version,
            "trace": envelope.traceparent,
        }
        for name, value in about.items():
            if value is not None:
                write_line(f"{name + ':':<16}{value}")
    write_line("")
    write_table(
        _STEPS if len(databases) < 2 else (*_STEPS[:-1], "database", _STEPS[-1]),
        list(_step_rows(life.steps, with_database=len(databases) > 1)),
    )


def _step_rows(
    steps: Sequence[LifeStep], *, with_database: bool
) -> Iterator[tuple[str | None, ...]]:
    before: datetime | None = None
    for step in steps:
        details = "; ".join(filter(None, _details(step)))
        after = None if before is None else brief_duration(step.at - before)
        who = step.consumer or step.by
        middle = (step.database,) if with_database else ()
        yield (_moment(step.at), after, step.said, who, *middle, details)
        before = step.at


def _details(step: LifeStep) -> Iterator[str | None]:
    if step.run:
        yield f"replay {step.run}"
    if step.attempts:
        yield f"{step.attempts} attempt{'' if step.attempts == 1 else 's'}"
    if step.due_at is not None:
        yield f"{_DUE.get(step.what, 'due')} {_moment(step.due_at)}"
    if step.consumer is not None and step.by not in (None, f"consumer:{step.consumer}"):
        yield f"by {step.by}"
    if step.reason:
        yield step.reason[:_MAX_REASON]


_DUE: Final = {
    "added": "scheduled for",
    "job_started": "leased until",
    "dead_letter": "next retry",
}


def _state(life: Life) -> str:
    replays = f", replayed {life.replays} times" if life.replays > 1 else ""
    if life.replays == 1:
        replays = ", replayed once"
    if life.state is None:
        return "not found in any outbox"
    added, published = life.added_at, life.published_at
    took = ""
    if life.state is State.PUBLISHED and added is not None and published is not None:
        took = f" after {brief_duration(published - added)}"
    return f"{_STATES.get(life.state, life.state)}{took}{replays}"


_STATES: Final = {State.DEAD_LETTERED: "dead letter"}


def _who(life: Life) -> str | None:
    said = [f"{it.consumer}: {_PROGRESSES[it.progress]}" for it in life.handlings]
    return ", ".join(said) or None


def _progress(handling: Handling) -> str:
    said = f"{_PROGRESSES[handling.progress]} {_moment(handling.since)}"
    open_ones = (Progress.WAITING, Progress.DEAD_LETTERED, Progress.STARTED)
    if handling.progress in open_ones and handling.attempts:
        said += f", {handling.attempts} attempt{'' if handling.attempts == 1 else 's'}"
    if handling.due_at is not None:
        said += f", next {_moment(handling.due_at)}"
    return f"{said}: {handling.reason}" if handling.reason else said


_PROGRESSES: Final[Mapping[Progress, str]] = {
    Progress.DELIVERED: "in its queue since",
    Progress.WAITING: "returned it for retry",
    Progress.BLOCKED: "blocked by its key since",
    Progress.STARTED: "started it, not finished yet",
    Progress.QUEUED: "job queued since",
    Progress.IN_PROGRESS: "job running since",
    Progress.ENDED: "job ended",
    Progress.HANDLED: "handled it",
    Progress.DEAD_LETTERED: "dead-lettered it",
    Progress.DISCARDED: "discarded",
    Progress.ACKED: "acked it",
}


def _tree(found: Trace) -> Iterator[str]:
    """Draw what led to the message, and what it caused."""
    depth = 0
    for life in found.causes:
        yield _indented(depth, _line(life))
        depth += 1
    yield from _drawn(found.branch, "   " * max(depth - 1, 0), depth, is_traced=True)


def _indented(depth: int, text: str) -> str:
    return text if depth == 0 else f"{'   ' * (depth - 1)}└─ {text}"


def _drawn(
    branch: Branch, indent: str, depth: int, *, is_traced: bool = False
) -> Iterator[str]:
    mark = "  ◀ this one" if is_traced else ""
    yield f"{indent}{'└─ ' if depth else ''}{_line(branch.life)}{mark}"
    yield from _drawn_below(branch, f"{indent}{'   ' if depth else ''}")


def _drawn_below(branch: Branch, indent: str) -> Iterator[str]:
    for number, child in enumerate(branch.caused):
        is_last = number == len(branch.caused) - 1 and not branch.is_cut
        yield f"{indent}{'└─ ' if is_last else '├─ '}{_line(child.life)}"
        yield from _drawn_below(child, indent + ("   " if is_last else "│  "))
    if branch.is_cut:
        yield f"{indent}└─ … more: --limit raises how many are read"


def _line(life: Life) -> str:
    said = [life.topic, life.id, _state(life), _who(life)]
    return "  ".join(printable(it) for it in said if it)


def _as_json(found: Trace) -> dict[str, Any]:
    def branch_as_json(branch: Branch) -> dict[str, Any]:
        return {
            **_life_as_json(branch.life),
            "caused": [branch_as_json(child) for child in branch.caused],
            "is_cut": branch.is_cut,
        }

    return {
        "found": found.found,
        "causes": [_life_as_json(life) for life in found.causes],
        "message": branch_as_json(found.branch),
        "unknown": found.unknown,
    }


def _life_as_json(life: Life) -> dict[str, Any]:
    added = life.added_at
    return {
        "id": life.id,
        "state": life.state,
        "waits": life.waits,
        "added_at": added,
        "published_at": life.published_at,
        "replays": life.replays,
        "messages": [asdict(it) for it in life.envelopes],
        "consumers": [asdict(it) for it in life.handlings],
        "steps": [
            {**asdict(it), "since_added": None if added is None else it.at - added}
            for it in life.steps
        ],
    }


def _write_unknown(unknown: Sequence[str]) -> None:
    if unknown:
        write_line("")
        write_line("Can't be known:")
        for text in unknown:
            write_line(f"- {text}")


def _moment(at: datetime | None) -> str:
    if at is None:
        return "unknown"
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
