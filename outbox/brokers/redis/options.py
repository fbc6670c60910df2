"""The options of a `redis://` or `rediss://` URL."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar
from urllib.parse import parse_qs

from typing_extensions import override

from outbox.brokers.options import BrokerOptions, Described, Form, option


@dataclass(frozen=True, kw_only=True)
class RedisOptions(BrokerOptions):
    """The options of the publisher and the source; redis-py reads the rest."""

    schemes: ClassVar[tuple[str, ...]] = ("redis", "rediss")
    ports: ClassVar[Mapping[str, int]] = {"redis": 6379, "rediss": 6379}
    destination: ClassVar[tuple[str, ...] | None] = ()
    client: ClassVar[tuple[Described, ...]] = (
        Described("username", "both", "", "if it is not in front of the host"),
        Described("password", "both", "", "if it is not in front of the host"),
        Described("db", "both", "0", "if it is not in the path"),
        Described("client_name", "both", "", "as `CLIENT LIST` shows it"),
        Described("socket_timeout", "both", "30", "seconds to wait for an answer"),
        Described("socket_connect_timeout", "both", "10", "seconds"),
        Described("socket_keepalive", "both", "true", ""),
        Described(
            "health_check_interval", "both", "0", "seconds between PINGs; 0 sends none"
        ),
        Described("ssl_ca_certs", "both", "the system's", "a file, for `rediss://`"),
        Described("ssl_ca_path", "both", "", "a directory, for `rediss://`"),
        Described("ssl_certfile", "both", "", "our certificate, for `rediss://`"),
        Described("ssl_keyfile", "both", "", "its key"),
        Described("ssl_password", "both", "", "the key's password"),
        Described(
            "ssl_cert_reqs", "both", "`required`", "`none` trusts any certificate"
        ),
        Described(
            "ssl_check_hostname",
            "both",
            "true",
            "whether the certificate has to name the host",
        ),
        Described("ssl_ciphers", "both", "", "in OpenSSL's format"),
    )

    maxlen: int | None = option(
        Form.number(),
        side="relay",
        shown="keep all",
        help="about how many entries a stream keeps (`MAXLEN ~`)",
    )
    max_payload_bytes: int = option(
        Form.number(),
        # Redis's own limit on the size of a string, proto-max-bulk-len.
        512 * 1024 * 1024,
        side="relay",
        help="a larger payload becomes a dead letter",
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
        """Return the number of the database, from the query or else the path."""
        given = parse_qs(query).get("db", [path.strip("/")])[0]
        return f"/{int(given or 0)}"
