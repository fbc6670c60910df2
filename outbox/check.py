"""What a check of the doctor is, and what it finds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from outbox.administration import AdministrationConnection


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Messages are refused, lost sight of or will be, or the upkeep does not run."""
    WARNING = "warning"
    """It works, and should be looked at."""
    UNKNOWN = "unknown"
    """This role may not look; the remedy says which may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong, and what to paste to mend it.

    Attributes:
        check: the name of the check that found it.
        remedy: a command, or SQL.
    """

    check: str
    severity: Severity
    finding: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What this installation calls its roles and pg_partman's schema."""

    owner: str
    partman: str | None

    def role(self, name: str) -> str:
        """Give the role `maintainer`, `relay`, … beside the owner."""
        return f"{self.owner.removesuffix('_owner')}_{name}"


Check: TypeAlias = Callable[[AdministrationConnection, Names], Iterator[Finding]]
