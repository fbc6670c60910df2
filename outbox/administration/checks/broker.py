"""The broker: where the relays of this database publish."""

from collections.abc import Iterator
from datetime import datetime

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load


def read_broker(
    connection: AdministrationConnection,
) -> list[tuple[str, datetime]]:
    """Return where relays publish and since when; empty before the first relay."""
    rows = connection.execute(load("outbox", "read_broker"))
    return [(identity, since) for identity, since in rows]


def check_broker(
    connection: AdministrationConnection, _here: Installation
) -> Iterator[Finding]:
    """Name the broker, without which a relay with another one is a riddle."""
    for broker, since in read_broker(connection):
        yield Finding(
            check="broker",
            severity=Severity.HINT,
            finding=f"relays publish to {broker} since {since:%F %R}; a relay with"
            " another broker does nothing",
            remedy="pillarbox relay --switch-broker  # once, to publish to another one",
        )
