"""The PostgreSQL server of the tests, in a container."""

import psycopg

from pillarbox.outbox.testing.postgres import PostgresServer
from tests.servers.container import server_in_container


def test_a_server_in_a_container_has_pg_cron_and_the_given_settings() -> None:
    with server_in_container({"work_mem": "7MB"}) as server:
        assert "pg_cron" in shown(server, "shared_preload_libraries")
        assert shown(server, "work_mem") == "7MB"


def shown(server: PostgresServer, setting: str) -> str:
    with psycopg.connect(server.url) as connection:
        row = connection.execute(f"SHOW {setting}").fetchone()
    assert row is not None
    return str(row[0])
