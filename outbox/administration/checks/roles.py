"""Roles: all there, and as the migrations make them."""

from collections.abc import Iterator

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.administration.names import ROLES
from outbox.postgres.sql_files import load


def check_roles(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find roles that are gone, or can't do their part."""
    for (role,) in connection.execute(
        load("outbox", "list_missing_roles"),
        {"roles": [here.role(name) for name in ROLES]},
    ):
        yield _found(Severity.ERROR, f"the role {role} is gone", here.migrate)
    detacher = here.role("detacher")
    for role, may_not_login, may_login, is_no_member in connection.execute(
        load("outbox", "judge_roles"),
        {
            "owner": here.owner,
            "maintainer": here.role("maintainer"),
            "detacher": detacher,
        },
    ):
        if may_not_login:
            yield _found(
                Severity.ERROR,
                f"{role} may not log in: pg_cron runs no jobs of such a role",
                f'ALTER ROLE "{role}" LOGIN;',
            )
        if may_login:
            yield _found(
                Severity.WARNING,
                f"{role} may log in: whoever does can change and drop everything",
                f'ALTER ROLE "{role}" NOLOGIN;',
            )
        if is_no_member:
            yield _found(
                Severity.ERROR,
                f"{detacher} has not the rights of {here.owner}: it can't detach",
                f'GRANT "{here.owner}" TO "{detacher}";',
            )


def _found(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="roles", severity=severity, finding=finding, remedy=remedy)
