"""Run the suites and the faults of each broker over old and new servers.

    python -m tests.matrix                   all of them: takes hours
    python -m tests.matrix nats valkey       all servers of these brokers
    python -m tests.matrix rabbitmq-forky    this one
    python -m tests.matrix --get nats        only gets them, and prints their folders
    python -m tests.matrix --full            faults in their full numbers

It needs root. What can't be had is named in the table:

    Debian's of bookworm, trixie and forky     by debootstrap and apt
    nats-newest                                by go install
    kafka                                      by Maven, for Java
    postgresql-14 and -16, without pg_cron     by npm, and pg_partman from Debian

The client libraries are tried over each server, too, at the lowest versions that
pyproject.toml allows and at the newest. Everything is kept in $MATRIX, by default
/var/cache/pillarbox-matrix, with the output of each run in a .log; remove a server's
folder there to get it anew. To run other tests on one:

    PILLARBOX_TEST_SERVERS=FOLDER pytest …
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from pillarbox.outbox.errors import ConfigError
from tests.matrix.getting import (
    CACHE,
    debian,
    go_nats,
    maven_kafka,
    npm_postgresql,
    version_of,
)

WHERE: Final = ("tests/brokers", "tests/acceptance", "tests/relay", "tests/inbox")
FAULTS: Final = ("chaos", "relay_faults", "failover", "consumer_kills")
TESTS: Final[Mapping[str, Sequence[str]]] = {
    "nats": (*WHERE, "-k", "nats"),
    "rabbitmq": (*WHERE, "-k", "rabbitmq"),
    "redis": (*WHERE, "-k", "redis"),
    "valkey": (*WHERE, "-k", "redis"),
    # Otherwise the mock is tested.
    "kafka": (*WHERE, "--full", "-k", "kafka and (real or cluster or security)"),
    "postgresql": (
        *("tests/brokers/postgres", "tests/plans", "tests/outbox/test_schema.py"),
        *(f"tests/acceptance/test_{name}.py" for name in FAULTS),
        *("-k", "not (redis or nats or rabbitmq or kafka or sqs or cron)"),
    ),
}
EXTRAS: Final = {"valkey": "redis", "postgresql": "asyncpg"}
"""The extra whose client library talks to the server, if it isn't its name."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and how to get the folder with its programs."""

    broker: str
    source: str
    get: Callable[[], Path]

    @property
    def name(self) -> str:
        return f"{self.broker}-{self.source}"


def servers() -> Iterator[Server]:
    """Yield all servers, the oldest of each broker first."""
    for release in ("bookworm", "trixie", "forky"):
        for broker in ("nats", "rabbitmq", "redis", "valkey", "postgresql"):
            if (broker, release) != ("valkey", "bookworm"):
                yield Server(broker, release, partial(debian, broker, release))
    yield Server("nats", "newest", go_nats)
    for version in ("3.9.1", "4.4.0"):
        yield Server("kafka", version, partial(maven_kafka, version))
    for version, helper in (
        ("14.23.0-beta.17", "bookworm"),
        ("16.14.0-beta.17", "trixie"),
    ):
        get = partial(npm_postgresql, version, helper)
        yield Server("postgresql", version.partition(".")[0], get)


def tested(folder: Path, arguments: Sequence[str], log: Path) -> str:
    """Run the tests with the servers of a folder; return pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    ended = followed(command, folder, log)
    summary = re.findall(
        r"^=* ?(\d+ .* in [\d.]+s.*?) ?=*$", log.read_text(), re.MULTILINE
    )
    return str(summary[-1]) if summary else f"status {ended}"


def installed(folder: Path, extra: str, log: Path) -> str:
    """Try the client library at its lowest and newest; return what was found."""
    ended = followed([sys.executable, "-m", "tests.install", extra], folder, log)
    found = re.findall(r"^\d+ passed, \d+ failed", log.read_text(), re.MULTILINE)
    return str(found[-1]) if found else f"status {ended}"


def followed(command: Sequence[str], folder: Path, log: Path) -> int:
    """Run a command whose output goes to a file; return its status."""
    chosen = os.environ | {"PILLARBOX_TEST_SERVERS": str(folder)}
    with log.open("w") as output:
        done = subprocess.run(
            command, check=False, env=chosen, stdout=output, stderr=subprocess.STDOUT
        )
    return done.returncode


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    everything = [*servers()]
    names = {server.name for server in everything} | {*TESTS}
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=", ".join(sorted(names))
    )
    parser.add_argument("--get", action="store_true", help="get them, and run no tests")
    parser.add_argument("--full", action="store_true", help="see above")
    parser.add_argument(
        "--workers", default="2", help="that share the tests; default: 2"
    )
    options = parser.parse_args()
    if unknown := {*options.names} - names:
        parser.error(f"no such server: {', '.join(sorted(unknown))}")
    wanted = {*options.names} or names
    common = ["-n", options.workers, *(["--full"] if options.full else [])]
    CACHE.mkdir(parents=True, exist_ok=True)
    ok = True
    print("| server | version | suites and faults | client, lowest and newest | on |")
    print("|---|---|---|---|---|", flush=True)
    for server in everything:
        if not {server.name, server.broker} & wanted:
            continue
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        try:
            folder = server.get()
            version = version_of(folder)
        except ConfigError as error:
            print(f"| {server.name} | not to be had: {error} ||| {today} |", flush=True)
            continue
        if options.get:
            print(f"| {server.name} | {version} | {folder} || {today} |", flush=True)
            continue
        log = CACHE / f"{server.name}.log"
        found = tested(folder, [*common, *TESTS[server.broker]], log)
        clients = "of the mock"
        if server.broker != "kafka":
            extra = EXTRAS.get(server.broker, server.broker)
            clients = installed(folder, extra, CACHE / f"{server.name}.clients.log")
        ok &= not re.search(r"[1-9]\d* (failed|error)|status", f"{found} {clients}")
        print(
            f"| {server.name} | {version} | {found} | {clients} | {today} |", flush=True
        )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
