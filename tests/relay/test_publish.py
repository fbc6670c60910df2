"""The publisher is called once at a time and gives one answer per row."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest
from typing_extensions import override

from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.events import Event
from pillarbox.outbox.log.lanes.batch import ClaimedMessage
from pillarbox.outbox.message import Message
from pillarbox.relay.adaptive_batch import BatchLimit
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.events import BatchPublished
from pillarbox.relay.publish import Answer, publish_batch
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from tests.fixtures.claimed import claimed
from tests.fixtures.publisher import ScriptedPublisher

ACKED, REFUSED = Acked(), Nacked("no")
STRICT = RelayConfig(strict_order=True)


class PublishHarness:
    """Runs `publish_batch` and records its events."""

    def __init__(self, config: RelayConfig | None = None) -> None:
        self.publisher = ScriptedPublisher()
        self.config = config or RelayConfig()
        self.batch_limit = BatchLimit(self.config.publish_timeout)
        self.events: list[Event] = []
        self.leases = iter([True] * 100)

    async def publish(
        self, *rows: ClaimedMessage
    ) -> tuple[list[Answer], BrokerUnavailableError | None]:
        return await publish_batch(
            rows,
            self.publisher,
            self.config,
            batch_limit=self.batch_limit,
            leased=lambda: next(self.leases),
            notify=self.events.append,
        )

    def calls(self) -> list[list[str]]:
        return [[m.topic for m in call] for call in self.publisher.calls]


def nack(*topics: str, permanent: bool = False) -> ScriptedPublisher:
    return ScriptedPublisher(
        lambda m: Nacked("no", permanent) if m.topic in topics else ACKED
    )


async def test_a_batch_is_published_in_one_call_in_order() -> None:
    harness = PublishHarness()
    harness.publisher = nack("b")

    answers, lost = await harness.publish(
        claimed("a", "k"), claimed("b"), claimed("c", "k"), claimed("d", "j")
    )

    assert harness.calls() == [["a", "b", "c", "d"]]
    assert answers == [ACKED, REFUSED, ACKED, ACKED]
    assert lost is None
    (event,) = harness.events
    assert isinstance(event, BatchPublished)
    assert (event.messages, event.acked) == (4, 3)


async def test_an_unreadable_row_is_nacked_permanently_and_not_sent() -> None:
    harness = PublishHarness()
    odd = Nacked("odd", permanent=True)

    answers, lost = await harness.publish(claimed("a", problem="odd"))
    assert (answers, lost, harness.calls(), harness.events) == ([odd], None, [], [])

    answers, _ = await harness.publish(
        claimed("a", "k"), claimed("b", "k", problem="odd"), claimed("c", "k")
    )
    assert answers == [ACKED, odd, ACKED]
    assert harness.calls() == [["a", "c"]]


@pytest.mark.parametrize(
    ("refused", "permanent", "calls", "expected"),
    [
        ((), False, [["a1", "b1", "c1"], ["a2", "b2"]], [ACKED] * 5),
        (
            ("a1",),
            False,
            [["a1", "b1", "c1"], ["b2"]],
            [REFUSED, ACKED, None, ACKED, ACKED],
        ),
        (
            ("a1",),
            True,
            [["a1", "b1", "c1"], ["a2", "b2"]],
            [Nacked("no", permanent=True), *[ACKED] * 4],
        ),
    ],
    ids=["no longer refused", "refused again", "refused permanently"],
)
async def test_a_refused_message_is_sent_before_the_rest_of_its_key(
    refused: Sequence[str],
    permanent: bool,
    calls: list[list[str]],
    expected: list[Answer],
) -> None:
    harness = PublishHarness()
    harness.publisher = nack(*refused, permanent=permanent)

    answers, _ = await harness.publish(
        claimed("a1", "a", attempts=1),
        claimed("b1", "b", attempts=1),
        claimed("a2", "a"),
        claimed("b2", "b"),
        claimed("c1"),
    )

    assert harness.calls() == calls
    assert answers == expected


async def test_in_strict_mode_no_call_contains_two_messages_of_a_key() -> None:
    harness = PublishHarness(STRICT)
    harness.publisher = nack("b1")

    answers, _ = await harness.publish(
        *[claimed(f"a{n}", "a") for n in range(3)],
        *[claimed(f"b{n}", "b") for n in range(3)],
        *[claimed(f"-{n}") for n in range(2)],
    )

    assert harness.calls() == [["a0", "b0", "-0", "-1"], ["a1", "b1"], ["a2"]]
    # Nothing overtakes a refused message.
    assert answers == [*[ACKED] * 4, REFUSED, None, ACKED, ACKED]


async def test_without_the_lease_nothing_is_published() -> None:
    harness = PublishHarness()
    harness.leases = iter([False])

    answers, lost = await harness.publish(claimed("a"), claimed("b", problem="odd"))

    assert answers == [None, Nacked("odd", permanent=True)]
    assert (lost, harness.calls()) == (None, [])
    assert harness.events == []


async def test_a_lease_lost_between_two_calls_stops_the_second() -> None:
    harness = PublishHarness(STRICT)
    harness.leases = iter([True, False])

    answers, _ = await harness.publish(claimed("a1", "a"), claimed("a2", "a"))

    assert answers == [ACKED, None]
    assert harness.calls() == [["a1"]]


async def test_messages_acked_before_an_outage_stay_acked() -> None:
    harness = PublishHarness(STRICT)

    def disconnect_after_the_first(_: Message) -> Confirmation:
        harness.publisher.away = "gone fishing"
        return ACKED

    harness.publisher.script = disconnect_after_the_first
    answers, lost = await harness.publish(
        claimed("a1", "a"), claimed("a2", "a"), claimed("b", problem="odd")
    )

    assert answers == [ACKED, None, Nacked("odd", permanent=True)]
    assert str(lost) == "gone fishing"


async def test_a_broker_that_does_not_answer_is_considered_unavailable() -> None:
    harness = PublishHarness(RelayConfig(publish_timeout=timedelta(milliseconds=10)))
    harness.publisher.open.clear()

    answers, lost = await harness.publish(claimed("a"), claimed("b"))

    assert answers == [None, None]
    assert str(lost).startswith("no answer within 0.01 s for 2 messages of ")
    assert harness.batch_limit.max_messages == 1


async def test_a_batch_above_the_limit_is_published_in_several_calls() -> None:
    harness = PublishHarness()
    harness.publisher = nack("a2")
    harness.batch_limit.record_timeout(4)

    answers, _ = await harness.publish(
        claimed("a1", "a"), claimed("a2", "a"), claimed("a3", "a"), claimed("b", "b")
    )

    assert harness.calls() == [["a1", "a2"], ["b"]]
    assert answers == [ACKED, REFUSED, None, ACKED]


async def test_a_network_error_means_unavailable() -> None:
    harness = PublishHarness()
    error = ConnectionResetError("reset")

    def fail(_: Message) -> Confirmation:
        raise error

    harness.publisher.script = fail
    answers, lost = await harness.publish(claimed("a"))

    assert answers == [None]
    assert lost is not None
    assert lost.__cause__ is error


async def test_a_message_that_makes_the_publisher_raise_delays_only_its_key() -> None:
    harness = PublishHarness()

    def stumble(message: Message) -> Confirmation:
        if message.topic == "a1":
            raise KeyError(message.topic)
        return ACKED

    harness.publisher.script = stumble
    answers, lost = await harness.publish(
        claimed("b1", "b"), claimed("a1", "a"), claimed("a2", "a"), claimed("c")
    )

    _, refused, *_ = answers
    assert isinstance(refused, Nacked)
    assert refused.reason.startswith("KeyError: raised in ")
    assert answers == [ACKED, refused, None, ACKED]
    assert lost is None
    assert harness.publisher.topics() == ["b1", "c"]


async def test_a_broker_lost_while_looking_for_the_bad_message_is_unavailable() -> None:
    harness = PublishHarness()

    def stumble_then_go(message: Message) -> Confirmation:
        if message.topic == "odd":
            if len(harness.publisher.calls) > 1:
                raise ConnectionResetError("reset")
            raise ValueError
        return ACKED

    harness.publisher.script = stumble_then_go
    _, lost = await harness.publish(claimed("a"), claimed("odd"), claimed("b"))

    assert str(lost) == "reset"


class Miscounting(ScriptedPublisher):
    @override
    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        return [*await super().publish(batch), ACKED][: 3 - len(self.calls)]


async def test_the_answers_of_a_publisher_that_miscounts_are_ignored() -> None:
    harness = PublishHarness()
    harness.publisher = Miscounting()

    answers, _ = await harness.publish(claimed("a"))

    assert not any(isinstance(answer, Acked) for answer in answers)


async def test_cancellation_reaches_the_publisher() -> None:
    harness = PublishHarness()
    harness.publisher.open.clear()
    publishing = asyncio.create_task(harness.publish(claimed("a")))
    await harness.publisher.until(lambda: bool(harness.publisher.calls))

    publishing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await publishing
