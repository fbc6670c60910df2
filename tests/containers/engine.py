"""The Docker engine of the tests, and projects of docker/compose.yaml in it."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from pillarbox.outbox.testing.lifetime import free_port

# Those that the compose file publishes; by default, fixed ones.
PORTS = ("PILLARBOX_WEB_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"
SECONDS = 600


def run(
    *command: str, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and print its output if it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        cwd=ROOT,
        # Otherwise Compose writes its progress with terminal codes.
        env=os.environ | environment | {"COMPOSE_ANSI": "never", "NO_COLOR": "1"},
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done


def docker(*arguments: str) -> str:
    """Return docker's output."""
    return run("docker", *arguments).stdout.strip()


def inspected(kind: str, name: str) -> dict[str, Any]:
    """Return docker's description of an image or a container."""
    (found,) = json.loads(docker(kind, "inspect", name))
    return dict(found)


def has_image(name: str) -> bool:
    """Return whether a Docker engine answers and has an image."""
    try:
        return run("docker", "image", "inspect", name, check=False).returncode == 0
    except OSError:
        return False


def compose_program() -> tuple[str, ...]:
    """Return the command of Compose: docker's plugin, or else docker-compose."""
    plugin = run("docker", "compose", "version", check=False)
    return ("docker", "compose") if plugin.returncode == 0 else ("docker-compose",)


class Project:
    """A separate project of the compose file."""

    def __init__(self, *options: str) -> None:
        self._name = f"pillarbox-test-{uuid4().hex[:8]}"
        self._options = ("-p", self._name, "-f", str(DOCKER / "compose.yaml"), *options)
        self.ports = {name: str(free_port()) for name in PORTS}

    def compose(
        self, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a Compose command."""
        command = (*compose_program(), *self._options, *arguments)
        return run(*command, check=check, **self.ports)

    def pillarbox(
        self, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as the administrator."""
        once = ("run", "--rm", "-T", "--no-deps", "migrations", "pillarbox")
        return self.compose(*once, *arguments, check=check)

    def psql(self, query: str) -> str:
        """Query the database, as the administrator."""
        psql = ("psql", "-U", "postgres", "-d", "shop", "-AtX", "-c", query)
        return self.compose("exec", "-T", "database", *psql).stdout.strip()

    def container(self, service: str) -> str:
        """Return the id of a service's container, even if it has ended."""
        return docker(
            *("ps", "--all", "--quiet", "--filter"),
            f"label=com.docker.compose.project={self._name}",
            *("--filter", f"label=com.docker.compose.service={service}"),
            *("--filter", "label=com.docker.compose.oneoff=False"),
        )

    def state(self, service: str) -> dict[str, Any]:
        """Return the state of a service's container."""
        return dict(inspected("container", self.container(service))["State"])


@contextmanager
def running_project(*options: str) -> Iterator[Project]:
    """Start everything but the shop; remove it with its data afterwards."""
    run(str(DOCKER / "make-secrets"))
    project = Project(*options)
    try:
        project.compose("up", "-d", "--no-build")
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "30", check=False)
