"""The suite of broker faults, with Redis and PostgreSQL as brokers."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from redis import Redis
from typing_extensions import override

from pillarbox.outbox.testing.postgres import PostgresServer
from tests.acceptance.broker_faults import TOPIC, Arrival, BrokerFaults
from tests.fixtures.sessions import execute
from tests.servers.redis import redis_server

pytestmark = pytest.mark.fault


class TestRedis(BrokerFaults):
    @pytest.fixture(autouse=True)
    def broker(self) -> Iterator[None]:
        # With these settings, Redis loses nothing when killed.
        durable = {"appendonly": "yes", "appendfsync": "always"}
        with redis_server(durable) as self.server:
            yield

    @override
    def broker_url(self) -> str:
        return self.server.url

    @override
    def arrivals(self) -> Sequence[Arrival]:
        with Redis.from_url(self.server.url, decode_responses=True) as client:
            entries: Any = client.xrange(TOPIC)
        return [
            (e["ce_id"], e["ce_partitionkey"], int(e["ce_data"])) for _, e in entries
        ]

    @override
    def kill(self) -> None:
        self.server.kill()

    @override
    def start(self) -> None:
        self.server.start()

    @pytest.mark.timeout(900)
    def test_full_memory_costs_no_attempt(self) -> None:
        relay = self.drain()
        with Redis.from_url(self.server.url) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1")
            self.expect_lost(relay, times=3)
            assert "used memory" in relay.log()
            client.config_set("maxmemory", "0")
        self.expect_all(relay)


class TestPostgres(BrokerFaults):
    server: PostgresServer

    @pytest.fixture(autouse=True)
    def broker(self, migrated_server: PostgresServer) -> None:
        self.server = migrated_server
        self.url = migrated_server.url

    @override
    def broker_url(self) -> str:
        return self.url

    @override
    def arrivals(self) -> Sequence[Arrival]:
        return execute(
            self.url,
            "SELECT id::text, key, convert_from(payload, 'UTF8')::int"
            " FROM outbox.message ORDER BY seq",
        )

    @override
    def kill(self) -> None:
        self.server.stop("immediate")

    @override
    def start(self) -> None:
        self.server.start()

    @pytest.mark.timeout(900)
    def test_a_read_only_broker_costs_no_attempt(self) -> None:
        relay = self.drain()
        self.set_read_only("on")
        self.expect_lost(relay, times=3)
        assert "read-only" in relay.log()
        self.set_read_only("off")
        self.expect_all(relay)

    @pytest.mark.timeout(900)
    def test_a_full_disk_costs_no_attempt(self) -> None:
        relay = self.drain()
        execute(
            self.url,
            "CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " RAISE disk_full USING MESSAGE = 'could not extend file'; END $$",
        )
        execute(
            self.url,
            "CREATE TRIGGER disk BEFORE INSERT ON outbox.message"
            " FOR EACH STATEMENT EXECUTE FUNCTION fill()",
        )
        self.expect_lost(relay, times=3)
        assert "could not extend file" in relay.log()
        execute(self.url, "DROP TRIGGER disk ON outbox.message")
        self.expect_all(relay)

    def set_read_only(self, value: str) -> None:
        execute(self.url, f"ALTER SYSTEM SET default_transaction_read_only = {value}")
        execute(self.url, "SELECT pg_reload_conf()")
