"""The process that moves committed messages to the broker.

Read `relay` first: it starts the parts and drains them. Then one module for each
step of a message's life: `claim`, `publish`, `settle`; `wakeup` says when to look,
`lanes` which lanes, `tend` does what comes round by the clock. `publisher` is the
contract for brokers, `publishers/` has ours.
"""

from relay.config import RelayConfig
from relay.publisher import Acked, Confirmation, Nacked, Publisher
from relay.relay import Relay

__all__ = ["Acked", "Confirmation", "Nacked", "Publisher", "Relay", "RelayConfig"]
