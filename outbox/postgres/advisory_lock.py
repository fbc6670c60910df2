"""pillarbox's advisory locks in PostgreSQL: each has a class and an object, both int4.

The migrations use the same numbers. One class belongs to the outbox's main reader and
to the doorbell; every other reader has a class of its own.
"""

from dataclasses import dataclass
from enum import IntEnum, unique
from hashlib import sha256
from typing import Final

from typing_extensions import override

LOCK_CLASS: Final = int.from_bytes(b"pill")

MAIN: Final = "main"
"""The reader of everything, which the first relay adds."""

CANCELS: Final = range(1024, 2048)
"""The lock objects of `outbox.cancel_lock()`, in the main reader's class."""

END_FOREIGN: Final = (
    "run SELECT pg_terminate_backend(PID) to end them; to keep others out, REVOKE"
    " CONNECT ON DATABASE … FROM PUBLIC and GRANT it to the roles that need it"
)
"""The remedy for other clients' sessions that hold pillarbox's locks."""


@unique
class Lock(IntEnum):
    """Lock objects above the lanes, which are 0 to 47."""

    OUTBOX_DOORBELL = 100
    MEMBER = 102
    MIGRATION = 103
    UPKEEP = 105
    OPERATION = 106


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A session that holds one of pillarbox's advisory locks.

    Attributes:
        client: the client's address; None if it is local or not visible.
    """

    pid: int
    role: str
    application: str
    client: str | None

    @override
    def __str__(self) -> str:
        """Describe the session so that an operator can find it."""
        return (
            f"pid {self.pid} (role {self.role}, application {self.application!r},"
            f" client {self.client or 'local or not visible'})"
        )


def reader_class(reader: str) -> int:
    """Return the lock class in which the processes of a reader share its lanes."""
    if reader == MAIN:
        return LOCK_CLASS
    digest = sha256(f"outbox:{reader}".encode()).digest()
    return int.from_bytes(digest[:4], signed=True)
