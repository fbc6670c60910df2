"""Shared by all commands: options, the sources of URLs, logging, and exit statuses."""

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, cast

import typer
from typing_extensions import override

from pillarbox.outbox.cli.output import to_json
from pillarbox.outbox.cloudevents.raw_text import MAX_REASON, storable
from pillarbox.outbox.duration import (
    exact_duration,
    read_duration,
    read_moment,
    read_rate,
)
from pillarbox.outbox.errors import ConfigError, DatabaseUnavailableError
from pillarbox.outbox.logs.event_record import STACKTRACE
from pillarbox.outbox.observability.logging import (
    PrintableFormatter,
    TraceContext,
)
from pillarbox.outbox.observability.standard_error import StandardErrorHandler
from pillarbox.outbox.url import FileUrl

if TYPE_CHECKING:
    from pillarbox.outbox.administration.connection import AdministrationConnection

DATABASE_VARIABLE: Final = "PILLARBOX_DATABASE_URL"
BROKER_VARIABLE: Final = "PILLARBOX_BROKER_URL"
_SECOND_URL: Final = re.compile(r"\s\S+://")
CHILD_VARIABLE: Final = "PILLARBOX_PROCESS"
"""Set by the parent of several processes for each of them."""
FAILED: Final = 2
"""The exit status of a command that failed."""
LOGGING: Final = "Logging"
"""The help panel for the options that every command has."""

Database: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar=DATABASE_VARIABLE,
        help="The database, as postgresql://user@host:port/name. "
        f"{DATABASE_VARIABLE}_FILE may name a file that holds the URL.",
        show_default=False,
    ),
]
Databases: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        envvar=DATABASE_VARIABLE,
        help="A database, as postgresql://user@host:port/name; repeat it for several. "
        f"The variable takes several URLs, and {DATABASE_VARIABLE}_FILE several files, "
        "with spaces between them.",
        show_default=False,
    ),
]
Broker: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar=BROKER_VARIABLE,
        help="The broker to publish to, such as redis://host. "
        f"{BROKER_VARIABLE}_FILE may name a file that holds the URL.",
        show_default=False,
    ),
]
Codec: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME",
        envvar="PILLARBOX_CODEC",
        help="Decode payloads with this codec before they are published.",
        show_default=False,
    ),
]
SideOption: TypeAlias = Annotated[
    Literal["outbox", "inbox"] | None,
    typer.Option(
        help="Only the side of the relay (outbox) or of the consumers (inbox).",
        show_default="both",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Maximum number.")
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show what it would do; change nothing.")
]
Topic: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="TOPIC", help="Topic, or prefix followed by a star: 'orders.*'."
    ),
]
Key: TypeAlias = Annotated[str | None, typer.Option(metavar="KEY", help="Key.")]
Tenant: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TENANT", help="Tenant.")
]
ConsumerPath: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME", help="The Consumer whose handlers run the retries."
    ),
]


def _as_reason(text: str) -> str:
    text = storable(text)
    if len(text) > MAX_REASON:
        raise typer.BadParameter(
            f"has {len(text):,} characters: use at most {MAX_REASON:,}"
        )
    return text


Reason: TypeAlias = Annotated[
    str, typer.Option(metavar="TEXT", help="Why; stored with it.", callback=_as_reason)
]


