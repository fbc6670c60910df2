"""The reference page of the events, generated from the code."""

import importlib
import inspect
import logging
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Final, get_type_hints

from pillarbox.outbox.events import Event

PAGE: Final = Path(__file__).parent / "events.md"

_ROOT: Final = Path(__file__).parent.parent.parent
_PACKAGES: Final = {
    "relay": "of the relay",
    "outbox/log": "of the relay, about its lanes, its reader and its database",
    "inbox": "of the consumer",
    "inbox/webhook": "of the webhook endpoint",
    "outbox/dead_letters": "about dead letters, of relay and consumer",
    "outbox/observability": "about the database, of the relay that measures it",
    "outbox/web": "of the page",
    "outbox": "of all processes",
}
_DEFINITION: Final = re.compile(r"^class \w+\((?:Delivery)?Event\):", re.MULTILINE)

_INTRODUCTION: Final = """\
# Events

<!-- Written by `make reference` from the code. -->

Everything that happens in a relay or a consumer is an event: a typed value that
observers receive. Logs and metrics are observers, [traces](../tracing.md) show some
events; `Relay(…, observers=[…])` and `Consumer.observe` accept yours. An event is named
in the past, and a log shows neither payloads nor values of rows.

[Logs](../monitoring.md#logs) show an event as its name and its fields. Its level says
what it is for:

- DEBUG: details for finding the cause of a fault.
- INFO: what the process is doing. Problems that resolve themselves,
  such as a message that is retried, are INFO.
- WARNING: the operator must act; `remedy` says what to do.

An event "summed up by" some fields is logged when it first happens. Repetitions with
the same values are counted and logged once a minute, with their number as `repeated`;
with `--log-level debug` each one is logged, too.
If the level is "INFO, then WARNING", the first one is logged at INFO, and repetitions
that continue after a minute as a WARNING.
"""


def page() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION]
    found = sorted(events(), key=lambda it: it.__name__)
    for package, scope in _PACKAGES.items():
        defined = [it for it in found if _package_of(it) == package]
        parts.append(f"## Events {scope}\n")
        parts += [_section(event) for event in defined]
    return "\n".join(parts)


def events() -> Iterator[type[Event]]:
    """Yield every event that the packages define."""
    for top in ("outbox", "relay", "inbox"):
        for path in sorted((_ROOT / top).rglob("*.py")):
            if _DEFINITION.search(path.read_text(encoding="utf-8")):
                parts = path.relative_to(_ROOT).with_suffix("").parts
                name = ".".join(("pillarbox", *parts))
                module = importlib.import_module(name)
                for value in vars(module).values():
                    if (
                        inspect.isclass(value)
                        and issubclass(value, Event)
                        and value.__module__ == name
                        and value.__name__ not in {"Event", "DeliveryEvent"}
                    ):
                        yield value


def _package_of(event: type[Event]) -> str:
    path = event.__module__.removeprefix("pillarbox.").replace(".", "/")
    return max((p for p in _PACKAGES if path.startswith(f"{p}/")), key=len)


def _section(event: type[Event]) -> str:
    meaning, about_fields = _documented(event)
    kinds = get_type_hints(event)
    said = [f"### {event.__name__}\n"]
    said.append(f"`{event.__module__}.{event.__name__}`, {_level(event)}.\n")
    said.append(f"{meaning}\n")
    if event.advice is not None:
        said.append(f"Remedy: {event.advice}.\n")
    if event.settles is not None:
        said.append(f"[Traced](../tracing.md) as the span `{event.settles} TOPIC`.\n")
    shown = [it.name for it in fields(event) if it.repr]
    if shown:
        said.append("| field | type | |\n|---|---|---|")
        said += [
            f"| `{name}` | `{_type(kinds[name])}` | {about_fields.get(name, '')} |"
            for name in shown
        ]
        said.append("")
    return "\n".join(said).replace("|  |", "| |")


def _level(event: type[Event]) -> str:
    level = logging.getLevelName(event.level)
    if event.lasting_level is not None:
        level += f", then {logging.getLevelName(event.lasting_level)}"
    if event.about is None:
        return level
    by = ", ".join(f"`{it}`" for it in event.about)
    return f"{level}, summed up by {by}" if by else f"{level}, summed up"


def _type(kind: object) -> str:
    name = kind.__name__ if inspect.isclass(kind) and "[" not in str(kind) else kind
    return re.sub(r"\b[a-z_]+(?:\.[a-z_]+)*\.(?=[A-Z])", "", str(name)).replace(
        "|", "\\|"
    )


def _documented(event: type[Event]) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and its descriptions of fields."""
    text, _, attributes = inspect.cleandoc(event.__doc__ or "").partition(
        "\n\nAttributes:\n"
    )
    said: dict[str, str] = {}
    for base in reversed(event.__mro__):
        doc = inspect.cleandoc(base.__doc__ or "") if base is not object else ""
        attributes = doc.partition("\nAttributes:\n")[2]
        for name, meaning in re.findall(
            r"^ {4}(\w+): ((?:.|\n {5,})+)", attributes, re.MULTILINE
        ):
            said[name] = " ".join(meaning.split())
    return " ".join(text.split()), said
