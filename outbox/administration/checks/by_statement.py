"""Checks that are one statement, which returns findings."""

from collections.abc import Iterator
from typing import LiteralString

from outbox.administration.check import Check, Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.administration.names import ROLES

_READERS = ("maintainer", "relay", "consumer", "monitor", "web")


def by_statement(statement: LiteralString) -> Check:
    """Return a check whose findings a statement gives: severity, finding, remedy."""

    def check(
        connection: AdministrationConnection, here: Installation
    ) -> Iterator[Finding]:
        parameters = {
            "owner": here.owner,
            "partman": here.names.partman_schema,
            "migrate": here.migrate,
            "roles": [here.role(role) for role in ROLES],
            "readers": [here.role(role) for role in _READERS],
            **{f"{role}_role": here.role(role) for role in ROLES},
        }
        for severity, finding, remedy in connection.execute(statement, parameters):
            yield Finding(Severity(severity), finding, remedy)

    return check
