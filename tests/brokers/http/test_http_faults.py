"""The fault suite with a receiver of webhooks, and faults specific to it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from tests.acceptance.broker_faults import (
    TO_BE_CUT,
    Arrival,
    BrokerFaults,
    by_first_appearance,
)
from tests.acceptance.hook import Hook
from tests.fixtures.http import SECRET, SECRET_ENV

pytestmark = pytest.mark.fault


class TestHttp(BrokerFaults):
    @pytest.fixture(autouse=True)
    def broker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv(SECRET_ENV, SECRET)
        with Hook("recorder", tmp_path) as self.hook:
            yield

    @override
    def broker_url(self) -> str:
        return f"{self.hook.url}?secret_env={SECRET_ENV}&allow_private=true"

    @override
    def arrivals(self) -> Sequence[Arrival]:
        return self.hook.arrivals()

    @override
    def kill(self) -> None:
        self.hook.kill()

    @override
    def start(self) -> None:
        self.hook.start()

    @pytest.mark.long
    @pytest.mark.timeout(900)
    def test_a_gateway_that_answers_for_a_dead_receiver_costs_few_attempts(
        self,
    ) -> None:
        relay = self.drain()
        self.hook.close()
        self.writer.add(TO_BE_CUT)
        relay.wait_for_log("BrokerLost", times=3)
        assert "keeps refusing messages: HTTP 503" in relay.log()
        assert self.inspection.unsettled()
        # Up to four refusals in a row are charged to their messages.
        charged = self.inspection.charged()
        assert charged < 5
        relay.wait_for_log("BrokerLost", times=5)
        assert self.inspection.charged() == charged
        # It opens in a pause: within an attempt, the messages refused before it opened
        # would be charged.
        tried = relay.log().count("BrokerLost")
        relay.wait_for_log("BrokerLost", times=tried + 1)
        self.hook.open()
        self.inspection.wait_until_settled()
        assert by_first_appearance(self.hook.arrivals()) == self.writer.numbers()
        assert self.inspection.charged() == charged
