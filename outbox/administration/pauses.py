"""Pauses: no handler of a consumer, or of a topic, begins until somebody resumes.

`outbox.pause()` and `outbox.resume()` in SQL record who did it and why, in
`outbox.operation`; consumers read it with each beat: see `inbox/consuming/pauses.py`.
"""

from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.readers import consumer_of
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.logs.printable import for_shell
from pillarbox.outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause that is in force.

    Attributes:
        consumer: the name of a consumer; None for all.
        topic: a topic, or a prefix followed by `*`; None for all.
    """

    consumer: str | None
    topic: str | None
    reason: str
    paused_by: str
    paused_at: datetime

    @property
    def what(self) -> str:
        """A description of the paused consumer or topic."""
        return _words(self.consumer, self.topic)

    def has(self, topic: str) -> bool:
        """Return whether it concerns a topic."""
        it = self.topic or "*"
        return topic == it or (it.endswith("*") and topic.startswith(it[:-1]))

    @property
    def remedy(self) -> str:
        """The command that ends it."""
        options = (("--consumer", self.consumer), ("--topic", self.topic))
        given = [f" {name} {for_shell(it)}" for name, it in options if it is not None]
        return "pillarbox resume" + "".join(given)


def list_pauses(connection: AdministrationConnection) -> tuple[Pause, ...]:
    """Return the pauses in force, the oldest first."""
    with connection.cursor(row_factory=class_row(Pause)) as cursor:
        return tuple(cursor.execute(load("outbox", "list_pauses")))


def change_pause(
    connection: AdministrationConnection,
    kind: str,
    consumer: str | None,
    topic: str | None,
    reason: str,
    person: str | None = None,
) -> str:
    """Pause or resume (the kind), and return what was done, in words.

    Args:
        person: who does it; None: the login.

    Raises:
        ConfigError: neither consumer nor topic is given, or no reason for a pause; the
            consumer is a queue of one; or it is paused already, or not paused.
    """
    what = _words(consumer, topic)
    if not (consumer or topic):
        raise ConfigError(f"nothing to {kind}: name a consumer, a topic, or both")
    if consumer == "":
        raise ConfigError("consumer '': is empty; name one, or omit it for all")
    if kind == "pause" and consumer and (name := consumer_of(consumer)) != consumer:
        raise ConfigError(
            f"consumer {consumer}: is a queue; pause the consumer {name}, or its topics"
        )
    if topic is not None and (not topic or "*" in topic[:-1]):
        raise ConfigError(
            f"topic {for_shell(topic)}: write a topic, or a prefix followed by one *"
        )
    if kind == "pause" and not reason:
        raise ConfigError("the reason is empty: state why; status shows it")
    values = {"consumer": consumer, "topic": topic, "reason": reason, "person": person}
    statement = load("outbox", "change_pause")
    (row,) = connection.execute(statement, {"kind": kind, **values}).fetchall()
    if row == (True,):
        return f"{what}: {kind}d"
    is_so = "is paused already" if kind == "pause" else "is not paused"
    raise ConfigError(f"{what} {is_so}; pillarbox status lists the pauses")


def _words(consumer: str | None, topic: str | None) -> str:
    of_topic = None if topic is None else f"topic {topic}"
    if consumer is None:
        return f"{of_topic} of all consumers"
    return " of ".join(filter(None, (of_topic, f"consumer {consumer}")))
