"""The contents of the images."""

import re

import pytest

from tests.containers.conftest import IMAGES
from tests.containers.engine import docker, inspected, run

SECRET = re.compile(r"passw|secret|token|PIP_|https?://\S*@", re.IGNORECASE)
MOUNT = re.compile(r"--mount=type=secret,\S+|/run/secrets/ca-bundle")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_contains_no_secret_and_no_package_index_of_its_build(
    image: str,
) -> None:
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    config = inspected("image", image)["Config"]
    # A secret's name and path are not secret.
    assert not SECRET.findall(MOUNT.sub("", history))
    assert not SECRET.findall("\n".join(config["Env"]))
    look = "find /run/secrets /root/.config/pip /root/.pip /etc/pip.conf -type f; true"
    assert docker("run", "--rm", "--entrypoint", "sh", image, "-c", look) == ""


def test_the_commands_run_as_an_unprivileged_user() -> None:
    assert docker("run", "--rm", "pillarbox", "id", "-u") == "10001"
    assert inspected("image", "pillarbox")["Config"]["User"] == "10001:10001"
    held = docker("run", "--rm", "pillarbox", "grep", "CapEff", "/proc/self/status")
    assert int(held.split()[1], 16) == 0


def test_each_command_starts_and_every_broker_is_installed() -> None:
    load = (
        "from importlib.metadata import entry_points\n"
        "for group in ('pillarbox.publishers', 'pillarbox.sources'):\n"
        "    for point in entry_points(group=group): point.load()"
    )
    docker("run", "--rm", "pillarbox", "python", "-c", load)
    said = docker("run", "--rm", "pillarbox", "pillarbox", "--help")
    assert "Usage: pillarbox" in said


def test_build_and_test_files_are_not_installed() -> None:
    names = (
        "from importlib.metadata import distributions\n"
        "print(*(d.metadata['Name'].lower() for d in distributions("
        "path=[p for p in __import__('sys').path if p.startswith('/opt/')])))"
    )
    said = docker("run", "--rm", "pillarbox", "python", "-c", names)
    installed = set(said.split())
    assert {"pillarbox", "alembic", "psycopg", "sqlalchemy"} <= installed
    assert not {"pip", "pytest", "testcontainers", "moto", "setuptools"} & installed


def test_a_relay_without_a_database_says_what_it_needs() -> None:
    ended = run("docker", "run", "--rm", "pillarbox", check=False)
    assert ended.returncode == 2
    assert "PILLARBOX_DATABASE_URL" in ended.stderr


def test_the_settings_are_lines_of_postgresql_conf() -> None:
    show = (
        "docker-entrypoint.sh postgres & "
        "until pg_isready -q -h 127.0.0.1; do sleep 0.2; done; "
        'grep -E "^(shared_preload|cron)" "$PGDATA/postgresql.conf"'
    )
    said = docker(
        *("run", "--rm", "-e", "POSTGRES_PASSWORD=x", "-e", "POSTGRES_DB=orders"),
        *("--entrypoint", "sh", "pillarbox-postgres", "-c", show),
    )
    assert "shared_preload_libraries = 'pg_cron'" in said
    assert "cron.database_name = 'orders'" in said
