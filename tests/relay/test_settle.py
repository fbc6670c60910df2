"""The settlement that follows from the answers of the publisher."""

from datetime import timedelta

from outbox.retry import RetryPolicy
from relay.claim import Claimed
from relay.publish import Answer
from relay.publisher import Acked, Nacked
from relay.settle import Settlement, decide
from tests.fixtures.claimed import claimed

SECOND = timedelta(seconds=1)
POLICY = RetryPolicy(max_attempts=3, first_delay=SECOND, max_delay=SECOND)
LATER = Nacked("later", retry_after=7 * SECOND)
ACKED, REFUSED, FORBIDDEN = Acked(), Nacked("no"), Nacked("never", permanent=True)


def settle(*pairs: tuple[Claimed, Answer]) -> Settlement:
    return decide([row for row, _ in pairs], [answer for _, answer in pairs], POLICY)


def test_acked_messages_are_published() -> None:
    one, other = claimed("a", "k"), claimed("b")

    settlement = settle((one, ACKED), (other, ACKED))

    assert settlement.published == [one, other]


def test_without_an_answer_nothing_is_recorded() -> None:
    row = claimed("a", "k")

    settlement = settle((row, None))

    assert settlement.untouched == [row]
    assert settlement.published == []


def test_a_refused_message_is_retried_with_its_reason_after_a_delay() -> None:
    row = claimed("a", "k")

    assert settle((row, REFUSED)).retried == [(row, "no", 1.0)]


def test_only_the_first_refused_message_of_a_key_is_charged() -> None:
    first, second, third = (claimed(topic, "k") for topic in "abc")

    settlement = settle((first, REFUSED), (second, REFUSED), (third, None))

    assert settlement.retried == [(first, "no", 1.0)]
    assert settlement.held == [second, third]


def test_each_message_without_a_key_is_charged() -> None:
    rows = [claimed(topic) for topic in "abc"]

    settlement = settle(*[(row, REFUSED) for row in rows])

    assert [row for row, _, _ in settlement.retried] == rows


def test_each_key_is_charged_separately() -> None:
    rows = [claimed("a", "k"), claimed("b", "j")]

    settlement = settle(*[(row, REFUSED) for row in rows])

    assert [row for row, _, _ in settlement.retried] == rows


def test_the_last_refusal_dead_letters_a_message() -> None:
    row = claimed("a", "k", attempts=2)

    settlement = settle((row, REFUSED))

    assert settlement.dead_lettered == [(row, "no")]
    assert settlement.retried == []


def test_the_last_but_one_refusal_is_retried() -> None:
    row = claimed("a", "k", attempts=1)

    assert settle((row, REFUSED)).retried == [(row, "no", 1.0)]


def test_a_permanent_refusal_dead_letters_a_message_at_once() -> None:
    row = claimed("a", "k")

    assert settle((row, FORBIDDEN)).dead_lettered == [(row, "never")]


def test_a_permanent_refusal_behind_a_waiting_head_counts() -> None:
    head, behind = claimed("a", "k"), claimed("b", "k")

    settlement = settle((head, REFUSED), (behind, FORBIDDEN))

    assert settlement.retried == [(head, "no", 1.0)]
    assert settlement.dead_lettered == [(behind, "never")]


def test_a_spent_message_behind_a_waiting_head_is_not_charged() -> None:
    head, behind = claimed("a", "k"), claimed("b", "k", attempts=2)

    settlement = settle((head, REFUSED), (behind, REFUSED))

    assert settlement.held == [behind]
    assert settlement.dead_lettered == []


def test_an_ack_behind_a_refused_head_is_still_an_ack() -> None:
    head, behind = claimed("a", "k"), claimed("b", "k")

    settlement = settle((head, REFUSED), (behind, ACKED))

    assert settlement.published == [behind]


def test_the_message_behind_a_spent_head_is_not_charged() -> None:
    head, behind = claimed("a", "k", attempts=2), claimed("b", "k", attempts=0)

    settlement = settle((head, REFUSED), (behind, REFUSED))

    assert settlement.dead_lettered == [(head, "no")]
    assert settlement.retried == []
    assert settlement.untouched == [behind]


def test_a_message_without_an_answer_waits_behind_a_refused_one() -> None:
    before, head, behind = (claimed(topic, "k") for topic in "abc")

    settlement = settle((before, None), (head, REFUSED), (behind, None))

    assert settlement.untouched == [before]
    assert settlement.held == [behind]


def test_a_postponed_message_is_retried_after_the_requested_time() -> None:
    row = claimed("a", "k", attempts=2)

    settlement = settle((row, LATER))

    assert settlement.put_off == [(row, "later", 7.0)]
    assert settlement.retried == []
    assert settlement.dead_lettered == []


def test_nothing_is_postponed_for_less_than_the_first_delay() -> None:
    row = claimed("a", "k")

    settlement = settle((row, Nacked("now", retry_after=timedelta(0))))

    assert settlement.put_off == [(row, "now", 1.0)]


def test_messages_behind_a_postponed_one_wait_without_charge() -> None:
    head, behind, last = (claimed(topic, "k", attempts=2) for topic in "abc")

    settlement = settle((head, LATER), (behind, REFUSED), (last, LATER))

    assert settlement.put_off == [(head, "later", 7.0)]
    assert settlement.held == [behind, last]
    assert settlement.retried == []
    assert settlement.dead_lettered == []
