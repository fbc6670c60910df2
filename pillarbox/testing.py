"""Helpers for an application's tests: which messages it adds, and their outcomes.

    from pillarbox.testing import Databases, RecordedEvents, added, databases, drain

Each name is imported from its module when it is first used, so `added` needs neither
pytest nor a driver. The fixtures are in the plugin `pillarbox.outbox.testing.plugin`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pillarbox.inbox.testing.drain import DeadLettered, Drained, drain
    from pillarbox.outbox.testing.added import added
    from pillarbox.outbox.testing.databases import Databases, databases
    from pillarbox.outbox.testing.events import RecordedEvents

__all__ = [
    "Databases",
    "DeadLettered",
    "Drained",
    "RecordedEvents",
    "added",
    "databases",
    "drain",
]

_MODULES: Final = {
    "Databases": "pillarbox.outbox.testing.databases",
    "DeadLettered": "pillarbox.inbox.testing.drain",
    "Drained": "pillarbox.inbox.testing.drain",
    "RecordedEvents": "pillarbox.outbox.testing.events",
    "added": "pillarbox.outbox.testing.added",
    "databases": "pillarbox.outbox.testing.databases",
    "drain": "pillarbox.inbox.testing.drain",
}


def __getattr__(name: str) -> Any:
    """Import a helper when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
