"""Refusals by SQS of one entry or a whole request, and their effect on the others."""

from collections.abc import Sequence

import pytest

from pillarbox import Message
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from pillarbox.relay.publishers.sqs import SqsPublisher
from tests.fixtures.sqs_script import (
    Answer,
    Entry,
    ScriptedSqs,
    error,
    fault,
    scripted_sqs,
    taken,
)


def messages(*bodies: str, topic: str = "t") -> list[Message]:
    """Return messages, each with the first letter of its body as its key."""
    return [Message(topic, body.encode(), key=body[0]) for body in bodies]


async def publish(
    sqs: ScriptedSqs, *batch: Message, options: str = ""
) -> Sequence[Confirmation]:
    async with SqsPublisher.from_url(sqs.url(options)) as publisher:
        return await publisher.publish(batch)


def kinds(answers: Sequence[Confirmation]) -> str:
    """Return a sign for each: `+` acked, `-` nacked, `x` nacked permanently."""
    return "".join(
        "+" if isinstance(a, Acked) else "x" if a.permanent else "-" for a in answers
    )


async def test_a_sender_fault_is_permanent_and_holds_nothing_back() -> None:
    bad = {"a1": fault("InvalidMessageContents", sender=True)}
    async with scripted_sqs(lambda entries: taken(entries, bad)) as sqs:
        batch = messages("a1", "b1", "a2")
        answers = await publish(sqs, *batch, options="&fifo=true")
    assert kinds(answers) == "x++"
    assert answers[0] == Nacked(
        "AWS refused it: InvalidMessageContents: said the script", permanent=True
    )


async def test_the_services_fault_holds_back_the_rest_of_the_key() -> None:
    bad = {"a1": fault("InternalError", sender=False)}
    async with scripted_sqs(lambda entries: taken(entries, bad)) as sqs:
        batch = messages("a1", "b1", "a2", "a3", "b2")
        answers = await publish(sqs, *batch, options="&fifo=true")
        assert kinds(answers) == "-+--+"
        assert not {"a2", "a3"} & {body for r in sqs.requests for body in r}


@pytest.mark.parametrize(
    "code", ["RequestThrottled", "ThrottlingException", "KMS.DisabledException"]
)
async def test_a_failure_that_aws_blames_on_the_sender_can_be_temporary(
    code: str,
) -> None:
    bad = {"a1": fault(code, sender=True)}
    async with scripted_sqs(lambda entries: taken(entries, bad)) as sqs:
        assert kinds(await publish(sqs, *messages("a1", "b1"))) == "-+"


async def test_a_completely_throttled_request_costs_no_attempt() -> None:
    bad = {b: fault("ThrottlingException", sender=True) for b in ("a1", "b1")}
    async with scripted_sqs(lambda entries: taken(entries, bad)) as sqs:
        with pytest.raises(BrokerUnavailableError, match="is not accepting messages"):
            await publish(sqs, *messages("a1", "b1"))


@pytest.mark.parametrize(
    "answer",
    [
        error("InternalFailure", 500),
        error("ServiceUnavailable", 503),
        error("RequestThrottled", 403),
        error("ExpiredTokenException"),
    ],
    ids=str,
)
async def test_a_failing_service_costs_no_attempt(answer: Answer) -> None:
    async with scripted_sqs(lambda _: answer) as sqs:
        with pytest.raises(BrokerUnavailableError):
            await publish(sqs, *messages("a1", "b1"))


async def test_messages_accepted_before_an_outage_are_not_sent_again() -> None:
    def fail_after_two(entries: Sequence[Entry]) -> Answer:
        if len(sqs.requests) > 2:
            return error("ServiceUnavailable", 503)
        return taken(entries)

    batch = messages("a1", "a2", "a3", "a4")
    async with (
        scripted_sqs(fail_after_two) as sqs,
        SqsPublisher.from_url(sqs.url("&fifo=true")) as publisher,
    ):
        for _ in range(2):
            with pytest.raises(BrokerUnavailableError):
                await publisher.publish(batch)
        sqs.script = taken
        assert kinds(await publisher.publish(batch)) == "++++"
        sent = [body for request in sqs.requests for body in request]
        assert [sent.count(m.payload.decode()) for m in batch[:2]] == [1, 1]


async def test_an_entry_that_makes_a_request_fail_is_found() -> None:
    def script(entries: Sequence[Entry]) -> Answer:
        if any(entry["MessageBody"] == "b1" for entry in entries):
            return error("InvalidMessageContents")
        return taken(entries)

    async with scripted_sqs(script) as sqs:
        batch = messages("a1", "b1", "c1", "b2")
        assert kinds(await publish(sqs, *batch)) == "+x++"


async def test_an_answer_without_a_message_does_not_ack_it() -> None:
    async with scripted_sqs(lambda entries: taken(entries[:1])) as sqs:
        assert kinds(await publish(sqs, *messages("a1", "b1"))) == "+-"


async def test_a_request_holds_ten_messages_and_with_fifo_one_for_each_key() -> None:
    batch = messages(*(f"{key}{n}" for n in range(3) for key in "abcdefghijkl"))
    async with scripted_sqs() as sqs:
        assert kinds(await publish(sqs, *batch, options="&fifo=true")) == "+" * 36
        assert all(len(r) <= 10 for r in sqs.requests)
        assert all(len({body[0] for body in r}) == len(r) for r in sqs.requests)
        sent = [body for request in sqs.requests for body in request]
        for key in "abcdefghijkl":
            assert [b for b in sent if b[0] == key] == [f"{key}{n}" for n in range(3)]


async def test_without_fifo_one_key_can_fill_a_request() -> None:
    batch = messages(*(f"a{n}" for n in range(25)))
    async with scripted_sqs() as sqs:
        assert kinds(await publish(sqs, *batch)) == "+" * 25
        assert sorted(len(request) for request in sqs.requests) == [5, 10, 10]


async def test_requests_are_no_larger_than_aws_accepts() -> None:
    batch = [Message("t", b"x" * 300_000, key=str(n)) for n in range(7)]
    async with scripted_sqs() as sqs:
        assert kinds(await publish(sqs, *batch)) == "+" * 7
        assert sorted(len(request) for request in sqs.requests) == [1, 3, 3]


async def test_refused_credentials_are_reported_at_start() -> None:
    async with scripted_sqs() as sqs:
        sqs.other = error("UnrecognizedClientException")
        with pytest.raises(ConfigError, match="give them in the URL"):
            await publish(sqs)


async def test_a_missing_permission_to_inspect_the_queue_is_tolerated() -> None:
    async with scripted_sqs() as sqs:
        sqs.other = error("AccessDeniedException", 403)
        (answer,) = await publish(sqs, *messages("a1"))
        assert isinstance(answer, Nacked)
        assert not answer.permanent
        assert answer.reason.startswith("AWS forbids queue t")
