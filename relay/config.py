"""The settings of a relay."""

from dataclasses import dataclass, field
from datetime import timedelta

from typing_extensions import override

from pillarbox.outbox.log.config import ReadingConfig
from pillarbox.outbox.retry import RetryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig(ReadingConfig):
    """The settings of a relay; the defaults suit most uses.

    Attributes:
        batch_size: maximum number of messages in one claim and one publish.
        max_batch_bytes: maximum size of one claim. Headers count eight times, since
            they take that much memory. A single message is always claimed.
        max_payload_bytes: a row with a larger payload goes to the dead letters without
            being loaded.
        concurrency: number of batches in flight at once, from different lanes.
        lease: how long a relay that hangs keeps its lanes.
        poll_interval: how often an idle relay looks for messages without being woken.
        sweep_interval: how often a relay looks for rows that committed late.
        broker_check_interval: how often an idle relay checks that the broker responds,
            if the publisher supports that.
        publish_timeout: how long one publish may take before the broker is considered
            unavailable.
        drain: how long a stopping relay waits for batches in flight.
        strict_order: publish one message of a key at a time, for brokers that can
            refuse one message and accept the next.
        retry: backoff and maximum attempts for a refused message.
        codec: decodes payloads before they are published. A message that it can't
            decode becomes a dead letter, as stored. None: the broker gets the payload
            as stored.
    """

    broker_check_interval: timedelta = timedelta(seconds=10)
    publish_timeout: timedelta = timedelta(seconds=30)
    strict_order: bool = False
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def memory_bytes(self) -> int:
        """Approximate upper bound of a relay's memory, whatever the rows contain.

        A batch is in memory up to five times, from libpq's buffer to the publisher's.
        """
        largest = max(self.max_batch_bytes, self.max_payload_bytes)
        return 64 * 1024 * 1024 + self.concurrency * 5 * largest

    @override
    def __post_init__(self) -> None:
        """Check the values."""
        ReadingConfig.__post_init__(self)
        self.check_times("broker_check_interval", "publish_timeout")
