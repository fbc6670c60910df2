"""Roles: all of them exist, as the migrations create them."""

from collections.abc import Iterator

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.administration.names import ROLES
from outbox.postgres.sql_files import load


def check_roles(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find roles that don't exist or can't do their work."""
    for (role,) in connection.execute(
        load("outbox", "list_missing_roles"),
        {"roles": [here.role(name) for name in ROLES]},
    ):
        yield _found(Severity.ERROR, f"the role {role} doesn't exist", here.migrate)
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
                f"{role} may not log in, but pg_cron only runs jobs of roles that may",
                f'ALTER ROLE "{role}" LOGIN;',
            )
        if may_login:
            yield _found(
                Severity.WARNING,
                f"{role} may log in, and could then change and drop everything",
                f'ALTER ROLE "{role}" NOLOGIN;',
            )
        if is_no_member:
            yield _found(
                Severity.ERROR,
                f"{detacher} lacks the privileges of {here.owner}: it can't detach"
                " partitions",
                f'GRANT "{here.owner}" TO "{detacher}";',
            )


def _found(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="roles", severity=severity, finding=finding, remedy=remedy)
