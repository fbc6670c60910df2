"""PostgreSQL in a container of the project's image, started with testcontainers."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

import psycopg

from outbox.errors import ConfigError, OutboxError
from outbox.testing.cluster import CRON_SETTINGS, NOT_DURABLE, SETTINGS, StopMode
from outbox.testing.lifetime import free_port

__all__ = ["IMAGE", "docker_has_the_image", "private_container"]

IMAGE = "pillarbox-postgres"

SIGNALS = {"smart": "SIGTERM", "fast": "SIGINT", "immediate": "SIGQUIT"}
START_SECONDS = 120

# Removes the container when this process's end of the pipe closes, for any reason.
WATCHDOG = 'cat >/dev/null; exec "$1" rm --force --volumes "$2"'


class Container:
    """One container of the image, on a local port that survives restarts."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        from testcontainers.core.container import DockerContainer

        self._port = free_port()
        self.name = f"pillarbox-{uuid4()}"
        """The container's name in Docker."""
        self.container = DockerContainer(IMAGE, name=self.name)
        self.container.with_env("POSTGRES_DB", "pillarbox")
        self.container.with_env("POSTGRES_HOST_AUTH_METHOD", "trust")
        local: Any = ("127.0.0.1", self._port)
        self.container.ports["5432/tcp"] = local
        self.container.with_kwargs(shm_size="256m")
        inside = SETTINGS | CRON_SETTINGS
        inside |= {"listen_addresses": "*"} | dict(settings)
        options = [f"--{name}={value}" for name, value in inside.items()]
        self.container.with_command(["postgres", *options])

    @property
    def url(self) -> str:
        """The URL of the main database."""
        return f"postgresql://postgres@127.0.0.1:{self._port}/pillarbox"

    @property
    def _wrapped(self) -> Any:
        return self.container.get_wrapped_container()

    def start(self) -> None:
        """Start the container, and return when it accepts connections."""
        self._wrapped.start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the database is initialized and accepts connections."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=10).close()
            except psycopg.OperationalError:
                self._wrapped.reload()
                if self._wrapped.status != "running" or time.monotonic() > deadline:
                    log = self._wrapped.logs(tail=20).decode(errors="replace")
                    raise OutboxError(
                        f"the container of image {IMAGE} accepts no connections:\n{log}"
                    ) from None
                time.sleep(0.1)
            else:
                return

    def stop(self, mode: StopMode) -> None:
        """Stop the server with the signal for `mode`, and wait until it has stopped."""
        self._wrapped.kill(signal=SIGNALS[mode])
        self._wrapped.wait()


@contextmanager
def private_container(
    settings: Mapping[str, str], *, durable: bool = True
) -> Iterator[Container]:
    """Yield a running container; remove it after the block, or with this process."""
    program = shutil.which("docker")
    if program is None or not docker_has_the_image():
        raise ConfigError(
            f"Docker isn't running, has no image {IMAGE}, or testcontainers is not "
            f"installed; build the image with: docker build -t {IMAGE} docker/postgres"
        )
    from testcontainers.core.config import testcontainers_config

    # testcontainers' own watchdog is an image that must be pulled from a registry.
    testcontainers_config.ryuk_disabled = True
    container = Container(settings if durable else NOT_DURABLE | dict(settings))
    with watched(program, container.name):
        try:
            container.container.start()
            container.wait_until_ready()
            yield container
        finally:
            container.container.get_docker_client().client.close()


@contextmanager
def watched(program: str, container: str) -> Iterator[None]:
    """Make sure that the container is removed, even if this process is killed."""
    watchdog = subprocess.Popen(
        ["/bin/sh", "-c", WATCHDOG, "watchdog", program, container],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Control-C in the terminal must reach only this process, which then cleans up.
        start_new_session=True,
        cwd="/",
    )
    try:
        yield
    finally:
        watchdog.communicate()


def docker_has_the_image() -> bool:
    """Return whether Docker is available and has the project's image."""
    program = shutil.which("docker")
    if program is None or find_spec("testcontainers") is None:
        return False
    asked = subprocess.run(
        [program, "image", "inspect", IMAGE], capture_output=True, check=False
    )
    return asked.returncode == 0
