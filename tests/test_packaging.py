"""The built wheel contains what is in the tree."""

import subprocess
import sys
import tarfile
from importlib.metadata import EntryPoint, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.install.wheel import MOUNTS, ROOT, build, build_wheel, copy_source

SHIPPED = {".py", ".sql", ".typed", ".mako", ".html", ".css", ".js", ".svg"}

# Adds messages through plain sessions in an interpreter that has no greenlet.
ADD_WITHOUT_GREENLET = """
import sys

sys.modules["greenlet"] = None
import pillarbox, pillarbox.inbox.cli, pillarbox.inbox.webhook
import pillarbox.outbox.cli, pillarbox.relay.cli
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


def contents(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    in_tree = {
        f"{mount}/{path.relative_to(ROOT / folder)}"
        for folder, mount in MOUNTS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED
    }
    assert contents(wheel) == in_tree


def test_the_wheel_takes_one_name_and_type_checkers_read_it(wheel: Path) -> None:
    assert {name.partition("/")[0] for name in contents(wheel)} == {"pillarbox"}
    assert "pillarbox/py.typed" in contents(wheel)


@pytest.mark.long
def test_the_wheel_of_a_source_distribution_is_the_same(
    wheel: Path, tmp_path: Path
) -> None:
    sdist = build("sdist", copy_source(tmp_path), tmp_path)
    with tarfile.open(sdist) as archive:
        assert [it.name for it in archive if not (it.isfile() or it.isdir())] == []
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    into = ["-C", str(unpacked), "--strip-components=1"]
    subprocess.run(["tar", "-xf", str(sdist), *into], check=True)
    assert contents(build("wheel", unpacked, tmp_path)) == contents(wheel)


def test_a_clone_without_symbolic_links_is_refused(tmp_path: Path) -> None:
    source = copy_source(tmp_path)
    link = source / "pillarbox" / "outbox"
    # What Git makes of it if core.symlinks is false.
    text = str(link.readlink())
    link.unlink()
    link.write_text(text)
    with pytest.raises(RuntimeError, match=f"{link} is a file.* core.symlinks=true"):
        build("wheel", source, tmp_path)


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