@dataclass(frozen=True, kw_only=True)
class Logging:
    """The options of every command."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(
            envvar="PILLARBOX_LOG_LEVEL",
            help="How much to log to standard error. Debug is for pillarbox alone: "
            "libraries log payloads at that level.",
            rich_help_panel=LOGGING,
        ),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(
            envvar="PILLARBOX_LOG_FORMAT",
            help="One line of text, or one JSON object, for each record.",
            rich_help_panel=LOGGING,
        ),
    ] = "text"

    def set_up(self) -> None:
        """Log to standard error."""
        level = self.log_level
        pid = "[%(process)d] " if CHILD_VARIABLE in os.environ else ""
        handler = StandardErrorHandler()
        handler.setFormatter(
            _json_formatter(pid)
            if self.log_format == "json"
            else PrintableFormatter(f"%(asctime)s %(levelname)s {pid}%(message)s")
        )
        handler.addFilter(TraceContext())
        if level == "debug":
            # At DEBUG, the brokers' clients log whole requests, including payloads.
            logging.getLogger("pillarbox").setLevel(logging.DEBUG)
            level = "info"
        logging.basicConfig(level=level.upper(), handlers=[handler])
        # At INFO, Alembic logs each plug-in that it sets up.
        logging.getLogger("alembic.runtime.plugins").setLevel(logging.WARNING)


class Duration(timedelta):
    """A duration that prints the way it is typed."""

    @classmethod
    def of(cls, duration: timedelta) -> Self:
        """Create a duration from a timedelta."""
        return cls(seconds=duration.total_seconds())

    @override
    def __str__(self) -> str:
        """Return it in the form that `read_duration` reads."""
        return exact_duration(self)


def duration_option(*names: str, **settings: Any) -> Any:
    """Create a `typer.Option` that takes a duration; its default is a `Duration`."""
    given = {"parser": _parse_duration, "metavar": "DURATION", **settings}
    return typer.Option(*names, **given)


def moment_option(help: str) -> Any:
    """Create an option that takes a moment, or how long ago it was."""
    return typer.Option(
        parser=_parse_moment,
        metavar="MOMENT",
        help=f"{help}: a moment with its time zone, such as 2026-01-31T14:00Z, or how "
        "long ago: 90s, 6h, 7d.",
    )


def _parse_duration(value: str | timedelta) -> timedelta:
    if isinstance(value, timedelta):
        return value
    return cast("timedelta", _parsed(read_duration, value))


def _parse_moment(value: str) -> datetime:
    return cast("datetime", _parsed(read_moment, value))


Since: TypeAlias = Annotated[datetime | None, moment_option("Then or later")]
Until: TypeAlias = Annotated[datetime | None, moment_option("Before")]
Rate: TypeAlias = Annotated[
    float | None,
    typer.Option(
        parser=lambda value: _parsed(read_rate, value),
        metavar="N/s",
        help="Maximum rate: 10/s, 90/m or 500/h.",
    ),
]


def _parsed(read: Callable[[str, str], Any], value: str) -> Any:
    try:
        return read("", value)
    except ConfigError as error:
        raise typer.BadParameter(str(error).strip()) from None


def new_app(help: str | None = None) -> typer.Typer:
    """Create the app of an entry point of `pillarbox.commands`, with its commands."""
    return typer.Typer(
        help=help,
        add_completion=False,
        no_args_is_help=False,
        pretty_exceptions_enable=False,  # it would print local variables, with URLs
        rich_markup_mode="rich",
    )


def command(
    app: typer.Typer, name: str | None = None, *, epilog: str | None = None
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a function as a command with the options that all commands have.

    The function's docstring is the help, its result the exit status; None stands for 0.
    A parameter whose type is a dataclass stands for its fields: each is an option.
    """

    def register(function: Callable[..., int | None]) -> Callable[..., int | None]:
        own = [
            *inspect.signature(function, eval_str=True).parameters.values(),
            inspect.Parameter(
                "logging", inspect.Parameter.KEYWORD_ONLY, annotation=Logging
            ),
        ]
        groups: dict[str, Any] = {
            it.name: it.annotation for it in own if is_dataclass(it.annotation)
        }

        @wraps(function)
        def run(**given: Any) -> None:
            for name, group in groups.items():
                options = {it.name: given.pop(it.name) for it in fields(group)}
                given[name] = group(**options)
            given.pop("logging").set_up()
            try:
                status = function(**given)
            finally:
                for handler in logging.getLogger().handlers:
                    handler.flush()
            raise typer.Exit(status or 0)

        parameters = [each for it in own for each in _parameters_of(it)]
        documented: Any = run
        documented.__signature__ = inspect.Signature(parameters)
        documented.__annotations__ = {it.name: it.annotation for it in parameters}
        app.command(name, epilog=epilog)(documented)
        return function

    return register


