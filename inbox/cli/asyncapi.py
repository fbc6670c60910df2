"""`pillarbox asyncapi`: describe the messages of an application."""

import sys
from json import dumps, loads
from pathlib import Path
from typing import Annotated

import typer

from inbox.consuming.load import load_consumer
from outbox.cli.command import FAILED, command, new_app
from outbox.cli.output import write_line
from outbox.errors import ConfigError, one_line
from outbox.payload.asyncapi import compare, document

app = new_app()


@command(app, "asyncapi")
def _asyncapi(
    consumer: Annotated[
        str,
        typer.Argument(metavar="MODULE:NAME", help="The consumer, as for consume."),
    ],
    *,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FILE",
            help="An earlier document. Fail if a consumer that was written for it "
            "would break.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Describe an application's messages as AsyncAPI 3, or compare with before.

    Prints the document as JSON. With --against, prints what breaks consumers: a field
    that was removed, renamed or became required, or a type that became narrower.
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
            f"--against {against}: can't be read: {one_line(error)}"
        ) from error
    problems = compare(old, new)
    for problem in problems:
        write_line(problem)
    return FAILED if problems else 0
