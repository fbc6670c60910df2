"""`pillarbox trace`: the life of a message, and the tree of what it caused."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pillarbox.outbox.cli.command import (
    Databases,
    Json,
    Limit,
    Since,
    command,
    new_app,
    opened_all,
)
from pillarbox.outbox.cli.output import (
    branch,
    draw,
    write_json,
    write_line,
    write_table,
)
from pillarbox.outbox.duration import brief_duration
from pillarbox.outbox.errors import (
    ConfigError,
    DatabaseUnavailableError,
    shorten,
)
from pillarbox.outbox.logs.printable import count
from pillarbox.outbox.observability.message_life import (
    MOST_MESSAGES,
    Found,
    Life,
    LifeStep,
    State,
    Trace,
    read_id,
    read_lives_of_key,
    read_trace,
    write_moment,
)

if TYPE_CHECKING:
    from rich.tree import Tree

    from pillarbox.outbox.administration.connection import AdministrationConnection

_STATUS: Final = {Found.FOUND: 0, Found.NOT_FOUND: 1, Found.NOT_KNOWABLE: 4}
_STEPS: Final = ("at (UTC)", "after", "step", "who", "details")
_MESSAGES: Final = ("message", "added (UTC)", "topic", "state", "consumers")
_DAY: Final = timedelta(days=1)
_MAX_REASON: Final = 200
_RIGHTS: Final = "GRANT pillarbox_monitor TO its role"

app = new_app()


@command(
    app,
    epilog="Exit status: 0 found; 1 not found; 4 unknown, because days that may have "
    "contained it were dropped, or a database is unreachable; 2 it could not search.",
)
def trace(
    id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Id of the message.", show_default=False),
    ] = None,
    *,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="List the messages of a key instead, by default of the last day.",
        ),
    ] = None,
    since: Since = None,
    limit: Limit = MOST_MESSAGES,
    database: Databases = None,
    json: Json = False,
) -> int:
    """Show the life of a message, and the messages that it caused, as a tree."""
    if (id is None) == (key is None):
        raise ConfigError("give the id of a message, or --key KEY, and not both")
    limit = limit or MOST_MESSAGES
    away: list[DatabaseUnavailableError] = []
    with opened_all(database, "trace", away=away, rights=_RIGHTS) as databases:
        missing = [*map(str, away)]
        if id is not None:
            found = read_trace(databases, read_id(id), away=missing, max_messages=limit)
            if json:
                write_json(_as_json(found))
            else:
                _write_trace(found)
            return _STATUS[found.found]
        assert key is not None
        since = since or datetime.now(UTC) - _DAY
        return _show_key(databases, key, since, limit, missing, as_json=json)


def _show_key(
    databases: Mapping[str, "AdministrationConnection"],
    key: str,
    since: datetime,
    limit: int,
    away: Sequence[str],
    *,
    as_json: bool,
) -> int:
    found = read_lives_of_key(
        databases, key, since=since, away=away, max_messages=limit
    )
    if as_json:
        values = found._asdict()
        values["lives"] = [_life_as_json(life) for life in found.lives]
        write_json({"key": key, "since": since, **values})
        return _STATUS[found.found]
    window = f"of key {shorten(key)} since {write_moment(since)}"
    if found.lives:
        newest = f", the newest {limit}" if len(found.lives) == limit else ""
        write_line(f"{count(len(found.lives), 'message')} {window}{newest}", "")
        write_table(_MESSAGES, list(map(_row, found.lives)))
        write_line("", "pillarbox trace ID shows the life of one")
    else:
        write_line(f"no message {window}; --since 7d searches further back")
    _write_unknown(found.unknown)
    return _STATUS[found.found]


def _row(life: Life) -> Sequence[str | None]:
    handled = ", ".join(_handlings(life)) or None
    return life.id, write_moment(life.added_at), life.topic, _state(life), handled


def _write_trace(found: Trace) -> None:
    life = found.life
    match found.found:
        case Found.NOT_FOUND:
            write_line(f"{life.id}: not found in any of the databases")
        case Found.NOT_KNOWABLE:
            write_line(f"{life.id}: not found, but not everything could be searched")
        case Found.FOUND:
            _write_life(life)
            for it in found.failing:
                if it.failing_since is not None:
                    since = f"has been failing since {write_moment(it.failing_since)}"
                    write_line(f"{it.name} on {it.host} {since}: {it.reason}")
                if running := it.running(datetime.now(UTC)):
                    write_line(f"{it.name} on {it.host}: {running}")
            if found.causes or life.caused:
                write_line("")
                draw(_tree(found))
            if found.is_cut:
                write_line("… more: raise --limit")
    _write_unknown(found.unknown)


def _write_life(life: Life) -> None:
    write_line(f"{life.topic}  {life.id}")
    write_line(": ".join(filter(None, (_state(life), life.waits))))
    write_line(*_handlings(life))
    write_line("")
    for envelope in life.envelopes:
        about = {
            "key": envelope.key,
            "tenant": envelope.tenant,
            "priority": envelope.priority,
            "content": f"{envelope.payload_bytes:,} bytes of {envelope.content_type}",
            "schema version": envelope.schema_version,
            "trace": envelope.traceparent,
        }
        for name, value in about.items():
            if value is not None:
                write_line(f"{name + ':':<16}{value}")
    write_line("")
    write_table(_STEPS, list(_step_rows(life.steps)))


def _step_rows(steps: Sequence[LifeStep]) -> Iterator[tuple[str | None, ...]]:
    are_of_several = len({it.database for it in steps}) > 1
    before: datetime | None = None
    for step in steps:
        details = [f"in {step.database}"] if are_of_several else []
        details += _details(step)
        after = None if before is None else brief_duration(step.at - before)
        who = step.consumer or step.by
        yield write_moment(step.at), after, step.text, who, "; ".join(details)
        before = step.at


def _details(step: LifeStep) -> Iterator[str]:
    if step.run:
        yield f"replay {step.run}"
    if step.attempts:
        yield count(step.attempts, "attempt")
    if step.due_at is not None:
        yield f"{_DUE.get(step.what, 'due')} {write_moment(step.due_at)}"
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
    if life.state is None:
        return "not found in any outbox"
    text = life.state.replace("_", " ")
    is_done = life.state in (State.PUBLISHED, State.HANDLED)
    if is_done and life.added_at and life.published_at:
        due = next((it.available_at for it in life.envelopes if it.available_at), None)
        took = brief_duration(life.published_at - (due or life.added_at))
        text += f" {took} after it was due" if due else f" after {took}"
    if life.replays:
        text += f", replayed {count(life.replays, 'time')}"
    return text


def _handlings(life: Life) -> list[str]:
    return [f"{it.consumer}: {it.text}" for it in life.handlings]


def _tree(found: Trace) -> "Tree":
    """Return the message's causes, and the messages that it caused."""
    tree = _grown(found.life, "  ◀ this one")
    for life in reversed(found.causes):
        tree = branch(_line(life), [tree])
    return tree


def _grown(life: Life, mark: str = "") -> "Tree":
    return branch(_line(life) + mark, map(_grown, life.caused))


def _line(life: Life) -> str:
    return "  ".join([life.topic, life.id, _state(life), *_handlings(life)])


def _as_json(found: Trace) -> dict[str, Any]:
    causes = [_life_as_json(life) for life in found.causes]
    return {**asdict(found), "causes": causes, "life": _life_as_json(found.life)}


def _life_as_json(life: Life) -> dict[str, Any]:
    return {
        **asdict(life),
        "consumers": [asdict(it) for it in life.handlings],
        "caused": [_life_as_json(it) for it in life.caused],
    }


def _write_unknown(unknown: Sequence[str]) -> None:
    if unknown:
        write_line("", "Not recorded here:", *(f"- {text}" for text in unknown))