def _parameters_of(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yield the parameter, or one for each option of the group that it stands for."""
    if not is_dataclass(parameter.annotation):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    for option in fields(parameter.annotation):
        yield inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=option.type,
            default=option.default,
        )


def _json_formatter(pid: str) -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter

    class EventFormatter(JsonFormatter):
        @override
        def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
            if STACKTRACE in log_data.get("fields", {}):
                log_data["message"] = log_data["message"].partition("\n")[0]
            return log_data

    return EventFormatter(
        f"%(levelname)s %(name)s {pid}%(message)s",
        rename_fields={
            "levelname": "level",
            "name": "logger",
            "process": "pid",
            "values": "fields",
        },
        timestamp="time",  # in UTC, in ISO 8601 format
        json_default=lambda it: (
            it.isoformat("T", "milliseconds")
            if isinstance(it, datetime)
            else to_json(it)
        ),
    )


def url_of(value: str | None, option: str, variable: str) -> str:
    """Return a URL from its option, its variable, or the file that `…_FILE` names.

    Raises:
        ConfigError: there is none, or the file can't be read.
    """
    url = value or os.environ.get(variable)
    if not url and (path := os.environ.get(f"{variable}_FILE")):
        url = FileUrl.read(f"{variable}_FILE", path)
    if not url:
        raise ConfigError(
            f"no {option} given: use --{option} URL, set {variable}, or let "
            f"{variable}_FILE name a file that holds the URL"
        )
    return url


def database_url(value: str | None) -> str:
    """Return a URL as `url_of`, for a command that takes one database.

    Raises:
        ConfigError: there is none, or more than one.
    """
    url = url_of(value, "database", DATABASE_VARIABLE)
    if _SECOND_URL.search(url):
        raise ConfigError(
            f"{DATABASE_VARIABLE} names several databases, and this command takes one: "
            "use --database URL"
        )
    return url


def database_urls(given: Sequence[str] | None) -> Sequence[str]:
    """Return the URLs of a command that takes several databases.

    Raises:
        ConfigError, PrerequisiteError: as for `url_of`.
    """
    name = f"{DATABASE_VARIABLE}_FILE"
    paths = os.environ.get(name, "").split()
    return given or [FileUrl.read(name, it) for it in paths] or [database_url(None)]


broker_url: Final = partial(url_of, option="broker", variable=BROKER_VARIABLE)
"""As `url_of`, for the broker."""


def broker_url_if_given(value: str | None) -> str | None:
    """Return the URL of the broker; None if there is none."""
    names = (BROKER_VARIABLE, f"{BROKER_VARIABLE}_FILE")
    return broker_url(value) if value or any(map(os.environ.get, names)) else None


@contextmanager
def opened(
    database: str | None, command: str, **options: Any
) -> Iterator["AdministrationConnection"]:
    """Open the database for one command, whose moments are in UTC.

    Args:
        options: as for `administration`.

    Raises:
        ConfigError, OutboxError: as for `url_of` and `administration`.
    """
    from pillarbox.outbox.administration.connection import administration

    name = f"pillarbox {command}"
    with administration(
        database_url(database), application_name=name, **options
    ) as connection:
        connection.execute("SET timezone = 'UTC'")
        yield connection


@contextmanager
def opened_all(
    databases: Sequence[str] | None,
    command: str,
    *,
    away: list[DatabaseUnavailableError] | None = None,
    **options: Any,
) -> Iterator[Mapping[str, "AdministrationConnection"]]:
    """Open databases as `opened` does, each with the shortest name that only it has.

    Args:
        away: takes the errors of unreachable databases, which are then left out, unless
            all are unreachable.

    Raises:
        ConfigError, OutboxError: as for `database_urls` and `opened`.
    """
    from pillarbox.outbox.administration.connection import address_of

    with ExitStack() as stack:
        connections: dict[str, AdministrationConnection] = {}
        errors: list[DatabaseUnavailableError] = []
        for url in database_urls(databases):
            try:
                connection = stack.enter_context(opened(url, command, **options))
            except DatabaseUnavailableError as error:
                errors.append(error)
            else:
                connections[address_of(connection)] = connection
        if errors and (away is None or not connections):
            raise errors[0]
        if away is not None:
            away += errors
        names = [it.info.dbname for it in connections.values()]
        yield {
            name if names.count(name) == 1 else address: connection
            for name, (address, connection) in zip(
                names, connections.items(), strict=True
            )
        }
