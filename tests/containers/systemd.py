"""A container whose first process is systemd."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import uuid4

from tests.containers.engine import ROOT, docker, run
from tests.fixtures.waiting import wait_for

IMAGE: Final = "pillarbox-systemd"


class Systemd:
    """The systemd of a container."""

    def __init__(self, name: str) -> None:
        self.name = name

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """Run systemctl, and return its output."""
        command = ("docker", "exec", self.name, "systemctl", *arguments)
        return run(*command, check=check).stdout.strip()

    def shown(self, unit: str, *properties: str) -> list[str]:
        """Return the values of properties of a unit."""
        names = (f"--property={it}" for it in properties)
        lines = self.systemctl("show", unit, *names).splitlines()
        values = dict(it.split("=", 1) for it in lines)
        return [values[it] for it in properties]


@contextmanager
def running_systemd(mounts: Mapping[Path, str]) -> Iterator[Systemd]:
    """Yield a systemd in the network of this host; remove it afterwards."""
    file = Path(__file__).with_name("systemd.Dockerfile")
    docker("build", "--quiet", "--tag", IMAGE, "--file", str(file), str(ROOT))
    name = f"pillarbox-test-{uuid4().hex[:8]}"
    unconfined = (f"--security-opt={it}=unconfined" for it in ("seccomp", "apparmor"))
    docker(
        *("run", "--detach", "--name", name, "--network", "host"),
        *("--cap-add", "SYS_ADMIN", *unconfined),
        *("--security-opt", "systempaths=unconfined", "--cgroupns", "private"),
        *("--tmpfs", "/run", "--tmpfs", "/tmp"),
        *(f"--volume={here}:{there}:ro" for here, there in mounts.items()),
        IMAGE,
    )
    try:
        systemd = Systemd(name)
        wait_for(
            "systemd",
            lambda: systemd.systemctl("is-system-running", check=False) == "running",
            seconds=60,
        )
        yield systemd
    except BaseException as error:
        error.add_note(docker("exec", name, "journalctl", "--no-pager", "--lines=40"))
        raise
    finally:
        run("docker", "rm", "--force", name)
