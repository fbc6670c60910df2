"""`pillarbox doctor`: what is wrong, and what to run to fix it."""

from pillarbox.outbox.administration.check import status_of
from pillarbox.outbox.administration.doctor import check_pooler, examine
from pillarbox.outbox.cli.command import (
    Database,
    Json,
    command,
    database_url,
    new_app,
    opened,
)
from pillarbox.outbox.cli.output import lines_of, write_json, write_line

app = new_app()


@command(
    app,
    epilog="Exit status: 0 no findings but hints, 1 warnings, 3 errors, 4 no error, "
    "but not everything could be checked, 2 nothing could be checked.",
)
def doctor(*, database: Database = None, json: Json = False) -> int:
    """Check the schema, its upkeep and the server; name a remedy for each finding."""
    found = {"pooler": check_pooler(database_url(database))}
    if not found["pooler"]:
        with opened(database, "doctor", any_role=True) as connection:
            found |= dict(examine(connection))
    findings = [finding for check in found.values() for finding in check]
    status = status_of(findings)
    if json:
        write_json(
            {
                "status": status,
                "checks": list(found),
                "findings": findings,
            }
        )
    else:
        for check, its_findings in found.items():
            if not its_findings:
                write_line(f"ok       {check}")
            for finding in its_findings:
                write_line(*lines_of(finding))
    return status
