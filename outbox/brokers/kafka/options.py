"""The options of a `kafka://` URL."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from typing_extensions import override

from pillarbox.outbox.brokers.options import BrokerOptions, Form, option, payload_limit


@dataclass(frozen=True, kw_only=True)
class KafkaOptions(BrokerOptions):
    """Options of publisher and source; librdkafka reads and checks the others."""

    schemes: ClassVar[tuple[str, ...]] = ("kafka",)
    closed: ClassVar[bool] = False
    ports: ClassVar[Mapping[str, int]] = {"kafka": 9092}
    destination: ClassVar[tuple[str, ...] | None] = ()

    max_payload_bytes: int | None = payload_limit(shown="`message.max.bytes`")
    timeout: timedelta = option(
        Form.duration(),
        timedelta(seconds=10),
        side="relay",
        help="how long reports of a batch may take before Kafka counts as unavailable",
    )
    handover: timedelta = option(
        Form.duration(),
        timedelta(seconds=10),
        side="consumer",
        help="how long the next owner of a Kafka partition waits for the messages that "
        "this replica is handling",
    )

    @classmethod
    @override
    def place(cls, path: str, query: str) -> str:
        """Return nothing: librdkafka's options don't change where messages go."""
        return ""
