"""Sends one batch to AWS in parallel requests, and collects the answers."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from botocore.exceptions import ClientError

from outbox.brokers.sqs.connection import (
    BROKEN,
    DENIED,
    MISSING,
    SqsSettings,
    code_of,
    is_busy,
    is_temporary,
)
from outbox.errors import BrokerUnavailableError
from outbox.gather import end
from relay.publisher import Acked, Confirmation, Nacked
from relay.publishers.sqs.destination import Service
from relay.publishers.sqs.requests import Entry, Line, Requests

WAITS: Final = Nacked("it waits behind a refused message of its key")

_FOR_EVER: Final = {
    "InvalidMessageContents",
    "InvalidParameter",
    "InvalidParameterValue",
    "InvalidAttributeValue",
    "ParameterValueInvalid",
    "BatchRequestTooLong",
    "ValidationError",
}


class Sending:
    """Sends one batch; for a single use.

    Args:
        slots: acquired for each request, so that concurrent batches share the
            connections.
        in_flight: the maximum number of concurrent requests.
        strict: see `Requests`.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        service: Service,
        settings: SqsSettings,
        slots: asyncio.Semaphore,
        *,
        in_flight: int,
        strict: bool,
    ) -> None:
        self.answers: dict[int, Confirmation] = {}
        """One for each entry, by its index, once `send` has returned."""
        self._requests = Requests(entries, strict=strict)
        self._service = service
        self._settings = settings
        self._slots = slots
        self._in_flight = in_flight

    async def send(self, client: Any) -> None:
        """Send all entries.

        Raises:
            BrokerUnavailableError: AWS is unreachable, is at fault or accepts nothing
                at the moment.
        """
        tasks: set[asyncio.Task[None]] = set()
        done: set[asyncio.Task[None]] = set()
        try:
            while True:
                while len(tasks) < self._in_flight and (
                    request := self._requests.take()
                ):
                    tasks.add(asyncio.create_task(self._run(client, request)))
                if not tasks:
                    return
                done, tasks = await asyncio.wait(
                    tasks, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
        finally:
            await end(tasks | done)

    async def _run(self, client: Any, request: Sequence[Entry]) -> None:
        async with self._slots:
            await self._send(client, request)
        refused = {entry.line for entry in request if self._is_refused(entry)}
        for entry in self._requests.answered(request, refused):
            self.answers[entry.index] = WAITS

    def _is_refused(self, entry: Entry) -> bool:
        answer = self.answers[entry.index]
        return isinstance(answer, Nacked) and not answer.permanent

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
                await self._send_apart(client, request)
            else:
                for entry in request:
                    self.answers[entry.index] = refusal
            return
        self._read(answer, request)

    async def _send_apart(self, client: Any, request: Sequence[Entry]) -> None:
        """Send the entries one by one, so that only the one at fault is nacked."""
        refused: set[Line] = set()
        for entry in request:
            if entry.line in refused:
                self.answers[entry.index] = WAITS
                continue
            await self._send(client, [entry])
            if self._is_refused(entry):
                refused.add(entry.line)

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
            if id in taken:
                self.answers[entry.index] = Acked()
            elif id in failed:
                self.answers[entry.index] = _nacked(failed[id])
            else:
                self.answers[entry.index] = Nacked("AWS gave no answer for it")


def refusal_of(error: BaseException, what: str) -> Nacked | None:
    """Return the nack for an error; None if the messages aren't to blame."""
    if not isinstance(error, ClientError) or is_temporary(error):
        return None
    code = code_of(error)
    if code in MISSING:
        return Nacked(f"there is no {what}: create it")
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
