"""Which server `pillarbox dev` runs, and who can connect to it."""

import asyncio
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from outbox.dev import server as module
from outbox.dev.page import open_page
from outbox.dev.parts import Parts
from outbox.dev.project import Project
from outbox.dev.server import Container, Programs, choose_server
from outbox.errors import ConfigError
from outbox.observability.endpoints import address_of
from outbox.postgres.connection import conninfo
from outbox.testing.cluster import find_binaries
from outbox.testing.wheel import wheel_directories
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


def binaries(folder: Path, major: int, *extensions: str) -> Path:
    """Make the programs of a server that has these extensions."""
    program(folder / "postgres", f"echo 'postgres (PostgreSQL) {major}.1 (Debian)'")
    program(folder / "initdb", "")
    program(folder / "pg_config", f"echo {folder}")
    (folder / "extension").mkdir()
    for name in extensions:
        (folder / "extension" / f"{name}.control").touch()
    return folder


def docker(folder: Path, monkeypatch: pytest.MonkeyPatch, *, has_image: bool) -> None:
    """Put a docker on the path that has the project's image, or hasn't."""
    program(folder / "docker", f"exit {0 if has_image else 1}")
    monkeypatch.setenv("PATH", str(folder))


BOTH = ("pg_partman", "pg_cron")


@pytest.mark.parametrize(
    ("extensions", "has_image", "chosen"),
    [
        (BOTH, True, Programs),
        (BOTH[:1], True, Container),
        (BOTH[:1], False, Programs),
    ],
)
def test_programs_with_both_extensions_come_first_then_docker(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extensions: tuple[str, ...],
    has_image: bool,
    chosen: type,
) -> None:
    docker(tmp_path / "docker", monkeypatch, has_image=has_image)
    found = binaries(tmp_path / "bin", 17, *extensions)
    monkeypatch.setattr(module, "find_binaries", lambda: found)

    assert isinstance(choose_server(project), chosen)


def test_the_wheel_is_preferred_to_other_programs_without_extensions() -> None:
    (wheel,) = wheel_directories()
    assert (wheel / "postgres").exists()
    assert find_binaries() != wheel  # this machine has the extensions


def test_the_data_stay_with_the_version_that_made_them(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = binaries(tmp_path / "18", 18, *BOTH)
    older = binaries(tmp_path / "15", 15)
    monkeypatch.setattr(module, "server_directories", lambda: iter([newer, older]))
    project.data.mkdir()
    (project.data / "PG_VERSION").write_text("15\n")

    assert str(older) in choose_server(project).name

    (project.data / "PG_VERSION").write_text("14\n")
    with pytest.raises(ConfigError, match=r"made by PostgreSQL 14.*--reset"):
        choose_server(project)


def test_data_in_a_volume_need_docker(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker(tmp_path, monkeypatch, has_image=True)
    Container("docker", project).create()
    assert isinstance(choose_server(project), Container)

    (tmp_path / "docker").unlink()
    with pytest.raises(ConfigError, match=r"volume of Docker.*--reset"):
        choose_server(project)


def test_no_password_is_on_dockers_command_line(project: Project) -> None:
    server = Container("docker", project)

    assert project.password not in " ".join(map(str, server.command()))
    assert server.process["env"]["POSTGRES_PASSWORD"] == project.password


async def test_only_the_url_with_its_password_connects(project: Project) -> None:
    (wheel,) = wheel_directories()
    server = Programs(wheel, project)
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


def test_two_pages_that_are_opened_at_once_get_two_addresses() -> None:
    with open_page() as first, open_page() as second:
        assert address_of(first) != address_of(second)
        for page in (first, second):
            with socket.create_connection(page.getsockname(), timeout=60):
                pass
