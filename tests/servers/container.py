"""PostgreSQL in a container of the project's image, started with testcontainers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from pillarbox.outbox.testing.cluster import CRON_SETTINGS, NOT_DURABLE, SETTINGS
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.waiting import wait_for

IMAGE: Final = "pillarbox-postgres"


@contextmanager
def server_in_container(settings: Mapping[str, str]) -> Iterator[PostgresServer]:
    """Yield a server that the test can't stop; remove its container after the block."""
    # testcontainers' watchdog is an image that must be pulled from a registry.
    testcontainers_config.ryuk_disabled = True
    port = free_port()
    options = {**SETTINGS, **CRON_SETTINGS, **NOT_DURABLE, **settings}
    options["listen_addresses"] = "*"
    container = DockerContainer(IMAGE)
    container.with_env("POSTGRES_DB", "pillarbox")
    container.with_env("POSTGRES_HOST_AUTH_METHOD", "trust")
    local: Any = ("127.0.0.1", port)
    container.ports["5432/tcp"] = local
    container.with_kwargs(shm_size="256m")
    arguments = [f"--{name}={value}" for name, value in options.items()]
    container.with_command(["postgres", *arguments])
    url = f"postgresql://postgres@127.0.0.1:{port}/pillarbox"
    with container:
        wait_for("the container", lambda: answers(url), seconds=120)
        yield PostgresServer(url)


def answers(url: str) -> bool:
    """Return whether the database is initialized and accepts connections."""
    try:
        psycopg.connect(url, connect_timeout=10).close()
    except psycopg.OperationalError:
        return False
    return True
