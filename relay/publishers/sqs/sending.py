"""Sends one batch to AWS in parallel requests, and collects the answers.

A FIFO queue keeps the order of a key, but can refuse one entry of a request and accept
the next. So a batch for FIFO queues is sent in rounds, each with one message of a key,
and the messages behind a refused one are held back.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from botocore.exceptions import ClientError

from pillarbox.outbox.brokers.sqs.connection import (
    BROKEN,
    DENIED,
    MISSING,
    SqsSettings,
    code_of,
    is_busy,
    is_temporary,
)
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.gather import gather
from pillarbox.relay.answers import Answers
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from pillarbox.relay.publishers.sqs.destination import Destination, Service

_MAX_ENTRIES: Final = 10
_FOR_EVER: Final = {
    "InvalidMessageContents",
    "InvalidParameter",
    "InvalidParameterValue",
    "InvalidAttributeValue",
    "ParameterValueInvalid",
    "BatchRequestTooLong",
    "ValidationError",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A message to send.

    Attributes:
        index: its position in the batch.
        line: its key, or its index if it has none.
        size: its size in bytes, as AWS counts it.
        fields: the entry for the API, without its `Id`.
    """

    index: int
    line: str | int
    place: Destination
    size: int
    fields: Mapping[str, Any]


class Sending:
    """Sends one batch; for a single use.

    Args:
        slots: acquired for each request, so that concurrent batches share the
            connections.
        answers: those of the batch, filled in as they arrive.
    """

    def __init__(
        self,
        service: Service,
        settings: SqsSettings,
        slots: asyncio.Semaphore,
        answers: Answers[Confirmation],
    ) -> None:
        self._service = service
        self._settings = settings
        self._slots = slots
        self._answers = answers

    async def send(self, client: Any, entries: Mapping[int, Entry]) -> None:
        """Send the entries of all messages without an answer.

        Raises:
            BrokerUnavailableError: AWS is unreachable, is at fault or accepts nothing
                at the moment.
        """

        async def run(request: Sequence[Entry]) -> None:
            async with self._slots:
                await self._send(client, request)

        fifo = self._settings.options.fifo
        while left := self._answers.hold_back():
            first: dict[str | int, Entry] = {}
            for i in left:
                first.setdefault(entries[i].line if fifo else i, entries[i])
            requests = _requests(list(first.values()))
            await gather(run(request) for request in requests)

    async def _send(self, client: Any, request: Sequence[Entry]) -> None:
        place = request[0].place
        entries = [{"Id": str(entry.index), **entry.fields} for entry in request]
        try:
            answer = await self._service.send(client, place, entries)
        except BROKEN as error:
            refusal = refusal_of(error, f"{self._service.kind} {place.name}")
            if refusal is None:
                raise self._settings.unavailable(error) from error
            if refusal.permanent and len(request) > 1:
                # One by one, so that only the one at fault is nacked.
                for entry in request:
                    await self._send(client, [entry])
                return
            for entry in request:
                self._answers.give(entry.index, refusal)
            return
        self._read(answer, request)

    def _read(self, answer: Mapping[str, Any], request: Sequence[Entry]) -> None:
        taken = {result["Id"] for result in answer.get("Successful", ())}
        failed = {result["Id"]: result for result in answer.get("Failed", ())}
        if not taken and failed and all(is_busy(f["Code"]) for f in failed.values()):
            raise BrokerUnavailableError(
                f"broker {self._settings.url} is not accepting messages: "
                f"{_reason(next(iter(failed.values())))}"
            )
        for entry in request:
            id = str(entry.index)
            given: Confirmation = Nacked("AWS gave no answer for it")
            if id in taken:
                given = Acked()
            elif id in failed:
                given = _nacked(failed[id])
            self._answers.give(entry.index, given)


def _requests(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Divide entries into requests of a size that AWS accepts."""
    requests: dict[Destination, list[list[Entry]]] = {}
    for entry in entries:
        of_place = requests.setdefault(entry.place, [[]])
        size = entry.size + sum(each.size for each in of_place[-1])
        if len(of_place[-1]) == _MAX_ENTRIES or size > entry.place.max_request_bytes:
            of_place.append([])
        of_place[-1].append(entry)
    return [request for of_place in requests.values() for request in of_place]


def refusal_of(error: BaseException, what: str) -> Nacked | None:
    """Return the nack for an error; None if the messages aren't to blame."""
    if not isinstance(error, ClientError) or is_temporary(error):
        return None
    code = code_of(error)
    if code in MISSING:
        return Nacked(f"{what} doesn't exist: create it")
    if code in DENIED or code.startswith("KMS"):
        return Nacked(f"AWS forbids {what}: {error}")
    return Nacked(f"AWS refused it: {error}", permanent=code in _FOR_EVER)


def _nacked(failed: Mapping[str, Any]) -> Nacked:
    code = failed["Code"]
    # AWS also blames the sender for throttling, KMS keys and permissions, which can be
    # fixed.
    clears = is_busy(code) or code.startswith("KMS") or code in DENIED
    return Nacked(
        f"AWS refused it: {_reason(failed)}",
        permanent=bool(failed.get("SenderFault")) and not clears,
    )


def _reason(failed: Mapping[str, Any]) -> str:
    return f"{failed['Code']}: {failed.get('Message', 'AWS gave no details')}"
