"""Publish what committed to the broker.

Read `relay` first: it starts the parts and drains them. `worker` takes batch after
batch through `claim`, `publish` and `settle`; `lanes/` knows what may be claimed,
`wakeup` when to look, `sweep` what comes round by the clock. `publisher` is the
contract for brokers, `publishers/` has ours.
"""

from relay.config import RelayConfig
from relay.publisher import Acked, Confirmation, Nacked, Publisher
from relay.relay import Relay

__all__ = ["Acked", "Confirmation", "Nacked", "Publisher", "Relay", "RelayConfig"]
