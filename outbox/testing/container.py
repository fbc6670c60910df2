"""PostgreSQL in a container of the project's image, by testcontainers."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from outbox.errors import ConfigError
from outbox.testing.cluster import NOT_DURABLE, SETTINGS, StopMode
from outbox.testing.lifetime import free_port

__all__ = ["IMAGE", "docker_has_the_image", "private_container"]

IMAGE = "pillarbox-postgres"

SIGNALS = {"smart": "SIGTERM", "fast": "SIGINT", "immediate": "SIGQUIT"}


class Container:
    """One container of the image, on a port of ours that stays the same."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        from testcontainers.postgres import PostgresContainer

        self._port = free_port()
        inside = SETTINGS | {"listen_addresses": "*"} | dict(settings)
        options = " ".join(f"-c '{name}={value}'" for name, value in inside.items())
        local: Any = ("127.0.0.1", self._port)
        self.container = (
            PostgresContainer(IMAGE, username="postgres", dbname="pillarbox")
            .with_env("POSTGRES_HOST_AUTH_METHOD", "trust")
            .with_bind_ports(5432, local)
            .with_command(f"postgres {options}")
        )

    @property
    def url(self) -> str:
        """The main database."""
        return f"postgresql://postgres@127.0.0.1:{self._port}/pillarbox"

    def start(self) -> None:
        """Start, and return when connections are accepted."""
        self.container.get_wrapped_container().start()
        self.container._connect()

    def stop(self, mode: StopMode) -> None:
        """Stop with the signal of that mode, and return when it is over."""
        wrapped = self.container.get_wrapped_container()
        wrapped.kill(signal=SIGNALS[mode])
        wrapped.wait()


@contextmanager
def private_container(
    settings: Mapping[str, str], *, durable: bool = True
) -> Iterator[Container]:
    """Give a running container that is gone after the block.

    Testcontainers' own watchdog removes it if this process is killed.
    """
    if not docker_has_the_image():
        raise ConfigError(
            f"docker has no image {IMAGE}, or testcontainers is not installed, or no "
            f"engine answers; build it with: docker build -t {IMAGE} docker/postgres"
        )
    container = Container(settings if durable else NOT_DURABLE | dict(settings))
    with container.container:
        yield container


def docker_has_the_image() -> bool:
    """Ask the engine, if there is one, for the project's image."""
    program = shutil.which("docker")
    if program is None or find_spec("testcontainers") is None:
        return False
    asked = subprocess.run(
        [program, "image", "inspect", IMAGE], capture_output=True, check=False
    )
    return asked.returncode == 0
