"""The page about two services, followed literally, with systemd and with containers.

What the page's table says is the same with containers is run instead in the second
case. `tests/fixtures/supervisor.py` does what `systemctl` and `docker` would.
"""

import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psycopg
import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser
from typing_extensions import override

from pillarbox.outbox.testing.lifetime import watched
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures import supervisor
from tests.test_tutorial import Reader

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "two-services.md"
EXAMPLE: Final = ROOT / "examples" / "two_services"
PROCESSES: Final = {
    f"{process}@{service}": f"{service}-{process}"
    for service in ("orders", "invoicing")
    for process in ("relay", "consumer")
}
ROW: Final = r"^\| `systemctl (\w+) .+?` \| `(.+) orders-relay` \|$"
AS_CONTAINERS: Final = dict(re.findall(ROW, PAGE.read_text(), re.MULTILINE))


class Operator(Reader):
    """Somebody who follows the page, with a copy of the example."""

    def __init__(
        self, folder: Path, redis: str, server: PostgresServer, *, in_containers: bool
    ) -> None:
        super().__init__(folder, redis)
        self._in_containers = in_containers
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
        programs = folder / "programs"
        programs.mkdir()
        text = Path(supervisor.__file__).read_text()
        for name in ("systemctl", "docker"):
            (programs / name).write_text(f"#!{sys.executable}\n{text}")
            (programs / name).chmod(0o755)
        with psycopg.connect(server.url) as connection:
            info = connection.info
            self._environment |= {
                "PATH": f"{programs}:{self._environment['PATH']}",
                "PGPORT": str(info.port),
                "PGUSER": info.user,
                "PILLARBOX_WEB_LISTEN": "127.0.0.1:0",
            }
            self._actual = {
                "db.example": info.host,
                "redis://redis.example": redis,
                "/etc/shop": str(folder / "etc" / "shop"),
            }

    @override
    def writes(self, example: Example) -> None:
        first, _, text = example.parsed.partition("\n")
        file = self._folder / first.removeprefix("# /")
        file.parent.mkdir(parents=True, exist_ok=True)
        for there, here in self._actual.items():
            text = text.replace(there, here)
        file.write_text(text)

    @override
    def _run(self, line: str) -> str:
        if self._in_containers and line.startswith("systemctl "):
            _, action, *units = line.split()
            services = (PROCESSES[it] for it in units)
            line = " ".join([AS_CONTAINERS[action], *services])
        printed = super()._run(f"bash -euo pipefail -c {shlex.quote(line)}")
        assert self.status == 0 or line.startswith("pillarbox status"), printed
        return printed

    @override
    def leaves(self) -> None:
        super().leaves()
        running = (it.parent.name for it in self._folder.glob("running/*/pid"))
        super()._run(f"systemctl stop {' '.join(running)}")


@pytest.fixture(
    params=["systemd", pytest.param("containers", marks=pytest.mark.variant)]
)
def operator(
    request: pytest.FixtureRequest, redis_url: str, private_server: PostgresServer
) -> Iterator[Operator]:
    in_containers = request.param == "containers"
    with TemporaryDirectory() as name, ExitStack() as watches:
        folder = Path(name)
        # If this is root, PostgreSQL's user must be able to enter it.
        folder.chmod(0o755)
        for process in PROCESSES.values() if in_containers else PROCESSES:
            running = folder / "running" / process
            running.mkdir(parents=True)
            watches.enter_context(watched(running, running / "pid", signal.SIGKILL))
        operator = Operator(
            folder, redis_url, private_server, in_containers=in_containers
        )
        yield operator
        operator.leaves()


def page_for(operator: Operator) -> Document:
    return Document.parse(
        str(PAGE),
        CodeBlockParser("ini", operator.writes),
        CodeBlockParser("console", operator.types),
        CodeBlockParser("runs-until", operator.waits),
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_services_can_be_run_as_the_page_says(operator: Operator) -> None:
    for example in page_for(operator):
        try:
            example.evaluate()
        except Exception as error:
            error.add_note(f"in the block at {PAGE}:{example.line}")
            raise


def test_a_container_runs_the_command_of_the_unit_with_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(EXAMPLE)
    for unit, service in PROCESSES.items():
        (program, *arguments), environment = supervisor.of_unit(unit)
        assert Path(program).name == "pillarbox"
        assert supervisor.of_compose(service) == (
            ["pillarbox", *arguments],
            environment,
        )
