"""The options of a URL of Redis, or of its Sentinels."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final
from urllib.parse import parse_qs

from typing_extensions import override

from pillarbox.outbox.brokers.options import BrokerOptions, Form, option, payload_limit
from pillarbox.outbox.brokers.shards import shards_option

LAYOUTS: Final = ".shard-layouts"
"""After the name of a topic: the hash of its layouts, by their numbers of shards.

Of each layout it has the server's time, in milliseconds, until which all groups had
settled everything in the other layouts.
"""


@dataclass(frozen=True, kw_only=True)
class RedisOptions(BrokerOptions):
    """The options of the publisher and the source; redis-py reads the rest."""

    ports: ClassVar[Mapping[str, int]] = {
        "redis": 6379,
        "rediss": 6379,
        "redis+sentinel": 26379,
        "rediss+sentinel": 26379,
    }
    schemes: ClassVar[tuple[str, ...]] = tuple(ports)
    destination: ClassVar[tuple[str, ...] | None] = ("shards",)
    client: ClassVar[tuple[str, ...]] = (
        "username",
        "password",
        "sentinel_username",
        "sentinel_password",
        "db",
        "client_name",
        "socket_timeout",
        "socket_connect_timeout",
        "socket_keepalive",
        "health_check_interval",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_password",
        "ssl_cert_reqs",
        "ssl_check_hostname",
        "ssl_ciphers",
    )

    maxlen: int | None = option(
        Form.number(),
        side="relay",
        shown="keep all",
        help="about how many entries a stream keeps (`MAXLEN ~`)",
    )
    max_payload_bytes: int = payload_limit(
        # Redis's own limit on the size of a string, proto-max-bulk-len.
        512 * 1024 * 1024
    )
    shards: int = shards_option()
    replicas: int = option(
        Form.number(0),
        0,
        side="relay",
        help="how many replicas must have a batch before it counts as published "
        "(`WAIT`)",
    )
    reclaim_after: timedelta = option(
        Form.duration(),
        timedelta(seconds=60),
        side="consumer",
        help="how long an entry stays with a dead replica before another one takes it",
    )

    @classmethod
    @override
    def place(cls, path: str, query: str) -> str:
        """Return the Sentinels' name of the master, and the number of the database."""
        master, _, number = path.strip("/").rpartition("/")
        if not number.isdecimal():
            master, number = path.strip("/"), "0"
        given = parse_qs(query).get("db", [number])[0]
        return f"{'/' if master else ''}{master}/{int(given)}"
