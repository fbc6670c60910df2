"""The publisher is called once at a time and gives one answer per row."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest
from typing_extensions import override

from outbox.message import Message
from relay.config import RelayConfig
from relay.events import BatchPublished, StaleBatchDropped
from relay.publisher import Acked, Confirmation, Nacked
from tests.fixtures.claimed import claimed
from tests.fixtures.publish_harness import PublishHarness
from tests.fixtures.publisher import ScriptedPublisher

ACKED = Acked()
STRICT = RelayConfig(strict_order=True)


def nack(*topics: str, permanent: bool = False) -> ScriptedPublisher:
    return ScriptedPublisher(
        lambda m: Nacked("no", permanent) if m.topic in topics else ACKED
    )


async def test_a_batch_is_published_in_one_call_in_order() -> None:
    harness = PublishHarness()

    answers, lost = await harness.publish(
        claimed("a", "k"), claimed("b"), claimed("c", "k"), claimed("d", "j")
    )

    assert harness.calls() == [["a", "b", "c", "d"]]
    assert answers == [ACKED] * 4
    assert lost is None
    (event,) = harness.events
    assert isinstance(event, BatchPublished)
    assert (event.messages, event.acked) == (4, 4)


async def test_each_answer_belongs_to_its_row() -> None:
    harness = PublishHarness()
    harness.publisher = nack("b")

    answers, _ = await harness.publish(claimed("a"), claimed("b"), claimed("c"))

    assert answers == [ACKED, Nacked("no"), ACKED]


async def test_an_unreadable_row_is_nacked_permanently_and_not_sent() -> None:
    harness = PublishHarness()

    answers, _ = await harness.publish(
        claimed("a", "k"), claimed("b", "k", problem="odd"), claimed("c", "k")
    )

    assert answers == [ACKED, Nacked("odd", permanent=True), ACKED]
    assert harness.calls() == [["a", "c"]]


async def test_a_batch_without_readable_rows_makes_no_call() -> None:
    harness = PublishHarness()

    answers, lost = await harness.publish(claimed("a", problem="odd"))

    assert answers == [Nacked("odd", permanent=True)]
    assert (lost, harness.calls(), harness.events) == (None, [], [])


async def test_a_refused_message_is_sent_before_the_rest_of_its_key() -> None:
    harness = PublishHarness()

    answers, _ = await harness.publish(
        claimed("a1", "a", attempts=1), claimed("b1", "b"), claimed("a2", "a")
    )

    assert harness.calls() == [["a1", "b1"], ["a2"]]
    assert answers == [ACKED] * 3


async def test_a_head_refused_again_holds_back_only_its_key() -> None:
    harness = PublishHarness()
    harness.publisher = nack("a1")

    answers, _ = await harness.publish(
        claimed("a1", "a", attempts=1),
        claimed("b1", "b", attempts=1),
        claimed("a2", "a"),
        claimed("b2", "b"),
        claimed("c1"),
    )

    assert harness.calls() == [["a1", "b1", "c1"], ["b2"]]
    assert answers == [Nacked("no"), ACKED, None, ACKED, ACKED]


async def test_a_permanently_refused_head_unblocks_its_key() -> None:
    harness = PublishHarness()
    harness.publisher = nack("a1", permanent=True)

    answers, _ = await harness.publish(
        claimed("a1", "a", attempts=1), claimed("a2", "a"), claimed("a3", "a")
    )

    assert harness.calls() == [["a1"], ["a2", "a3"]]
    assert answers == [Nacked("no", permanent=True), ACKED, ACKED]


async def test_in_strict_mode_no_call_contains_two_messages_of_a_key() -> None:
    harness = PublishHarness(STRICT)

    await harness.publish(
        *[claimed(f"a{n}", "a") for n in range(3)],
        *[claimed(f"b{n}", "b") for n in range(2)],
        *[claimed(f"-{n}") for n in range(2)],
    )

    assert harness.calls() == [["a0", "b0", "-0", "-1"], ["a1", "b1"], ["a2"]]


async def test_in_strict_mode_nothing_overtakes_a_refused_message() -> None:
    harness = PublishHarness(STRICT)
    harness.publisher = nack("a1")

    answers, _ = await harness.publish(
        *[claimed(f"a{n}", "a") for n in range(4)], claimed("b0", "b")
    )

    assert answers == [ACKED, Nacked("no"), None, None, ACKED]


async def test_without_the_lease_nothing_is_published() -> None:
    harness = PublishHarness()
    harness.leases = iter([False])

    answers, lost = await harness.publish(claimed("a"), claimed("b", problem="odd"))

    assert answers == [None, Nacked("odd", permanent=True)]
    assert (lost, harness.calls()) == (None, [])
    assert harness.events == [StaleBatchDropped(messages=1)]


async def test_a_lease_lost_between_two_calls_stops_the_second() -> None:
    harness = PublishHarness(STRICT)
    harness.leases = iter([True, False])

    answers, _ = await harness.publish(claimed("a1", "a"), claimed("a2", "a"))

    assert answers == [ACKED, None]
    assert harness.calls() == [["a1"]]
    assert harness.events[-1] == StaleBatchDropped(messages=1)


async def test_an_unavailable_broker_gives_a_reason_and_no_answers() -> None:
    harness = PublishHarness()
    harness.publisher.away = "gone fishing"

    answers, lost = await harness.publish(claimed("a"), claimed("b", problem="odd"))

    assert answers == [None, Nacked("odd", permanent=True)]
    assert str(lost) == "gone fishing"


async def test_messages_acked_before_an_outage_stay_acked() -> None:
    harness = PublishHarness(STRICT)

    def disconnect_after_the_first(_: Message) -> Confirmation:
        harness.publisher.away = "gone"
        return ACKED

    harness.publisher.script = disconnect_after_the_first
    answers, lost = await harness.publish(claimed("a1", "a"), claimed("a2", "a"))

    assert answers == [ACKED, None]
    assert str(lost) == "gone"


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
    assert answers == [ACKED, Nacked("no"), None, ACKED]


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), OSError("no route")])
async def test_a_network_error_means_unavailable(error: OSError) -> None:
    harness = PublishHarness()

    def fail(_: Message) -> Confirmation:
        raise error

    harness.publisher.script = fail
    answers, lost = await harness.publish(claimed("a"))

    assert answers == [None]
    assert lost is not None
    assert lost.__cause__ is error


async def test_a_message_that_makes_the_publisher_raise_does_not_affect_others() -> (
    None
):
    harness = PublishHarness()

    def stumble(message: Message) -> Confirmation:
        if message.topic == "odd":
            raise KeyError(message.topic)
        return ACKED

    harness.publisher.script = stumble
    answers, lost = await harness.publish(claimed("a"), claimed("odd"), claimed("b"))

    assert answers == [ACKED, Nacked("KeyError: 'odd'"), ACKED]
    assert lost is None
    assert harness.publisher.topics() == ["a", "b"]


async def test_messages_behind_one_that_makes_the_publisher_raise_wait() -> None:
    harness = PublishHarness()

    def stumble(message: Message) -> Confirmation:
        if message.topic == "a1":
            raise KeyError(message.topic)
        return ACKED

    harness.publisher.script = stumble
    answers, _ = await harness.publish(
        claimed("a1", "a"), claimed("a2", "a"), claimed("b1", "b")
    )

    assert isinstance(answers[0], Nacked)
    assert not isinstance(answers[1], Acked)
    assert answers[2] == ACKED
    assert harness.publisher.topics() == ["b1"]


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
