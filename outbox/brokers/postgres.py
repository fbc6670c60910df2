"""The options of a `postgresql://` URL, with PostgreSQL as the broker."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from typing import ClassVar

from typing_extensions import override

from pillarbox.outbox.brokers.options import BrokerOptions, Form, option, payload_limit
from pillarbox.outbox.limits import MAX_PAYLOAD_BYTES


@dataclass(frozen=True, kw_only=True)
class PostgresOptions(BrokerOptions):
    """The options of the publisher and the source; libpq reads the rest."""

    schemes: ClassVar[tuple[str, ...]] = ("postgresql", "postgres")
    refused: ClassVar[Mapping[str, str]] = {
        "direct": "omit it: a consumer always reads the outbox of its database",
        "inbox": "omit it: the copy in inbox.message is gone; to handle messages left"
        " there, run the previous version with this option",
        "unsubscribed": "omit it: to discard messages without a reader, run pillarbox"
        " readers add NAME --topic TOPIC --discard in the database of"
        " their outbox",
    }

    max_payload_bytes: int = payload_limit(
        MAX_PAYLOAD_BYTES, more="; the table takes no larger one"
    )
    lease: timedelta = option(
        Form.duration(),
        timedelta(seconds=10),
        side="consumer",
        help="how long a replica that hangs keeps its share of the keys",
    )
    prefetch: int = option(
        Form.number(), 256, side="consumer", help="most messages in one claim"
    )

    @classmethod
    @override
    def client_names(cls) -> Collection[str]:
        """Return the names of libpq's parameters."""
        # Imported here, since listing the options of all brokers must not need libpq.
        from psycopg import pq

        return [default.keyword.decode() for default in pq.Conninfo.get_defaults()]

    @classmethod
    @override
    def identity(cls, url: str) -> str:
        """Return the database, as libpq finds it, environment included."""
        from psycopg import pq
        from psycopg.conninfo import conninfo_to_dict

        rest, _ = cls.parse(url)
        values = {
            default.keyword.decode(): (default.val or b"").decode()
            for default in pq.Conninfo.get_defaults()
        } | conninfo_to_dict(f"postgresql://{rest.partition('://')[2]}")
        hosts = str(values["hostaddr"] or values["host"]).lower().split(",")
        ports = str(values["port"]).split(",")
        places = {
            f"{host}:{port or 5432}".removesuffix(":5432")
            for host, port in zip(hosts, cycle(ports), strict=False)
        }
        database = values["dbname"] or values["user"]
        service = f"?service={values['service']}" if values["service"] else ""
        return f"postgresql://{','.join(sorted(places))}/{database}{service}"
