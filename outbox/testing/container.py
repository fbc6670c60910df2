"""PostgreSQL in a container of the project's image, by testcontainers."""

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
from outbox.testing.cluster import NOT_DURABLE, SETTINGS, StopMode
from outbox.testing.lifetime import free_port

__all__ = ["IMAGE", "docker_has_the_image", "private_container"]

IMAGE = "pillarbox-postgres"

SIGNALS = {"smart": "SIGTERM", "fast": "SIGINT", "immediate": "SIGQUIT"}
START_SECONDS = 120

# Ends with the pipe from us, however that comes, and takes the container along.
WATCHDOG = 'cat >/dev/null; exec "$1" rm --force --volumes "$2"'


class Container:
    """One container of the image, on a port of ours that stays the same."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        from testcontainers.core.container import DockerContainer

        self._port = free_port()
        self.name = f"pillarbox-{uuid4()}"
        """What the engine calls it."""
        self.container = DockerContainer(IMAGE, name=self.name)
        self.container.with_env("POSTGRES_DB", "pillarbox")
        self.container.with_env("POSTGRES_HOST_AUTH_METHOD", "trust")
        local: Any = ("127.0.0.1", self._port)
        self.container.ports["5432/tcp"] = local
        self.container.with_kwargs(shm_size="256m")
        inside = SETTINGS | {"listen_addresses": "*"} | dict(settings)
        options = [f"--{name}={value}" for name, value in inside.items()]
        self.container.with_command(["postgres", *options])

    @property
    def url(self) -> str:
        """The main database."""
        return f"postgresql://postgres@127.0.0.1:{self._port}/pillarbox"

    @property
    def _wrapped(self) -> Any:
        return self.container.get_wrapped_container()

    def start(self) -> None:
        """Start, and return when connections are accepted."""
        self._wrapped.start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Return when connections are accepted, which they are not while it is made."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=10).close()
            except psycopg.OperationalError:
                self._wrapped.reload()
                if self._wrapped.status != "running" or time.monotonic() > deadline:
                    log = self._wrapped.logs(tail=20).decode(errors="replace")
                    raise OutboxError(
                        f"the container of {IMAGE} accepts no connections:\n{log}"
                    ) from None
                time.sleep(0.1)
            else:
                return

    def stop(self, mode: StopMode) -> None:
        """Stop with the signal of that mode, and return when it is over."""
        self._wrapped.kill(signal=SIGNALS[mode])
        self._wrapped.wait()


@contextmanager
def private_container(
    settings: Mapping[str, str], *, durable: bool = True
) -> Iterator[Container]:
    """Yield a running container that is gone after the block, or with this process."""
    program = shutil.which("docker")
    if program is None or not docker_has_the_image():
        raise ConfigError(
            f"docker has no image {IMAGE}, or testcontainers is not installed, or no "
            f"engine answers; build it with: docker build -t {IMAGE} docker/postgres"
        )
    from testcontainers.core.config import testcontainers_config

    # Its own watchdog is an image that a registry would have to give.
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
    """Have the container removed if we don't get to do it."""
    watchdog = subprocess.Popen(
        ["/bin/sh", "-c", WATCHDOG, "watchdog", program, container],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Control-C in the terminal is for us, who then end everything in order.
        start_new_session=True,
        cwd="/",
    )
    try:
        yield
    finally:
        watchdog.communicate()


def docker_has_the_image() -> bool:
    """Ask the engine, if there is one, for the project's image."""
    program = shutil.which("docker")
    if program is None or find_spec("testcontainers") is None:
        return False
    asked = subprocess.run(
        [program, "image", "inspect", IMAGE], capture_output=True, check=False
    )
    return asked.returncode == 0
