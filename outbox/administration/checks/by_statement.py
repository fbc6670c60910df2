"""Checks that are one statement, which returns findings."""

from collections.abc import Iterator
from typing import LiteralString

from pillarbox.outbox.administration.check import Check, Finding, Installation, Severity
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.names import ROLES
from pillarbox.outbox.postgres.schema_version import newest_version


def by_statement(statement: LiteralString) -> Check:
    """Return a check whose findings a statement gives: severity, finding, remedy."""

    def check(
        connection: AdministrationConnection, here: Installation
    ) -> Iterator[Finding]:
        parameters = {
            "version": newest_version(),
            "owner": here.owner,
            "partman": here.names.partman_schema,
            "migrate": here.migrate,
            "roles": [here.role(role) for role in ROLES],
            **{f"{role}_role": here.role(role) for role in ROLES},
        }
        for severity, finding, remedy in connection.execute(statement, parameters):
            yield Finding(Severity(severity), finding, remedy)

    return check
