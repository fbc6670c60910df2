"""Verify that a webhook request is authentic, and read its message."""

import hmac
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final

from pillarbox.outbox.cloudevents.http import PREFIX, from_request
from pillarbox.outbox.cloudevents.signature import ID, SIGNATURE, TIMESTAMP, Secret
from pillarbox.outbox.duration import exact_duration
from pillarbox.outbox.errors import (
    ConfigError,
    InvalidMessageError,
    OutboxError,
    shorten,
)
from pillarbox.outbox.message import Message

__all__ = ["InvalidSignatureError", "Verifier"]

_MAX_DIGITS: Final = 12
_MAX_SIGNATURES: Final = 16


class InvalidSignatureError(OutboxError, ValueError):
    """A request wasn't signed with any of the secrets, or not recently."""


class Verifier:
    """Verifies requests that are signed by the Standard Webhooks scheme.

    Args:
        secrets: `whsec_…`; a signature made with any of them is valid. To rotate a
            secret, add the new one here, switch the sender, then remove the old one.
        tolerance: the maximum difference between the sender's clock and this host's. An
            attacker who intercepts a request can replay it for this long.

    Raises:
        ConfigError: there is no secret, a secret is invalid, or the tolerance isn't
            above 0.
    """

    def __init__(
        self,
        secrets: Iterable[str],
        *,
        tolerance: timedelta = timedelta(minutes=5),
    ) -> None:
        if isinstance(secrets, str):
            secrets = secrets.split()
        self._secrets = tuple(map(Secret, secrets))
        if not self._secrets:
            raise ConfigError("webhook secrets: empty; pass [whsec_…]")
        if tolerance <= timedelta(0):
            raise ConfigError(
                f"tolerance={exact_duration(tolerance)}: must be above 0s"
            )
        self._tolerance = tolerance.total_seconds()

    def verify(self, headers: Mapping[str, str], body: bytes) -> str:
        """Return the id of an authentic request.

        Args:
            headers: the names can be in any case.
            body: the bytes as received; JSON that was parsed and serialized again can
                differ from them.

        Raises:
            InvalidSignatureError: a header is missing, no signature is valid, or the
                timestamp differs from this host's clock by more than the tolerance.
        """
        folded = {name.lower(): value for name, value in headers.items()}
        id, moment, signatures = (
            _required(folded, name) for name in (ID, TIMESTAMP, SIGNATURE)
        )
        if not moment.isascii() or not moment.isdecimal() or len(moment) > _MAX_DIGITS:
            raise InvalidSignatureError(
                f"{TIMESTAMP} {shorten(moment)}: not a number of seconds"
            )
        timestamp = int(moment)
        age = time.time() - timestamp
        if abs(age) > self._tolerance:
            raise InvalidSignatureError(
                f"{TIMESTAMP} {timestamp}: {abs(age):.0f} s "
                f"{'old' if age > 0 else 'ahead'}, {self._tolerance:.0f} s allowed; "
                "check the clocks"
            )
        given = [s.encode() for s in signatures.split()[:_MAX_SIGNATURES]]
        valid = False
        for secret in self._secrets:
            expected = secret.sign(id, timestamp, body).encode()
            for signature in given:
                # No early exit: the time taken must not reveal which signature matched.
                valid |= hmac.compare_digest(expected, signature)
        if not valid:
            raise InvalidSignatureError(
                f"{SIGNATURE}: no signature matches this body and the configured"
                " secrets"
            )
        return id

    def read(self, headers: Mapping[str, str], body: bytes) -> Message:
        """Return the message of an authentic request.

        Raises:
            InvalidSignatureError: the request is not authentic.
            InvalidMessageError: it is authentic, but doesn't contain a valid message.
        """
        id = self.verify(headers, body)
        message = from_request({n.lower(): v for n, v in headers.items()}, body)
        # Only webhook-id is signed, but the receipt is for the message's id.
        if str(message.id) != id:
            raise InvalidMessageError(
                "id",
                str(message.id),
                f"{PREFIX}id differs from {ID}",
                "fix the producer",
            )
        return message


def _required(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if not value:
        raise InvalidSignatureError(f"{name}: missing header")
    return value
