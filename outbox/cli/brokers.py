"""`pillarbox brokers`: which brokers are installed, and the options of their URLs."""

from typing import Annotated

import typer

from outbox.brokers.options import Described, brokers, options_of
from outbox.cli.command import Json, command, new_app
from outbox.cli.output import write_json, write_line, write_table

app = new_app()


@command(
    app,
    "brokers",
    epilog="One URL serves both sides: relay and consumer each use their own options. "
    "The relay takes the URL as --broker, a Consumer as its first argument.",
)
def _brokers(
    broker: Annotated[
        str | None,
        typer.Argument(
            metavar="BROKER",
            help="Its name, or a scheme of its URLs: list the options of these URLs.",
            show_default=False,
        ),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """List the installed brokers, or the options of a broker's URL."""
    if broker is None:
        kinds = {
            name: [f"{scheme}://" for scheme in kind.schemes]
            for name, kind in brokers().items()
        }
        if json:
            write_json([{"broker": name, "urls": urls} for name, urls in kinds.items()])
        else:
            write_table(
                ("broker", "urls"),
                [(name, ", ".join(urls)) for name, urls in kinds.items()],
            )
        return
    kind = options_of(broker.partition("://")[0])
    options = [
        {name: text.replace("`", "") for name, text in row._asdict().items()}
        for row in kind.table()
    ]
    if json:
        write_json(options)
    elif options:
        rows = [[text or None for text in row.values()] for row in options]
        write_table(("option", *Described._fields[1:]), rows)
        if kind.client:
            write_line(f"and of the client library: {', '.join(kind.client)}")
    else:
        write_line("its URLs have no options")
