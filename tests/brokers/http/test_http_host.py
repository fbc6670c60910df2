"""Whether the host or the message is to blame for a request without an answer."""

import pytest

from pillarbox import uuid7
from pillarbox.relay.publishers.http import host as host_module
from pillarbox.relay.publishers.http.host import Host


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
