"""Checks that are one statement, which returns findings."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import LiteralString

from outbox.administration.check import Check, Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.administration.names import ROLES


def by_statement(statement: LiteralString) -> Check:
    """Return a check whose findings a statement gives: severity, finding, remedy."""

    def check(
        connection: AdministrationConnection, here: Installation
    ) -> Iterator[Finding]:
        parameters = {
            "version": _newest_version(),
            "owner": here.owner,
            "partman": here.names.partman_schema,
            "migrate": here.migrate,
            "roles": [here.role(role) for role in ROLES],
            **{f"{role}_role": here.role(role) for role in ROLES},
        }
        for severity, finding, remedy in connection.execute(statement, parameters):
            yield Finding(Severity(severity), finding, remedy)

    return check


@cache
def _newest_version() -> str:
    """Return the newest version of this program's migrations."""
    names = (f.name for f in files("outbox.migrations").joinpath("versions").iterdir())
    return max(match[0] for name in names if (match := re.match(r"\d{4}", name)))
