"""The settings of a process that reads the outbox."""

from dataclasses import dataclass
from datetime import timedelta

from pillarbox.outbox.duration import exact_duration
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.payload.payload_codec import PayloadCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingConfig:
    """The settings of a process that reads the outbox; the defaults suit most uses.

    Attributes:
        batch_size: maximum number of messages in one claim.
        max_batch_bytes: maximum size of one claim. Headers count eight times, since
            they take that much memory. A single message is always claimed.
        max_payload_bytes: a row with a larger payload isn't loaded.
        concurrency: number of batches in flight at once, from different lanes.
        lease: how long a process that hangs keeps its lanes.
        poll_interval: how often an idle process looks for messages without being woken.
        sweep_interval: how often it looks for rows that committed late.
        drain: how long a stopping process waits for batches in flight.
        codec: decodes payloads. None: they stay as stored.
    """

    batch_size: int = 500
    max_batch_bytes: int = 8 * 1024 * 1024
    max_payload_bytes: int = 8 * 1024 * 1024
    concurrency: int = 3
    lease: timedelta = timedelta(seconds=10)
    poll_interval: timedelta = timedelta(seconds=1)
    sweep_interval: timedelta = timedelta(seconds=5)
    drain: timedelta = timedelta(seconds=20)
    codec: PayloadCodec | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        self.check_counts(
            "batch_size", "max_batch_bytes", "max_payload_bytes", "concurrency"
        )
        self.check_times("poll_interval", "sweep_interval", "drain")

    def check_counts(self, *names: str) -> None:
        """Refuse values below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")

    def check_times(self, *names: str) -> None:
        """Refuse times that aren't above 0."""
        for name in names:
            if getattr(self, name) <= timedelta(0):
                given = exact_duration(getattr(self, name))
                raise ConfigError(f"{name}={given}: must be above 0s")
