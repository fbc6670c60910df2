"""`relay dead-letters` and `inbox dead-letters`: list, show, retry, discard, export."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from uuid import UUID

from outbox.cli.command import (
    DATABASE_VARIABLE,
    Subcommands,
    add_database,
    run_coroutine,
    url_of,
)
from outbox.cli.dead_letter_options import add_criteria, criteria_of
from outbox.cli.dead_letter_view import page_of, table_of
from outbox.cli.progress import Progress
from outbox.cli.table import printable
from outbox.dead_letters.criteria import Criteria, IdPrefix
from outbox.dead_letters.events import DeadLetterFailed
from outbox.dead_letters.inspect import OnDiscard, open_desk
from outbox.dead_letters.letter import Letter, Status, Summary
from outbox.dead_letters.retry import (
    Candidate,
    Outcome,
    Retrier,
    Tally,
    find,
    retry_all,
)
from outbox.dead_letters.statement import Schema, Statement
from outbox.duration import read_rate
from outbox.errors import ConfigError
from outbox.events import Event, Observer


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What the two sides have of their own.

    Attributes:
        add_retry: adds the arguments that say how to retry.
        open_retrier: opens what they ask for, and whom it tells of its retries.
        take_turn: takes the schedule's turn; None if another replica has it.
    """

    schema: Schema
    add_retry: Callable[[argparse.ArgumentParser], None]
    open_retrier: Callable[
        [argparse.Namespace, Observer], AbstractAsyncContextManager[Retrier]
    ]
    take_turn: Callable[[argparse.Namespace, Observer], Awaitable[Tally | None]]
    on_discard: OnDiscard | None = None


def add_to(subcommands: Subcommands, side: Side) -> None:
    """Add the commands of one side to its parser."""
    parser = subcommands.add_parser(
        "dead-letters", help="list, show, retry, discard what was given up"
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    listing = actions.add_parser("list", help="list them, the newest first")
    add_database(listing)
    add_criteria(listing, status=Status.PENDING, max_rows=50)
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=partial(_list, side))

    show = actions.add_parser("show", help="show one with everything that was kept")
    add_database(show)
    _add_id(show, "id")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=partial(_show, side))

    retry = actions.add_parser("retry", help="try some again")
    side.add_retry(retry)
    _add_choice(retry)
    retry.add_argument(
        "--due",
        action="store_true",
        help="what the schedule would retry now, unless a replica is doing so",
    )
    retry.add_argument("--rate", metavar="N/s", help="no faster than that")
    retry.set_defaults(run=partial(_retry, side))

    discard = actions.add_parser("discard", help="decide that some are not retried")
    add_database(discard)
    _add_choice(discard)
    discard.add_argument("--reason", required=True, metavar="TEXT", help="why; is kept")
    discard.set_defaults(run=partial(_discard, side))

    export = actions.add_parser("export", help="print them as JSON lines")
    add_database(export)
    add_criteria(export, status=None, max_rows=None)
    export.set_defaults(run=partial(_export, side))


def _add_id(
    parser: argparse.ArgumentParser, name: str, *, nargs: str | None = None
) -> None:
    parser.add_argument(
        name,
        nargs=nargs,
        metavar="ID",
        help="id of a dead letter, or its first digits if no other begins with them",
    )


