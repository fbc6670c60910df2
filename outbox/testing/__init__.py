"""What tests need: a look at what was added, events to wait for, real servers.

`added` asks a session for its messages. `outbox.testing.events` has an observer that
a test can wait for, `outbox.testing.postgres` and `outbox.testing.redis` start servers
that live as long as a block, `outbox.testing.plugin` makes fixtures of them.
"""

from outbox.testing.added import added

__all__ = ["added"]
