"""The PostgreSQL server of `pillarbox dev`: which one, and how to start it."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from outbox.dev.project import Project
from outbox.errors import ConfigError, OutboxError
from outbox.testing.cluster import (
    CRON_SETTINGS,
    SETTINGS,
    Cluster,
    find_binaries,
    missing_extensions,
    server_directories,
    usable,
)
from outbox.testing.lifetime import unprivileged_user

__all__ = ["Server", "choose_server"]

_SETTINGS: Final = {
    **SETTINGS,
    "unix_socket_directories": "",
    # For many partitions, compiling a plan takes longer than executing it.
    "jit": "off",
    "log_checkpoints": "off",
}


def choose_server(project: Project) -> "Server":
    """Return the server that made a project's data, or for a new one this machine's.

    Raises:
        ConfigError: there is none, or none of the version that made the data.
    """
    if project.data.exists():
        return Server(_binaries_for(project), project)
    return Server(find_binaries(), project)


class Server:
    """A server that a process of ours runs in the foreground; SIGINT stops it.

    The programs in a directory run it, with its data in the project.

    Attributes:
        name: what it is, for a person.
        process: the arguments of `Popen` besides the command.
    """

    def __init__(self, binaries: Path, project: Project) -> None:
        self.name = f"PostgreSQL {_major(binaries)}, {binaries}"
        self._binaries = binaries
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
        data = Cluster(self._binaries, new, self._user).initialize()
        self._protect(data)
        data.rename(self._project.data)
        shutil.rmtree(new)

    def _protect(self, data: Path) -> None:
        """Let nobody connect without the password in the project's URL.

        Whoever can connect as `postgres` can run programs as the user of the server.
        """
        done = subprocess.run(
            [self._binaries / "postgres", "--single", "-F", "-D", data, "postgres"],
            input=f"ALTER ROLE postgres PASSWORD '{self._project.password}';\n",
            text=True,
            capture_output=True,
            check=False,
            **self.process,
        )
        if done.returncode != 0:
            raise OutboxError(f"postgres --single failed: {done.stderr.strip()}")
        (data / "pg_hba.conf").write_text("host all all 127.0.0.1/32 scram-sha-256\n")

    def command(self) -> Sequence[str | Path]:
        """Return the command that runs the server."""
        settings = _SETTINGS | {"port": str(self._project.port)}
        if "pg_cron" not in missing_extensions(self._binaries):
            settings |= CRON_SETTINGS | {"cron.log_statement": "off"}
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [self._binaries / "postgres", "-D", self._project.data, *options]


def _binaries_for(project: Project) -> Path:
    made_by = (project.data / "PG_VERSION").read_text().strip()
    found = [d for d in server_directories() if (d / "postgres").exists()]
    for binaries in found:
        if _major(binaries) == made_by:
            return usable(binaries)
    raise ConfigError(
        f"the data of {project.folder} were made by PostgreSQL {made_by}, which is not "
        "found any more; install it again, or begin anew with --reset"
    )


def _major(binaries: Path) -> str:
    """Return the major version of a server's programs."""
    said = subprocess.run(
        [binaries / "postgres", "--version"], capture_output=True, text=True, check=True
    )
    # postgres (PostgreSQL) 15.19 (Debian 15.19-0+deb12u1)
    return said.stdout.split()[2].partition(".")[0]
