"""The options of a `kafka://` URL."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from typing_extensions import override

from outbox.brokers.options import BrokerOptions, Described, Form, option


@dataclass(frozen=True, kw_only=True)
class KafkaOptions(BrokerOptions):
    """Options of publisher and source; librdkafka reads and checks the others."""

    schemes: ClassVar[tuple[str, ...]] = ("kafka",)
    closed: ClassVar[bool] = False
    ports: ClassVar[Mapping[str, int]] = {"kafka": 9092}
    destination: ClassVar[tuple[str, ...] | None] = ()
    client: ClassVar[tuple[Described, ...]] = (
        Described(
            "message.max.bytes",
            "relay",
            "1,048,588",
            "size limit of a record with key and headers; the brokers' default",
        ),
        Described(
            "linger.ms",
            "relay",
            "1",
            "how many milliseconds to wait for a fuller request",
        ),
        Described("compression.type", "relay", "`none`", "`lz4`, `zstd`, …"),
        Described(
            "allow.auto.create.topics",
            "both",
            "`true`",
            "works only if the brokers also allow it",
        ),
        Described(
            "security.protocol",
            "both",
            "`plaintext`",
            "`ssl`, `sasl_ssl`, `sasl_plaintext`",
        ),
        Described(
            "sasl.mechanism",
            "both",
            "",
            "`PLAIN`, `SCRAM-SHA-256`, `SCRAM-SHA-512`, `OAUTHBEARER`",
        ),
        Described("sasl.username", "both", "", "if it is not in front of the host"),
        Described("sasl.password", "both", "", "if it is not in front of the host"),
        Described("ssl.ca.location", "both", "the system's", "file or directory"),
        Described("ssl.certificate.location", "both", "", "file of our certificate"),
        Described("ssl.key.location", "both", "", "file of its key"),
        Described(
            "session.timeout.ms",
            "consumer",
            "45,000",
            "milliseconds after which other replicas get a dead one's Kafka partitions",
        ),
        Described(
            "partition.assignment.strategy",
            "consumer",
            "`cooperative-sticky`",
            "`range` and `roundrobin` are eager",
        ),
        Described(
            "auto.offset.reset", "consumer", "`earliest`", "where a new group begins"
        ),
        Described(
            "auto.commit.interval.ms",
            "consumer",
            "100",
            "milliseconds between commits of the offsets of settled messages",
        ),
    )

    max_payload_bytes: int | None = option(
        Form.number(),
        side="relay",
        shown="`message.max.bytes`",
        help="a larger payload becomes a dead letter",
    )
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
