"""Helpers for tests: added messages, events to wait for, and real servers.

`added` returns the messages that were added to a session. Of the modules, `events`
provides an observer that lets a test wait for events, `postgres` and its siblings start
servers that run during a `with` block, and `plugin` provides fixtures.
"""

from pillarbox.outbox.testing.added import added

__all__ = ["added"]
