"""Which server `pillarbox dev` runs, and who can connect to it."""

import asyncio
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pillarbox.outbox.dev import server as module
from pillarbox.outbox.dev.parts import Parts
from pillarbox.outbox.dev.project import Project
from pillarbox.outbox.dev.server import Server, choose_server
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.testing.wheel import wheel_directories
from tests.fixtures.waiting import wait_for


@pytest.fixture
def project() -> Iterator[Project]:
    """A new project, locked."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        project = Project(Path(folder))
        with project.locked():
            yield project


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def binaries(folder: Path, *extensions: str) -> Path:
    """Make the programs of a server that has these extensions."""
    program(folder / "postgres", "")
    program(folder / "pg_config", f"echo {folder}")
    (folder / "extension").mkdir()
    for name in extensions:
        (folder / "extension" / f"{name}.control").touch()
    return folder


BOTH = ("pg_partman", "pg_cron")


def test_the_data_stay_with_the_program_that_made_them(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = binaries(tmp_path / "15"), binaries(tmp_path / "18", *BOTH)
    for found in (older, newer):
        monkeypatch.setattr(module, "find_binaries", lambda found=found: found)
        assert choose_server(project).name == f"PostgreSQL in {older}"

    (older / "postgres").unlink()
    with pytest.raises(ConfigError, match=r"15/postgres, which is not found.*--reset"):
        choose_server(project)


async def test_only_the_url_with_its_password_connects(project: Project) -> None:
    (wheel,) = wheel_directories()
    server = Server(wheel, project)
    server.create()
    right = conninfo(project.url)
    wrong = make_conninfo(right, password="other")
    async with Parts({}) as parts:
        started = await parts.start("postgres", *server.command(), **server.process)
        await asyncio.to_thread(wait_for, "the server", lambda: answers(right))
        assert not started.ended.done()
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(wrong)


def answers(url: str) -> bool:
    try:
        with psycopg.connect(url) as connection:
            return connection.info.dbname == "pillarbox"
    except psycopg.OperationalError:
        return False
