"""The page about two services, followed literally.

`tests/fixtures/supervisor.py` does what `systemctl` would. `tests/containers` follows
the page with a systemd, and with a Docker engine.
"""

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
import yaml
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


class Operator(Reader):
    """Somebody who follows the page, with a copy of the example."""

    def __init__(self, folder: Path, redis: str, server: PostgresServer) -> None:
        super().__init__(folder, redis)
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
        with psycopg.connect(server.url) as connection:
            info = connection.info
            self._environment |= {
                "PATH": f"{folder / 'programs'}:{self._environment['PATH']}",
                "PGPORT": str(info.port),
                "PGUSER": info.user,
                "PILLARBOX_WEB_LISTEN": "127.0.0.1:0",
            }
            login = f"{info.user}:{info.password}"
            self._actual = {
                "shop:secret@db.example": f"{login}@{info.host}:{info.port}",
                "db.example": info.host,
                "redis://redis.example": redis,
                "/etc/shop": str(folder / "etc" / "shop"),
            }

    def has(self, program: str, text: str) -> None:
        """Let a program come before others of its name."""
        file = self._folder / "programs" / program
        file.parent.mkdir()
        file.write_text(text)
        file.chmod(0o755)

    def follows_the_page(self) -> None:
        page = Document.parse(
            str(PAGE),
            CodeBlockParser("ini", self.writes),
            CodeBlockParser("console", self.types),
            CodeBlockParser("runs-until", self.waits),
        )
        try:
            for example in page:
                try:
                    example.evaluate()
                except Exception as error:
                    error.add_note(f"in the block at {PAGE}:{example.line}")
                    raise
        finally:
            self.leaves()

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
        printed = super()._run(f"bash -euo pipefail -c {shlex.quote(line)}")
        assert self.status == 0 or line.startswith("pillarbox status"), printed
        return printed


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        # If this is root, PostgreSQL's user must be able to enter it.
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_services_can_be_run_as_the_page_says(
    folder: Path, redis_url: str, private_server: PostgresServer
) -> None:
    operator = Operator(folder, redis_url, private_server)
    operator.has(
        "systemctl", f"#!{sys.executable}\n{Path(supervisor.__file__).read_text()}"
    )
    with ExitStack() as watches:
        for process in PROCESSES:
            running = folder / "running" / process
            running.mkdir(parents=True)
            watches.enter_context(watched(running, running / "pid", signal.SIGKILL))
        operator.follows_the_page()


def test_a_container_runs_the_command_of_the_unit_with_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(EXAMPLE)
    services = yaml.safe_load(Path("compose.yaml").read_text())["services"]
    assert set(services) == set(PROCESSES.values())
    for unit, name in PROCESSES.items():
        (program, *arguments), environment = supervisor.of_unit(unit)
        assert Path(program).name == "pillarbox"
        assert services[name]["command"] == ["pillarbox", *arguments]
        assert services[name]["env_file"] == environment
