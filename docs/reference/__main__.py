"""Write the pages of the reference, and the Grafana board."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
from rich.text import Text
from typer.main import get_command

from docs.reference import api, board, events, metrics, sql
from pillarbox.outbox.administration.migrate import migrate
from pillarbox.outbox.brokers.options import BrokerOptions, Option, brokers, declared
from pillarbox.outbox.cli.command import LOGGING
from pillarbox.outbox.cli.main import CLOSED_PIPE, INTERRUPTED, app
from pillarbox.outbox.testing.postgres import postgres_server

PAGE: Final = Path(__file__).parent / "commands.md"
BROKERS_PAGE: Final = Path(__file__).parent / "brokers.md"

_INTRODUCTION: Final = f"""\
# Commands

<!-- Written by `make reference` from the code. -->

`pillarbox COMMAND --help` shows the same. Each option has an environment variable; an
option on the command line wins over its variable. The value of a flag's variable is
`true`. Durations are written as `90s`, `15m`, `6h`, `7d`, `2w` or `1h30m`.

A URL with a password doesn't belong on a command line, where other users see it. Put it
into the variable, or into a file that `PILLARBOX_DATABASE_URL_FILE` or
`PILLARBOX_BROKER_URL_FILE` names, such as a mounted secret.

## Exit status

| status | |
|---|---|
| 0 | done, or drained after SIGTERM or SIGINT |
| 2 | the command could not run; standard error gives the reason |
| {INTERRUPTED} | interrupted with Ctrl-C |
| {CLOSED_PIPE} | the reader of its output closed the pipe |

If a command has other exit statuses, its section lists them.

## Options of every command

"""
_BROKERS: Final = """\
# Options of broker URLs

<!-- Written by `make reference` from the code. -->

One URL serves both sides: relay and consumer
each use their own options.
"""
_OPTIONS: Final = "| option | side | default | |\n|---|---|---|---|\n"
_COLUMNS: Final = "| option | variable | default | |\n|---|---|---|---|\n"


def page() -> str:
    """Return the whole page."""
    commands = list(_commands(get_command(app), ("pillarbox",)))
    # Taken from the first command, since all commands have them.
    logging = [it for it in commands[0][1].params if _panel_of(it) == LOGGING]
    parts = [_INTRODUCTION + _COLUMNS + "".join(_row(it, ()) for it in logging)]
    parts += [_section(words, command) for words, command in commands]
    return "\n".join(parts)


def brokers_page() -> str:
    """Return the page with the options of each broker's URL."""
    parts = [
        f"## {name}\n\n[What it promises](../brokers/{name}.md).\n\n{_options(kind)}"
        for name, kind in brokers().items()
        if any(declared(kind))
    ]
    return "\n".join([_BROKERS, *parts])


def _options(kind: type[BrokerOptions]) -> str:
    rows = [
        _line(f"`{name}`", it.side, _shown(getattr(kind, name), it), it.help)
        for name, it in declared(kind)
    ]
    names = ", ".join(f"`{name}`" for name in kind.client)
    of_client = f"\nOf the client library: {names}.\n" if names else ""
    return (
        f"| option | side | default | |\n|---|---|---|---|\n{''.join(rows)}{of_client}"
    )


def _shown(default: Any, option: Option) -> str:
    if option.default is not None:
        return option.default
    if default is None:
        return ""
    if type(default) is int:
        mebibytes, rest = divmod(default, 1024 * 1024)
        return f"{mebibytes} MiB" if mebibytes and not rest else f"{default:,}"
    return f"`{option.form.write(default)}`"


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
    else:
        for name in inner:
            yield from _commands(inner[name], (*words, name))


def _section(words: tuple[str, ...], command: Any) -> str:
    arguments = [it for it in command.params if it.param_type_name == "argument"]
    options = [it for it in command.params if it.param_type_name == "option"]
    usage = " ".join([*words, "[OPTIONS]", *map(_usage_of, arguments)])
    parts = [f"## `{' '.join(words)}`\n", f"{_plain(command.help)}\n", f"    {usage}\n"]
    if arguments:
        rows = (
            _line(f"`{_cell(_usage_of(it))}`", _default_of(it), _help_of(it))
            for it in arguments
        )
        parts.append("| argument | default | |\n|---|---|---|\n" + "".join(rows))
    rows = (_row(it, words) for it in options if _panel_of(it) != LOGGING)
    parts.append(_COLUMNS + "".join(rows))
    if command.epilog:
        parts.append(f"{_plain(command.epilog)}\n")
    return "\n".join(parts)


def _row(option: Any, words: tuple[str, ...]) -> str:
    own = "_".join([*words, option.name]).replace("-", "_").upper()
    name = f"{option.opts[0]} {_value_of(option)}".rstrip()
    variable = option.envvar or own
    shown = (f"`{_cell(name)}`", f"`{variable}`", _default_of(option), _help_of(option))
    return _line(*shown)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def _value_of(option: Any) -> str:
    if option.is_flag:
        return ""
    choices = getattr(option.type, "choices", None)
    return option.metavar or "|".join(choices or [option.type.name.upper()])


def _usage_of(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _default_of(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if not parameter.default or not parameter.show_default:
        return "required" if parameter.required else ""
    return f"`{parameter.default}`"


def _help_of(parameter: Any) -> str:
    choices = getattr(parameter.type, "choices", None)
    text = _plain(parameter.help)
    if parameter.param_type_name == "argument":
        if choices:
            text += f" One of {', '.join(f'`{it}`' for it in choices)}."
        if parameter.envvar:
            text += f" Its variable is `{parameter.envvar}`."
    return _cell(text)


def _panel_of(parameter: Any) -> str | None:
    panel: str | None = parameter.rich_help_panel
    return panel


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _plain(text: str | None) -> str:
    plain = " ".join(Text.from_markup(text or "").plain.split())
    return re.sub(r"(?<!\S)(--[a-z][a-z-]+|[A-Z]+_[A-Z_]+)", r"`\1`", plain)


if __name__ == "__main__":
    PAGE.write_text(page())
    BROKERS_PAGE.write_text(brokers_page())
    api.PAGE.write_text(api.page())
    events.PAGE.write_text(events.page())
    metrics.PAGE.write_text(metrics.page())
    board.PAGE.write_text(board.page())
    with postgres_server(durable=False) as server:
        migrate(server.url)
        with psycopg.connect(server.url) as connection:
            sql.PAGE.write_text(sql.page(connection))
