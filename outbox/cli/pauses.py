"""`pillarbox pause` and `pillarbox resume`: stop handling for a while."""

from typing import Annotated, Final, TypeAlias

import typer

from pillarbox.outbox.administration.pauses import change_pause
from pillarbox.outbox.cli.command import (
    Database,
    Reason,
    Topic,
    command,
    new_app,
    opened,
)
from pillarbox.outbox.cli.output import write_line

_RIGHTS: Final = "connect as a member of pillarbox_operator"

pause_app = new_app()
resume_app = new_app()

Consumer: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="A consumer's name.")
]


@command(pause_app)
def pause(
    consumer: Consumer = None,
    topic: Topic = None,
    reason: Reason = "",
    database: Database = None,
) -> None:
    """Pause a consumer, a topic of a consumer, or a topic of all consumers.

    Within 10 s, no replica starts a handler of it. Running handlers and jobs continue,
    and so do other topics. Use the database of the handlers.
    """
    with opened(database, "pause", rights=_RIGHTS) as connection:
        write_line(change_pause(connection, "pause", consumer, topic, reason))


@command(resume_app)
def resume(
    consumer: Consumer = None,
    topic: Topic = None,
    reason: Reason = "",
    database: Database = None,
) -> None:
    """End a pause that began with the same --consumer and --topic."""
    with opened(database, "resume", rights=_RIGHTS) as connection:
        write_line(change_pause(connection, "resume", consumer, topic, reason))
