"""The built wheel contains what is in the tree."""

import subprocess
import sys
from importlib.metadata import EntryPoint, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.install.wheel import MOUNTS, ROOT, build_wheel

SHIPPED = {".py", ".sql", ".typed", ".mako", ".html", ".css", ".js", ".svg"}

# Adds messages through plain sessions in an interpreter that has no greenlet.
ADD_WITHOUT_GREENLET = """
import sys

sys.modules["greenlet"] = None
import pillarbox, pillarbox.inbox.cli, pillarbox.inbox.webhook, pillarbox.outbox, pillarbox.outbox.cli, pillarbox.relay, pillarbox.relay.cli
from pillarbox.outbox.errors import NotASessionError
from pillarbox import Message, add
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

engine = create_engine("postgresql+psycopg://")
for session in (Session(engine), scoped_session(sessionmaker(engine))):
    add(session, Message("t", 1))
    session.rollback()
sessions = sessionmaker(engine)
pillarbox.Consumer("memory://", sessions, name="c").handles("t")(lambda s, m: None)
try:
    add(object(), Message("t", 1))
except NotASessionError:
    print("sqlalchemy.ext.asyncio" in sys.modules)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("built"))


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    in_tree = {
        f"{mount}/{path.relative_to(ROOT / folder)}"
        for folder, mount in MOUNTS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED
    }
    with ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert in_wheel == in_tree


def test_type_checkers_read_every_package_of_the_wheel(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    # PEP 561: a module that isn't in a package can't be typed.
    for top in {name.partition("/")[0] for name in names if ".dist-info/" not in name}:
        assert f"{top}/py.typed" in names


@pytest.mark.parametrize(
    "entry_point",
    distribution("pillarbox").entry_points,
    ids=lambda entry_point: f"{entry_point.group} {entry_point.name}",
)
def test_an_entry_point_loads(entry_point: EntryPoint) -> None:
    found = entry_point.load()
    match entry_point.group:
        case "pillarbox.sides":
            assert found.schema == entry_point.name
        case _:
            assert callable(found)


def test_the_lock_file_names_no_download_location() -> None:
    assert "://" not in (ROOT / "requirements.lock").read_text()


def test_plain_sessions_need_no_greenlet() -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", ADD_WITHOUT_GREENLET],
        capture_output=True,
        text=True,
    )
    assert (ran.stdout, ran.stderr) == ("False\n", "")
