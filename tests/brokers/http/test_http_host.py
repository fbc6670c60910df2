"""Whether the host or the message is to blame for a request without an answer."""

import pytest

from outbox.errors import BrokerUnavailableError
from pillarbox import uuid7
from relay.publishers.http import host as host_module
from relay.publishers.http.host import Host


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(host_module, "time", clock)
    return clock


def test_the_first_failure_is_not_charged_to_the_message(clock: Clock) -> None:
    assert not Host("it").blames(uuid7())


def test_a_message_that_keeps_failing_while_others_succeed_is_charged(
    clock: Clock,
) -> None:
    host, bad = Host("it"), uuid7()
    assert not host.blames(bad)
    host.answered(uuid7())
    assert not host.blames(bad), "too early to tell"
    clock.now += 31
    assert host.blames(bad)
    assert host.blames(bad), "until it is charged"
    host.forget(bad)
    assert not host.blames(bad)


def test_an_outage_costs_no_attempt_however_long_it_lasts(clock: Clock) -> None:
    host, unlucky = Host("it"), uuid7()
    for _ in range(100):
        assert not host.blames(unlucky)
        clock.now += 31


def test_an_answered_message_is_no_longer_a_suspect(clock: Clock) -> None:
    host, once = Host("it"), uuid7()
    host.blames(once)
    assert host.suspects(once)
    host.answered(once)
    assert not host.suspects(once)


def test_the_number_of_suspects_is_bounded(clock: Clock) -> None:
    host = Host("it")
    first = uuid7()
    host.blames(first)
    for _ in range(10_000):
        host.blames(uuid7())
    assert not host.suspects(first)


def test_five_refusals_in_a_row_blame_the_host_until_one_succeeds() -> None:
    host = Host("it")
    for _ in range(4):
        host.refused("HTTP 503")
    host.answered(uuid7())
    for _ in range(4):
        host.refused("HTTP 503")
    assert host.away is None
    host.refused("HTTP 503")
    assert "HTTP 503" in str(host.error())
    host.answered(uuid7())
    assert host.away is None


def test_a_pause_lasts_for_the_requested_time(clock: Clock) -> None:
    host = Host("it")
    host.pause(10)
    clock.now += 9
    with pytest.raises(BrokerUnavailableError, match="1 s of it remain"):
        host.check_pause()
    clock.now += 1
    host.check_pause()