def _add_choice(parser: argparse.ArgumentParser) -> None:
    _add_id(parser, "ids", nargs="*")
    add_criteria(parser, status=Status.PENDING, max_rows=None)
    parser.add_argument("--all", action="store_true", help="all that are PENDING")
    parser.add_argument(
        "--dry-run", action="store_true", help="list which ones, and do nothing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _url(arguments: argparse.Namespace) -> str:
    return url_of(arguments.database, "database", DATABASE_VARIABLE)


def _list(side: Side, arguments: argparse.Namespace) -> int:
    with open_desk(_url(arguments), side.schema) as desk:
        _write(desk.summaries(criteria_of(arguments)), arguments)
    return 0


def _write(found: Sequence[Summary], arguments: argparse.Namespace) -> None:
    if arguments.json:
        said = json.dumps([letter.as_json() for letter in found], indent=2)
        sys.stdout.write(f"{said}\n")
    else:
        sys.stdout.write(table_of(found))


def _show(side: Side, arguments: argparse.Namespace) -> int:
    with open_desk(_url(arguments), side.schema) as desk:
        letter = desk.read(desk.find_id(IdPrefix.of(arguments.id)))
    if arguments.json:
        sys.stdout.write(f"{json.dumps(letter.as_json(), indent=2)}\n")
    else:
        sys.stdout.write(page_of(letter))
    return 0


def _retry(side: Side, arguments: argparse.Namespace) -> int:
    chosen = _chosen(arguments, or_due=arguments.due)
    rate = None if arguments.rate is None else read_rate("--rate", arguments.rate)
    tallies: list[Tally | None] = []
    failures: list[DeadLetterFailed] = []

    def note(event: Event) -> None:
        if isinstance(event, DeadLetterFailed):
            failures.append(event)

    async def run() -> None:
        if arguments.due:
            tallies.append(await side.take_turn(arguments, note))
            return
        async with side.open_retrier(arguments, note) as retrier:
            if arguments.dry_run:
                found = await _summaries(side.schema, retrier, arguments)
                _write(found, arguments)
                return
            candidates = await _candidates(side.schema, retrier, arguments)
            progress = Progress(len(candidates))
            counts: Counter[str] = Counter()

            def show(outcome: Outcome) -> None:
                counts[outcome.value] += 1
                progress.show(counts.total(), counts)

            try:
                tally = await retry_all(
                    retrier, candidates, max_per_second=rate, on_outcome=show
                )
            finally:
                progress.end()
                left = len(candidates) - counts.total()
                if left:
                    sys.stderr.write(f"{left} of {len(candidates)} were not tried\n")
            tallies.append(tally)

    if arguments.due and (chosen or arguments.dry_run):
        raise ConfigError("--due stands alone: the schedule chooses by itself")
    try:
        run_coroutine(run())
    finally:
        # Also of what was tried before the broker or the database went away.
        if not arguments.json:
            sys.stdout.write("".join(map(_line_of, failures)))
    if not tallies:
        return 0
    return _report(tallies[0], failures, as_json=arguments.json)


def _line_of(failure: DeadLetterFailed) -> str:
    said = f"{failure.id} of {failure.topic} failed: {failure.reason}"
    return f"{printable(' '.join(said.split()))}\n"


def _report(
    tally: Tally | None, failures: Sequence[DeadLetterFailed], *, as_json: bool
) -> int:
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
        report = None if tally is None else {**asdict(tally), "failures": reasons}
        sys.stdout.write(f"{json.dumps(report)}\n")
    elif tally is None:
        sys.stdout.write("another replica is just retrying what is due\n")
    else:
        said = ", ".join(f"{count} {name}" for name, count in asdict(tally).items())
        sys.stdout.write(f"{tally.total} retried: {said}\n")
    return 1 if tally is not None and tally.failed else 0


async def _candidates(
    schema: Schema, retrier: Retrier, arguments: argparse.Namespace
) -> list[Candidate]:
    if not arguments.ids:
        return await find(retrier, criteria_of(arguments))
    letters = await _summaries(schema, retrier, arguments)
    return [Candidate(letter.id, letter.created_at) for letter in letters]


async def _summaries(
    schema: Schema, retrier: Retrier, arguments: argparse.Namespace
) -> list[Summary]:
    if not arguments.ids:
        # The oldest first, and of them as many as are to be retried.
        criteria = replace(criteria_of(arguments), max_rows=None)
        rows = await retrier.fetch(Statement.LIST, criteria.parameters())
        return [Summary.of(row) for row in rows][::-1][: arguments.limit]
    ids: dict[UUID, None] = {}
    for prefix in [IdPrefix.of(text) for text in arguments.ids]:
        rows = await retrier.fetch(Statement.FIND_BY_PREFIX, prefix.parameters())
        ids[prefix.choose([id for (id,) in rows], schema)] = None
    found: list[Summary] = []
    for id in ids:
        (row,) = await retrier.fetch(Statement.READ, {"id": str(id)})
        found.append(Letter.of(row))
    return found


def _discard(side: Side, arguments: argparse.Namespace) -> int:
    _chosen(arguments)
    if not arguments.reason.strip():
        raise ConfigError("--reason is empty: say why, for those who ask later")
    with open_desk(_url(arguments), side.schema, side.on_discard) as desk:
        if arguments.ids:
            prefixes = [IdPrefix.of(text) for text in arguments.ids]
            ids = dict.fromkeys(desk.find_id(prefix) for prefix in prefixes)
            letters: list[Summary] = [desk.read(id) for id in ids]
        else:
            criteria = replace(criteria_of(arguments), max_rows=None)
            letters = desk.summaries(criteria)[::-1][: arguments.limit]
        if arguments.dry_run:
            _write(letters, arguments)
            return 0
        candidates = [Candidate(letter.id, letter.created_at) for letter in letters]
        discarded = desk.discard(candidates, arguments.reason)
    settled = len(candidates) - discarded
    if arguments.json:
        sys.stdout.write(f'{{"discarded": {discarded}, "settled": {settled}}}\n')
    else:
        said = f", {settled} were settled already" if settled else ""
        sys.stdout.write(f"{discarded} discarded{said}\n")
    return 0


def _export(side: Side, arguments: argparse.Namespace) -> int:
    with open_desk(_url(arguments), side.schema) as desk:
        for letter in desk.letters(criteria_of(arguments)):
            sys.stdout.write(f"{json.dumps(letter.as_json())}\n")
    return 0


def _chosen(arguments: argparse.Namespace, *, or_due: bool = False) -> bool:
    """Tell whether any are named; whoever means all has to say so."""
    asked = Criteria(status=Status.PENDING) != criteria_of(arguments)
    if arguments.ids and (asked or arguments.all):
        raise ConfigError("ids and filters together: leave out the one or the other")
    named = bool(arguments.ids or asked or arguments.all)
    if not named and not or_due:
        raise ConfigError(
            "which dead letters? give ids, a filter such as --topic, or --all"
        )
    return named
