"""What a check of the doctor is, and what it finds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from outbox.administration.connection import AdministrationConnection


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Messages are refused, lost sight of or will be, or the upkeep does not run."""
    WARNING = "warning"
    """It works, and should be looked at."""
    HINT = "hint"
    """As PostgreSQL or we make it; a stricter choice would be safer. No fault."""
    UNKNOWN = "unknown"
    """This role may not look; the remedy says which may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong, and what to paste to mend it.

    Attributes:
        check: the name of the check that found it.
        remedy: SQL, or a command, each with a comment if it needs one; where neither
            can help, what to do.
    """

    check: str
    severity: Severity
    finding: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What this installation calls its roles and pg_partman's schema.

    Attributes:
        partman: None if pg_partman isn't installed.
        has_cron: whether pg_cron is installed in this database.
    """

    owner: str
    partman: str | None
    has_cron: bool

    @property
    def prefix(self) -> str:
        """Give what stands before the names of the roles."""
        return self.owner.removesuffix("_owner")

    @property
    def migrate(self) -> str:
        """Give the command that migrates this installation and no other."""
        words = ["outbox migrate"]
        if self.prefix != "pillarbox":
            words.append(f"--role-prefix {self.prefix}")
        if self.partman not in {None, "partman"}:
            words.append(f"--partman-schema {self.partman}")
        if not self.has_cron:
            words.append("--without-cron")
        return " ".join(words)

    def role(self, name: str) -> str:
        """Give the role `maintainer`, `relay`, … beside the owner."""
        return f"{self.prefix}_{name}"

    def fill(self, name: str) -> str:
        """Replace `{partman}` by the quoted schema."""
        return name.replace("{partman}", f'"{self.partman}"')


Check: TypeAlias = Callable[[AdministrationConnection, Names], Iterator[Finding]]
