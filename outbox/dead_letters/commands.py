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

from outbox.command import (
    DATABASE_VARIABLE,
    Subcommands,
    add_database,
    run_coroutine,
    url_of,
)
from outbox.dead_letters.criteria import Criteria
from outbox.dead_letters.desk import OnDiscard, open_desk
from outbox.dead_letters.letter import Letter, Status, Summary
from outbox.dead_letters.options import add_criteria, criteria_of
from outbox.dead_letters.retry import (
    Candidate,
    Outcome,
    Retrier,
    Tally,
    find,
    retry_all,
)
from outbox.dead_letters.statement import Schema, Statement
from outbox.dead_letters.view import page_of, table_of
from outbox.duration import read_rate
from outbox.errors import ConfigError
from outbox.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What the two sides have of their own.

    Attributes:
        add_retry: adds the arguments that say how to retry.
        open_retrier: opens what they ask for.
        take_turn: takes the schedule's turn; None if another replica has it.
    """

    schema: Schema
    add_retry: Callable[[argparse.ArgumentParser], None]
    open_retrier: Callable[[argparse.Namespace], AbstractAsyncContextManager[Retrier]]
    take_turn: Callable[[argparse.Namespace], Awaitable[Tally | None]]
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
    show.add_argument("id", type=UUID, metavar="ID")
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


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="*", type=UUID, metavar="ID")
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
        letter = desk.read(arguments.id)
    if arguments.json:
        sys.stdout.write(f"{json.dumps(letter.as_json(), indent=2)}\n")
    else:
        sys.stdout.write(page_of(letter))
    return 0


def _retry(side: Side, arguments: argparse.Namespace) -> int:
    chosen = _chosen(arguments, or_due=arguments.due)
    rate = None if arguments.rate is None else read_rate("--rate", arguments.rate)
    tallies: list[Tally | None] = []

    async def run() -> None:
        if arguments.due:
            tallies.append(await side.take_turn(arguments))
            return
        async with side.open_retrier(arguments) as retrier:
            if arguments.dry_run:
                _write(await _summaries(retrier, arguments), arguments)
                return
            candidates = await _candidates(retrier, arguments)
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
    run_coroutine(run())
    if not tallies:
        return 0
    return _report(tallies[0], as_json=arguments.json)


def _report(tally: Tally | None, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(f"{json.dumps(tally and asdict(tally))}\n")
    elif tally is None:
        sys.stdout.write("another replica is just retrying what is due\n")
    else:
        said = ", ".join(f"{count} {name}" for name, count in asdict(tally).items())
        sys.stdout.write(f"{tally.total} retried: {said}\n")
    return 1 if tally is not None and tally.failed else 0


async def _candidates(
    retrier: Retrier, arguments: argparse.Namespace
) -> list[Candidate]:
    if not arguments.ids:
        return await find(retrier, criteria_of(arguments))
    letters = await _summaries(retrier, arguments)
    return [Candidate(letter.id, letter.created_at) for letter in letters]


async def _summaries(retrier: Retrier, arguments: argparse.Namespace) -> list[Summary]:
    if not arguments.ids:
        # The oldest first, and of them as many as are to be retried.
        criteria = replace(criteria_of(arguments), max_rows=None)
        rows = await retrier.fetch(Statement.LIST, criteria.parameters())
        return [Summary.of(row) for row in rows][::-1][: arguments.limit]
    found = []
    for id in arguments.ids:
        rows = await retrier.fetch(Statement.READ, {"id": id})
        if not rows:
            raise ConfigError(f"dead letter {id}: there is none")
        found.append(Letter.of(rows[0]))
    return list(found)


def _discard(side: Side, arguments: argparse.Namespace) -> int:
    _chosen(arguments)
    if not arguments.reason.strip():
        raise ConfigError("--reason is empty: say why, for those who ask later")
    with open_desk(_url(arguments), side.schema, side.on_discard) as desk:
        if arguments.ids:
            letters: list[Summary] = [desk.read(id) for id in arguments.ids]
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
