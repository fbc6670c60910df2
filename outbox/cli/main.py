"""`pillarbox`: finds its commands by entry points and loads each when it is needed."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any, Final

import typer
import typer.core
from typing_extensions import override

from pillarbox.outbox.cli.command import FAILED
from pillarbox.outbox.errors import (
    ConfigError,
    DatabaseUnavailableError,
    OutboxError,
    one_line,
    traceback_of,
)
from pillarbox.outbox.logs.printable import printable
from pillarbox.outbox.observability.standard_error import write_error
from pillarbox.outbox.postgres.remedy import remedy_of
from pillarbox.outbox.url import without_secrets

GROUP: Final = "pillarbox.commands"
"""The entry points: a command's name, and its `typer.Typer`."""
INTERRUPTED: Final = 128 + signal.SIGINT
CLOSED_PIPE: Final = 128 + signal.SIGPIPE
"""The exit status if the reader of the output has exited, as in `yes | head -1`."""

# What --help prints of each command, so that it loads none of them.
_PANELS: Final = {
    "Getting started": {
        "demo": "Run a shop whose processes are killed and whose handlers fail; count "
        "everything.",
        "dev": "Run PostgreSQL, the page and your Consumer while you develop.",
    },
    "The database": {
        "migrate": "Create or update the schema.",
        "doctor": "Check the schema, its upkeep and the server; name a remedy for each "
        "finding.",
        "status": "Show whether all is well: lag, failures and processes of each "
        "database.",
        "partitions": "Show partitions: past, today, premade, and any that retention "
        "is holding.",
        "retention": "Show how long each table keeps its rows, or set it.",
        "maintain": "Create future partitions and drop expired ones, where pg_cron "
        "doesn't.",
    },
    "The relay": {
        "relay": "Publish committed messages until SIGTERM; then drain and exit.",
        "readers": "List, add and drop the readers of the outbox.",
    },
    "The consumer": {
        "consume": "Handle messages with your Consumer until SIGTERM; then drain and "
        "exit.",
        "pause": "Pause a consumer, a topic of a consumer, or a topic of all "
        "consumers.",
        "resume": "End a pause that began with the same --consumer and --topic.",
        "jobs": "List the jobs of long handlers.",
        "cancel": "Cancel a message's job, whether it is running or queued.",
    },
    "Repair": {
        "trace": "Show the life of a message, and the messages that it caused, as a "
        "tree.",
        "dead-letters": "List, show, retry, discard or export dead letters of both "
        "sides.",
        "blocked": "List refused messages that wait for a retry, and the keys that "
        "they block.",
        "scheduled": "List, cancel and move scheduled messages, until they are due.",
        "replay": "Publish or handle messages again, selected by topic, key and time.",
        "web": "Serve a web page that shows messages and failures, and retries dead "
        "letters.",
    },
    "Other commands": {
        "asyncapi": "Describe an application's messages as AsyncAPI 3, or find "
        "incompatible changes.",
    },
}
_LISTED: Final = {
    name: typer.core.TyperCommand(name, help=summary, rich_help_panel=panel)
    for panel, summaries in _PANELS.items()
    for name, summary in summaries.items()
}
# The base class of usage errors, which Typer doesn't export.
_UsageError: Final[Any] = typer.BadParameter.__base__


class _Commands(dict[str, Any]):
    """The commands by name; each is imported when it is looked up."""

    def __init__(self) -> None:
        found = {point.name: point for point in entry_points(group=GROUP)}
        order = [*_LISTED, *sorted(found.keys() - _LISTED.keys())]
        super().__init__({name: found[name] for name in order if name in found})

    @override
    def __getitem__(self, name: str) -> Any:
        point = super().__getitem__(name)
        if not isinstance(point, EntryPoint):
            return point
        command: Any = typer.main.get_command(_load(point))
        command.name = name
        command.rich_help_panel = "Other commands"
        self[name] = command
        return command


def _load(point: EntryPoint) -> typer.Typer:
    try:
        found = point.load()
    except ImportError as error:
        if "pq wrapper" in str(error):
            raise ConfigError(
                "psycopg finds no libpq: pip install 'pillarbox[binary]', or install "
                "PostgreSQL's client library"
            ) from error
        raise ConfigError(
            f"the command {point.name} can't be loaded from {point.value}: "
            f"{one_line(error, with_text=True)}"
        ) from error
    assert isinstance(found, typer.Typer)
    return found


class _LazyGroup(typer.core.TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help, without loading the commands."""
        return list(self.commands)

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return what the help lists: of our own commands, a summary."""
        if cmd_name not in self.commands:
            return None
        return _LISTED.get(cmd_name) or self.commands[cmd_name]

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that runs."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and self.commands[name], rest


app = typer.Typer(
    cls=_LazyGroup,
    context_settings={"auto_envvar_prefix": "PILLARBOX"},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"pillarbox {version('pillarbox')}\n")
        raise typer.Exit


@app.callback(
    epilog="Every option has an environment variable, which its help names. "
    "Durations are written as 90s, 15m, 6h, 7d, 2w or 1h30m."
)
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            allow_from_autoenv=False,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Transactional outbox and inbox on PostgreSQL."""
    del version  # read by the callback


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    For a known failure, print one line on standard error, and return `FAILED`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not sys.stdout.isatty():
        # Help that goes to a file must be wide enough for the names of the variables.
        os.environ.setdefault("TERMINAL_WIDTH", "120")
    try:
        status = _run(arguments or ["--help"])
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise the interpreter would try to write buffered output when it exits.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except Exception as error:  # noqa: BLE001 - the interpreter would wait for a reader
        write_error(traceback_of(error))
        return 1
    return status


def _run(arguments: list[str]) -> int:
    # When a pipe is closed, Typer itself ends the process, with a status that means
    # something else in `doctor`.
    try:
        status = typer.main.get_command(app).main(
            arguments, prog_name="pillarbox", standalone_mode=False
        )
    except OutboxError as error:
        text = " ".join(str(error).split())
        if isinstance(error, DatabaseUnavailableError):
            text += f"; {remedy_of(error)}"
        return _fail("pillarbox", text)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        path = "pillarbox" if context is None else context.command_path
        text = " ".join(error.format_message().split()).rstrip(".")
        # The invalid value may be a URL in the wrong place.
        return _fail(path, f"{without_secrets(text)}; see {path} --help")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        return end.code if isinstance(end.code, int) else FAILED
    return status if isinstance(status, int) else 0


def _fail(program: str, text: str) -> int:
    write_error(f"{program}: {printable(text)}\n")
    return FAILED
