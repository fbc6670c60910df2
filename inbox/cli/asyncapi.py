"""`pillarbox asyncapi`: describe the messages of an application."""

import sys
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Final

import typer

from pillarbox.inbox.consuming.load import load_consumer
from pillarbox.outbox.cli.command import FAILED, command, new_app
from pillarbox.outbox.cli.output import write_line
from pillarbox.outbox.errors import ConfigError, one_line
from pillarbox.outbox.payload.asyncapi import compare, document

INCOMPATIBLE: Final = 1
"""The exit status with `--against` when there is an incompatible change."""

app = new_app()


@command(
    app,
    "asyncapi",
    epilog="Exit status: 0 printed, or compatible; "
    f"{INCOMPATIBLE} with --against, if a change is incompatible; "
    f"{FAILED} it could not run.",
)
def _asyncapi(
    consumer: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="The consumer, as for consume.")
    ],
    *,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="An earlier document. Fail if a change since then is incompatible.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Describe an application's messages as AsyncAPI 3, or find incompatible changes.

    Prints the document as JSON. With --against, prints the incompatible changes: any
    but a new message, a new optional field, and new titles, descriptions and defaults.
    """
    found = load_consumer(consumer)
    new = document(found.name, "1.0.0", found.messages())
    if against is None:
        sys.stdout.write(f"{dumps(new, indent=2)}\n")
        return 0
    try:
        old = loads(against.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--against {against}: can't be read: {one_line(error, with_text=True)}"
        ) from error
    if not isinstance(old, dict) or "asyncapi" not in old:
        raise ConfigError(f"--against {against}: isn't an AsyncAPI document")
    problems = compare(old, new)
    for problem in problems:
        write_line(problem)
    return INCOMPATIBLE if problems else 0
