"""The pages of the reference: up to date and complete."""

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.main import get_command

import pillarbox
from docs.reference import __main__ as commands
from docs.reference import api, events, metrics, sql
from pillarbox.outbox.cli.main import app
from pillarbox.outbox.events import Event

# What any command-line tool has.
_EVERYWHERE = {"--help", "--version", "--install-completion", "--show-completion"}
EVENTS = sorted(events.events(), key=lambda it: it.__module__ + it.__name__)


def name_of(event: type[Event]) -> str:
    return f"{event.__module__}.{event.__name__}"


@pytest.mark.parametrize(
    ("path", "page"),
    [
        (commands.PAGE, commands.page()),
        (commands.BROKERS_PAGE, commands.brokers_page()),
        (api.PAGE, api.page()),
        (events.PAGE, events.page()),
        (metrics.PAGE, metrics.page()),
    ],
    ids=["commands", "brokers", "api", "events", "metrics"],
)
def test_a_page_matches_the_code(path: Path, page: str) -> None:
    assert path.read_text() == page, "run `make reference`"


def test_the_page_of_sql_matches_the_database(connection: psycopg.Connection) -> None:
    assert sql.PAGE.read_text() == sql.page(connection), "run `make reference`"


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_every_event_documents_its_meaning_and_every_warning_its_remedy(
    event: type[Event],
) -> None:
    documented = event.__doc__ or ""
    # A dataclass without a docstring gets its signature as one.
    assert documented
    assert not documented.startswith(f"{event.__name__}(")
    assert f"### {event.__name__}\n" in events.PAGE.read_text()
    names = {field.name for field in fields(event)}
    levels = {event.level, event.lasting_level or logging.DEBUG}
    assert levels <= {logging.DEBUG, logging.INFO, logging.WARNING}
    is_warning = logging.WARNING in levels
    assert (event.advice is not None) + ("remedy" in names) == is_warning
    assert set(event.about or ()) <= names, "repetitions are recognized by these"


def test_the_page_of_python_describes_every_name_and_parameter() -> None:
    assert sorted(api.documented()) == sorted(pillarbox.__all__)
    described = {name: api.parameters(name) for name in api.documented()}
    missing = [
        f"{name}({parameter})"
        for name, found in described.items()
        for parameter, meaning in found.items()
        if not meaning
    ]
    assert missing == []
    assert described["Message"].keys() >= {"topic", "key", "available_at"}
    assert described["Consumer"].keys() >= {"source", "max_idle", "observers"}


def flags_of(command: Any) -> set[str]:
    """Return the options of a command and of those below it."""
    own = {
        option
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    below = getattr(command, "commands", {})
    return own.union(*(flags_of(below[name]) for name in below)) - _EVERYWHERE


def test_the_commands_have_few_options() -> None:
    """A setting that nobody needs to change while it runs is a constant."""
    assert len(flags_of(get_command(app))) <= 56
