"""The interface of the checks of `pillarbox doctor`, and their findings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final, TypeAlias

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.names import Names
from pillarbox.outbox.logs.printable import for_shell


class Severity(StrEnum):
    """How serious a finding is."""

    ERROR = "error"
    """Messages wait, fail, or are or will be rejected, or the upkeep doesn't run."""
    WARNING = "warning"
    """Everything works, but this needs attention."""
    HINT = "hint"
    """Not a fault: a default that could be stricter."""
    UNKNOWN = "unknown"
    """This role lacks the privilege to check it; the remedy names one that has it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem, and what to paste to fix it.

    Attributes:
        remedy: SQL or a command, with a comment where it needs one; if neither
            helps, what to do instead.
        check: the name of the check that found it.
    """

    severity: Severity
    finding: str
    remedy: str
    check: str = ""


error: Final = partial(Finding, Severity.ERROR)
warning: Final = partial(Finding, Severity.WARNING)
hint: Final = partial(Finding, Severity.HINT)
unknown: Final = partial(Finding, Severity.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The contents of the examined database.

    Attributes:
        owner: the role that owns the tables.
        has_cron: whether pg_cron is installed in this database.
    """

    owner: str
    names: Names
    has_cron: bool

    @property
    def migrate(self) -> str:
        """The command that migrates this installation and no other."""
        words = ["pillarbox migrate"]
        if self.names.role_prefix != Names().role_prefix:
            words.append(f"--role-prefix {for_shell(self.names.role_prefix)}")
        if self.names.partman_schema is None:
            words.append("--without-partman")
        elif self.names.partman_schema != Names().partman_schema:
            words += ["--partman-schema", for_shell(self.names.partman_schema)]
        if not self.has_cron:
            words.append("--without-cron")
        return " ".join(words)

    def role(self, name: str) -> str:
        """Return the name of a role that isn't the owner, such as `relay`."""
        return self.names.role(name)


Check: TypeAlias = Callable[[AdministrationConnection, Installation], Iterator[Finding]]


# The worst first. What could not be examined may be worse than a warning.
_STATUS: Final = {Severity.ERROR: 3, Severity.UNKNOWN: 4, Severity.WARNING: 1}


def status_of(findings: Sequence[Finding]) -> int:
    """Return the exit status for findings."""
    severities = {finding.severity for finding in findings}
    return next((code for each, code in _STATUS.items() if each in severities), 0)
