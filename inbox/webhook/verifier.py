"""Tell whether a request is genuine, and which message it holds."""

import hmac
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final

from outbox.cloudevents.http import PREFIX, from_request
from outbox.cloudevents.signature import ID, SIGNATURE, TIMESTAMP, Secret
from outbox.errors import ConfigError, InvalidMessageError, OutboxError, shorten
from outbox.message import Message

__all__ = ["InvalidSignatureError", "Verifier"]

_MAX_DIGITS: Final = 12
_MAX_SIGNATURES: Final = 16


class InvalidSignatureError(OutboxError, ValueError):
    """A request was not signed with our secret, or not lately."""


class Verifier:
    """Verifies requests that are signed by the Standard Webhooks scheme.

    Args:
        secrets: `whsec_…`; a signature by any of them is good. To change one, add
            the new one here, then let the sender change, then remove the old one.
        tolerance: how far the sender's clock may be from ours, and so how long a
            request can be repeated by somebody who overheard it.

    Raises:
        ConfigError: there is no secret, or one can't be used.
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
            raise ConfigError("webhook secrets: there is none; pass [whsec_…]")
        if tolerance <= timedelta(0):
            raise ConfigError(f"tolerance={tolerance}: must be above 0")
        self._tolerance = tolerance.total_seconds()

    def verify(self, headers: Mapping[str, str], body: bytes) -> str:
        """Give the id of a genuine request.

        Args:
            headers: with their names in any case.
            body: the bytes as they came; parsed and written again they differ.

        Raises:
            InvalidSignatureError: a header is missing, no signature is good, or the
                request is too old, or from the future.
        """
        folded = {name.lower(): value for name, value in headers.items()}
        id, moment, signatures = (
            _required(folded, name) for name in (ID, TIMESTAMP, SIGNATURE)
        )
        if not moment.isascii() or not moment.isdecimal() or len(moment) > _MAX_DIGITS:
            raise InvalidSignatureError(
                f"{TIMESTAMP} {shorten(moment)}: isn't a number of seconds"
            )
        timestamp = int(moment)
        age = time.time() - timestamp
        if abs(age) > self._tolerance:
            raise InvalidSignatureError(
                f"{TIMESTAMP} {timestamp}: is {abs(age):.0f} s "
                f"{'old' if age > 0 else 'ahead'}, and {self._tolerance:.0f} s are "
                "allowed; check the clocks"
            )
        given = [s.encode() for s in signatures.split()[:_MAX_SIGNATURES]]
        good = False
        for secret in self._secrets:
            expected = secret.sign(id, timestamp, body).encode()
            for signature in given:
                # No early end: time must not tell which of them was good.
                good |= hmac.compare_digest(expected, signature)
        if not good:
            raise InvalidSignatureError(
                f"{SIGNATURE}: none is by a secret of ours over this body"
            )
        return id

    def read(self, headers: Mapping[str, str], body: bytes) -> Message:
        """Give the message of a genuine request.

        Raises:
            InvalidSignatureError: it isn't genuine.
            InvalidMessageError: it is, but holds no message of ours.
        """
        id = self.verify(headers, body)
        message = from_request({n.lower(): v for n, v in headers.items()}, body)
        # Only webhook-id is signed, and the receipt is of the message's id.
        if str(message.id) != id:
            raise InvalidMessageError(
                "id",
                str(message.id),
                f"differs: {PREFIX}id is not {ID}",
                "fix the producer",
            )
        return message


def _required(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if not value:
        raise InvalidSignatureError(f"{name}: there is no such header")
    return value
