"""The reference pages of commands and events: up to date and complete."""

import logging
from dataclasses import fields
from pathlib import Path

import pytest

from docs.reference import __main__ as commands
from docs.reference import events
from outbox.events import Event

EVENTS = sorted(events.events(), key=lambda it: it.__module__ + it.__name__)


def name_of(event: type[Event]) -> str:
    return f"{event.__module__}.{event.__name__}"


@pytest.mark.parametrize(
    ("path", "page"),
    [(commands.PAGE, commands.page()), (events.PAGE, events.page())],
    ids=["commands", "events"],
)
def test_a_page_matches_the_code(path: Path, page: str) -> None:
    assert path.read_text() == page, "run `make reference`"


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_every_event_documents_its_meaning(event: type[Event]) -> None:
    documented = event.__doc__ or ""
    # A dataclass without a docstring gets its signature as one.
    assert documented
    assert not documented.startswith(f"{event.__name__}(")
    assert f"### {event.__name__}\n" in events.PAGE.read_text()


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_warnings_and_only_warnings_have_a_remedy(event: type[Event]) -> None:
    is_warning = logging.WARNING in {event.level, event.lasting_level}
    has_field = any(field.name == "remedy" for field in fields(event))
    assert (event.advice is not None) + has_field == is_warning


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_no_event_is_above_a_warning(event: type[Event]) -> None:
    levels = {event.level, event.lasting_level or logging.DEBUG}
    assert levels <= {logging.DEBUG, logging.INFO, logging.WARNING}


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_repetitions_are_identified_by_fields_of_the_event(event: type[Event]) -> None:
    assert set(event.about or ()) <= {field.name for field in fields(event)}
