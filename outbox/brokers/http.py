"""The options of the URL of a webhook, `https://` or `http://`."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from typing_extensions import override

from pillarbox.outbox.brokers.options import (
    FILE,
    BrokerOptions,
    Form,
    option,
    payload_limit,
)


@dataclass(frozen=True, kw_only=True)
class HttpOptions(BrokerOptions):
    """The options of the publisher; the rest of the query goes to the receiver."""

    schemes: ClassVar[tuple[str, ...]] = ("http", "https")
    ports: ClassVar[Mapping[str, int]] = {"http": 80, "https": 443}
    destination: ClassVar[tuple[str, ...] | None] = ()
    closed: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = {
        "secret": "URLs get printed; put the secret into an environment variable and "
        "write secret_env=THE_NAME"
    }

    @classmethod
    @override
    def place(cls, path: str, query: str) -> str:
        """Return a hash, because the path of a webhook is often its secret."""
        return super().place(
            "", "&".join(filter(None, [path.removeprefix("/"), query]))
        )

    secret_env: str | None = option(
        Form.text("the name of an environment variable"),
        side="relay",
        shown="required",
        help="the environment variable with the secrets, `whsec_…`, separated by white "
        "space; each signs every request",
    )
    unsigned: bool = option(
        Form.flag(),
        False,
        side="relay",
        help="`true`: no secret and no signature, for receivers of plain CloudEvents",
    )
    allow_private: bool = option(
        Form.flag(),
        False,
        side="relay",
        help="`true`: the target may be in a private network",
    )
    ca_file: str | None = option(
        FILE,
        side="relay",
        help="certificates in PEM to trust in addition to the system's",
    )
    max_connections: int = option(
        Form.number(),
        16,
        side="relay",
        help="open connections, and therefore parallel requests",
    )
    max_payload_bytes: int = payload_limit(1024 * 1024)
    timeout: timedelta = option(
        Form.duration(), timedelta(seconds=10), side="relay", help="for one request"
    )
    max_retry_after: timedelta = option(
        Form.duration(),
        timedelta(minutes=2),
        side="relay",
        help="the longest pause that the target may request, for itself or for one "
        "message",
    )
