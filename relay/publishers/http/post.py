"""Posts one message to one URL, and interprets the response."""

import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

import aiohttp
from yarl import URL

from pillarbox.outbox.cloudevents.raw_text import storable
from pillarbox.outbox.cloudevents.signature import ID, SIGNATURE, TIMESTAMP, Secret
from pillarbox.outbox.errors import shorten
from pillarbox.outbox.message import Message
from pillarbox.outbox.url import without_secrets
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from pillarbox.relay.publishers.http.host import Host

_MAX_ANSWER_BYTES: Final = 16 * 1024
_LEAST_SECRET: Final = 8
_ACKED: Final = Acked()
# These concern the message and are permanent. Others can be temporary: a deployment or
# a change of secrets also causes 401, 403 and 404.
_FOR_EVER: Final = frozenset({400, 410, 413, 415, 422, 431})
# Like 5xx, these can concern all messages, so several in a row mean that the host is
# unavailable. 404 can concern a single topic, which must not hold up the others.
_ALIKE: Final = frozenset({401, 403, 407, 408, 425, 429})
# With Retry-After, 429 and 503 request a pause for the host, 425 for the message.
_PAUSING: Final = frozenset({429, 503})
_PUTTING_OFF: Final = 425
_SECONDS: Final = re.compile(r"[0-9]{1,9}")


class Mailbox:
    """A URL on a host, to which messages are posted one by one.

    Args:
        secrets: each signs every request; without any, requests aren't signed.
        max_retry_after: the longest pause that the host can request, in seconds.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: URL,
        host: Host,
        secrets: Sequence[Secret],
        max_retry_after: float,
    ) -> None:
        self._session = session
        self._url = url
        self._host = host
        self._secrets = secrets
        self._max_retry_after = max_retry_after

    async def post(
        self, message: Message, headers: Mapping[str, str]
    ) -> Confirmation | None:
        """Post a message; if the host is unavailable, record that and return None."""
        id = str(message.id)
        prepared = {**headers, ID: id, "Idempotency-Key": id}
        if self._secrets:
            now = int(time.time())
            prepared[TIMESTAMP] = str(now)
            prepared[SIGNATURE] = " ".join(
                secret.sign(id, now, message.payload) for secret in self._secrets
            )
        try:
            try:
                return await self._ask(message, prepared)
            except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                # The host may have closed an idle connection just as it was reused.
                return await self._ask(message, prepared)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._host.lose(f"can't be reached: {one_line(error)}")
            return None
        except aiohttp.ClientResponseError as error:
            # The receiver may have handled the message, so it isn't posted forever.
            self._host.answered(message.id)
            # The error's own text has the URL.
            reason = f"gave an answer that can't be read: {error.message[:200]}"
            return Nacked(reason)
        except TimeoutError:
            return self._unanswered(message, "gave no answer in time")
        except aiohttp.ServerDisconnectedError:
            # The error's text has all headers that arrived before.
            return self._unanswered(message, "closed the connection without an answer")
        except (aiohttp.ClientError, OSError) as error:
            return self._unanswered(message, f"gave no answer: {one_line(error)}")

    async def _ask(
        self, message: Message, headers: Mapping[str, str]
    ) -> Confirmation | None:
        async with self._session.post(
            self._url, data=message.payload, headers=headers, allow_redirects=False
        ) as response:
            answer = b""
            try:
                while len(answer) < _MAX_ANSWER_BYTES and not response.content.at_eof():
                    answer += await response.content.readany()
            except (TimeoutError, aiohttp.ClientError):
                # The status is the answer; the body would only have explained it.
                response.close()
            if not response.content.at_eof():
                response.close()
            return self._classify(message, response, answer)

    def _classify(
        self, message: Message, response: aiohttp.ClientResponse, answer: bytes
    ) -> Confirmation | None:
        status = response.status
        if 200 <= status < 300:
            self._host.answered(message.id)
            return _ACKED
        if 300 <= status < 400:
            where = shorten(self._hide(response.headers.get("Location", "")))
            self._host.lose(
                f"answers {status}, a redirect to {where}, which is not followed:"
                " change the URL"
            )
            return None
        reason = storable(f"HTTP {status} {response.reason or ''}".rstrip()[:200])
        if text := " ".join(answer[:400].decode(errors="replace").split()):
            reason = f"{reason}: {self._hide(text)[:200]}"
        pause = self._pause(response.headers.get("Retry-After", ""))
        if pause is not None and status in _PAUSING:
            self._host.pause(pause)
            return None
        if pause is not None and status == _PUTTING_OFF:
            self._host.answered(message.id)
            return Nacked(reason, retry_after=timedelta(seconds=pause))
        if status >= 500 or status in _ALIKE:
            self._host.refused(reason)
            return Nacked(reason)
        self._host.answered(message.id)
        return Nacked(reason, permanent=status in _FOR_EVER)

    def _hide(self, text: str) -> str:
        """Hide the URL, which servers quote: its path may be a secret."""
        for own in (self._url.raw_path_qs, self._url.path_qs, self._url.raw_path):
            if len(own) > _LEAST_SECRET:
                text = text.replace(own, "/…")
        return without_secrets(text)

    def _unanswered(self, message: Message, reason: str) -> Nacked | None:
        if self._host.blames(message.id):
            return Nacked(reason)
        self._host.lose(reason)
        return None

    def _pause(self, value: str) -> float | None:
        """Parse Retry-After, which is a number of seconds or a date."""
        if _SECONDS.fullmatch(value):
            seconds = float(value)
        else:
            try:
                moment = parsedate_to_datetime(value)
            except (ValueError, OverflowError):
                return None
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            seconds = (moment - datetime.now(UTC)).total_seconds()
        return min(max(seconds, 0.0), self._max_retry_after)


def one_line(error: BaseException) -> str:
    """Return the text of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
