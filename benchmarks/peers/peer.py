"""Run a peer's driver in an environment with only that peer installed."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workload import Workload
from pillarbox.outbox.errors import OutboxError

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENTS = REPOSITORY / ".venv-peers"


class PeerError(OutboxError):
    """A peer's environment could not be created, or its driver failed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library: its name in the output and its package in `benchmarks.peers`."""

    label: str
    package: str

    @property
    def lock(self) -> Path:
        """The pinned requirements with their hashes."""
        return Path(__file__).parent / self.package / "requirements.lock"

    @property
    def environment(self) -> Path:
        """Where the peer is installed."""
        return ENVIRONMENTS / self.package

    @property
    def packages(self) -> Path:
        """The directory that makes the peer importable, if put on an import path."""
        self.python()
        (found,) = self.environment.glob("lib/python*/site-packages")
        return found

    def drain(
        self, database_url: str, workload: Workload, *, broker_url: str | None = None
    ) -> float:
        """Fill the peer's own table in an empty database, drain it, return messages/s.

        The destination is the broker, or a handler that does nothing.
        """
        command = [
            str(self.python()),
            "-m",
            f"benchmarks.peers.{self.package}.drain",
            f"--database-url={database_url}",
            f"--messages={workload.messages}",
            f"--payload-bytes={workload.payload_bytes}",
            f"--keys={workload.keys}",
            *([f"--broker-url={broker_url}"] if broker_url is not None else []),
        ]
        outcome = json.loads(self._run(command))
        if outcome["messages"] != workload.messages:
            raise PeerError(f"{self.label} drained {outcome}, not all of {workload}")
        return float(outcome["messages"] / outcome["seconds"])

    def python(self) -> Path:
        """Return the interpreter of the peer's environment; create it if it is missing.

        If the lock file has changed, a new environment is created.
        """
        digest = hashlib.sha256(self.lock.read_bytes()).hexdigest()
        environment = self.environment
        stamp = environment / "requirements.sha256"
        python = environment / "bin" / "python"
        if not stamp.exists() or stamp.read_text() != digest:
            shutil.rmtree(environment, ignore_errors=True)
            ENVIRONMENTS.mkdir(exist_ok=True)
            (ENVIRONMENTS / ".gitignore").write_text("*\n")
            print(f"installing {self.label} into {environment} …", file=sys.stderr)
            self._run([sys.executable, "-m", "venv", str(environment)])
            install = ["-m", "pip", "install", "--quiet", "--require-hashes"]
            self._run(
                [
                    str(python),
                    *install,
                    "--disable-pip-version-check",
                    f"--requirement={self.lock}",
                ]
            )
            stamp.write_text(digest)
        return python

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=REPOSITORY, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise PeerError(
                f"{self.label}: {' '.join(command)} ended with {done.returncode}:\n"
                f"{done.stderr.strip()}"
            )
        return done.stdout


TXOUTBOX = Peer("txoutbox 0.2.2", "txoutbox")
FASTSTREAM_OUTBOX = Peer("faststream-outbox 0.19.0", "faststream_outbox")
AIO_PIKA = Peer("aio-pika 10.2.1", "aio_pika")
PGQUEUER = Peer("pgqueuer 1.6.0", "pgqueuer")
PROCRASTINATE = Peer("procrastinate 3.10.0", "procrastinate")
