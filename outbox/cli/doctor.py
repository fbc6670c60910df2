"""`outbox doctor`: what is wrong, and what to paste to mend it.

Exit status 0: all was looked at and nothing found but hints, 1: warnings, 3: errors, 4:
no error, but not all could be looked at, 2: it could not look at all.
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Final

from outbox.administration.check import Finding, Severity
from outbox.administration.connection import administration
from outbox.administration.doctor import APPLICATION_NAME, check_pooler, examine
from outbox.cli.command import DATABASE_VARIABLE, Subcommands, add_database, url_of
from outbox.cli.table import printable

# The worst first. What nobody looked at may be worse than a warning.
_STATUS: Final = {Severity.ERROR: 3, Severity.UNKNOWN: 4, Severity.WARNING: 1}


def add_to(subcommands: Subcommands) -> None:
    """Add the command to the parser."""
    parser = subcommands.add_parser(
        "doctor",
        help="check everything, with a remedy for each finding",
        epilog="exit status: 0 well, 1 warnings, 3 errors, 4 no error, but not all"
        " could be looked at, 2 could not look",
    )
    add_database(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)
    found = {"pooler": check_pooler(url)}
    if not found["pooler"]:
        with administration(url, application_name=APPLICATION_NAME) as connection:
            connection.execute("SET timezone = 'UTC'")
            found |= dict(examine(connection))
    findings = [finding for check in found.values() for finding in check]
    severities = {finding.severity for finding in findings}
    status = next((code for each, code in _STATUS.items() if each in severities), 0)
    if arguments.json:
        report = {
            "status": status,
            "checks": list(found),
            "findings": [asdict(finding) for finding in findings],
        }
        sys.stdout.write(f"{json.dumps(report, indent=2)}\n")
    else:
        for check, its_findings in found.items():
            sys.stdout.write(
                "".join(map(_paragraph, its_findings)) or f"ok       {check}\n"
            )
    return status


def _paragraph(finding: Finding) -> str:
    return (
        f"{finding.severity:<8} {finding.check}: {printable(finding.finding)}\n"
        f"         {printable(finding.remedy)}\n"
    )
