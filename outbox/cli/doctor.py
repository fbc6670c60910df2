"""`pillarbox doctor`: what is wrong, and what to run to fix it."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from outbox.administration.check import Finding, Severity
from outbox.administration.connection import administration
from outbox.administration.doctor import APPLICATION_NAME, check_pooler, examine
from outbox.cli.command import Database, Json, command, database_url, new_app
from outbox.cli.output import write_json
from outbox.logs.printable import printable

# The worst first. What could not be examined may be worse than a warning.
_STATUS: Final = {Severity.ERROR: 3, Severity.UNKNOWN: 4, Severity.WARNING: 1}

app = new_app()


@command(
    app,
    epilog="Exit status: 0 no findings but hints, 1 warnings, 3 errors, 4 no error, "
    "but not everything could be checked, 2 nothing could be checked.",
)
def doctor(*, database: Database = None, json: Json = False) -> int:
    """Check the schema, its upkeep and the server; name a remedy for each finding."""
    url = database_url(database)
    found = {"pooler": check_pooler(url)}
    if not found["pooler"]:
        with administration(url, application_name=APPLICATION_NAME) as connection:
            connection.execute("SET timezone = 'UTC'")
            found |= dict(examine(connection))
    findings = [finding for check in found.values() for finding in check]
    status = status_of(findings)
    if json:
        write_json(
            {
                "status": status,
                "checks": list(found),
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        for check, its_findings in found.items():
            sys.stdout.write(
                "".join(map(_paragraph, its_findings)) or f"ok       {check}\n"
            )
    return status


def status_of(findings: Sequence[Finding]) -> int:
    """Return the exit status for findings."""
    severities = {finding.severity for finding in findings}
    return next((code for each, code in _STATUS.items() if each in severities), 0)


def _paragraph(finding: Finding) -> str:
    return (
        f"{finding.severity:<8} {finding.check}: {printable(finding.finding)}\n"
        f"         {printable(finding.remedy)}\n"
    )
