"""`pillarbox dev` in a project of its own: it starts, reloads, and leaves nothing."""

import os
import re
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from pillarbox import Message, add
from pillarbox.outbox.dev.project import Project
from pillarbox.outbox.postgres.connection import conninfo, sqlalchemy_url
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.outbox.testing.wheel import wheel_directories
from tests.fixtures.processes import command_line
from tests.fixtures.waiting import wait_for

APP = """
import os

from pillarbox import Consumer, Message
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

url = os.environ["PILLARBOX_DATABASE_URL"]
consumer = Consumer(url, sessionmaker(create_engine(url)), name="billing")


@consumer.handles("orders.placed")
def bill(session: Session, message: Message) -> None:
    print("billed", message.json())
"""


class Dev:
    """`pillarbox dev` in a folder, as a terminal would run it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._log = folder / "log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command_line("pillarbox", "dev", *arguments),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # The parts are in its session, but not in its group.
                start_new_session=True,
            )

    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str, *, times: int = 1) -> None:
        def shown() -> bool:
            assert self._process.poll() is None, self.log()
            return self.log().count(text) >= times

        wait_for(f"{text!r} in the log", shown)

    @property
    def url(self) -> str:
        (url,) = re.findall(r"export PILLARBOX_DATABASE_URL=(\S+)", self.log())
        return str(url)

    def read_page(self) -> bytes:
        """Return the page's login, once the page has started."""
        self.wait_for("WebStarted")
        (link,) = re.findall(r"page +(http://\S+)/login#\w+\n", self.log())
        with urllib.request.urlopen(f"{link}/login", timeout=60) as page:
            content = page.read()
            assert isinstance(content, bytes)
            return content

    def send(self, payload: str) -> None:
        engine = create_engine(self.url)
        with Session(engine) as session, session.begin():
            add(session, Message("orders.placed", payload, key="1"))
        engine.dispose()

    def count_messages(self) -> int:
        with psycopg.connect(conninfo(self.url)) as connection:
            query = "SELECT count(*) FROM outbox.message"
            ((count,),) = connection.execute(query).fetchall()
        return int(count)

    def end(self, how: signal.Signals) -> int:
        """Send it a signal; return its exit status."""
        self._process.send_signal(how)
        return self._process.wait(timeout=90)

    def wait(self) -> int:
        return self._process.wait(timeout=90)

    def left_over(self) -> list[int]:
        """Return the processes of its session that still run."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(") ")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == self._process.pid and fields[0] not in "ZX":
                found.append(int(stat.parent.name))
        return found

    def process_of(self, command: str) -> int:
        """Return the process that runs one of pillarbox's commands."""
        arguments = f"\0pillarbox\0{command}\0".encode()
        (pid,) = (
            pid
            for pid in self.left_over()
            if arguments in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        return pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        wait_for("the end of every process", lambda: not self.left_over())


@contextmanager
def project() -> Iterator[Path]:
    """Yield a folder that the server's user can enter, as pytest's own can't be."""
    with tempfile.TemporaryDirectory(prefix="pillarbox-dev-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "app.py").write_text(APP)
        yield folder


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A newcomer's project: its server has no extensions, and is migrated once."""
    with project() as folder:
        made = Project(folder)
        (wheel,) = wheel_directories()
        with made.locked():
            made.keep("server", lambda: str(wheel / "postgres"))
        yield folder


@pytest.fixture
def start() -> Iterator[Callable[..., Dev]]:
    """Starts `pillarbox dev` in a folder; ends what is left of it."""
    started: list[Dev] = []

    def start(folder: Path, *arguments: str) -> Dev:
        started.append(Dev(folder, *arguments))
        return started[-1]

    yield start
    for dev in started:
        dev.kill()


@pytest.mark.timeout(600)
def test_a_project_is_reloaded_and_keeps_its_data_until_a_reset(
    folder: Path, start: Callable[..., Dev]
) -> None:
    (folder / "app.py").write_text("import nonsense")
    dev = start(folder, "app:consumer")
    dev.wait_for("No module named 'nonsense'")
    (folder / "app.py").write_text(APP)
    dev.wait_for("ConsumerStarted")

    dev.send("the first order")
    dev.wait_for("consumer | billed the first order")
    (folder / "app.py").write_text(APP.replace('"billed"', '"billed anew"'))
    dev.wait_for("ConsumerStarted", times=2)
    assert b"pillarbox" in dev.read_page()
    dev.send("the second order")
    dev.wait_for("consumer | billed anew the second order")

    # Each change meets processes that are still starting.
    for i in range(3):
        seen = dev.log().count("app.py changed")
        (folder / "app.py").write_text(APP.replace('"billed"', f'"billed {i}"'))
        dev.wait_for("app.py changed", times=seen + 1)
    dev.send("the third order")
    dev.wait_for("consumer | billed 2 the third order")
    assert "Traceback" not in dev.log()
    assert dev.log().count("database system is ready") == 1

    url = dev.url
    assert "relay" not in dev.log()
    assert dev.end(signal.SIGINT) == 0
    assert dev.left_over() == []
    with pytest.raises(psycopg.OperationalError, match="refused"):
        psycopg.connect(conninfo(url))

    # Without a consumer, and with the same data.
    dev = start(folder)
    dev.wait_for("WebStarted")
    assert dev.url == url
    assert dev.count_messages() == 3
    assert dev.end(signal.SIGHUP) == 0

    dev = start(folder, "--reset")
    dev.wait_for("WebStarted")
    assert dev.count_messages() == 0
    assert dev.end(signal.SIGTERM) == 0
    assert dev.left_over() == []


@pytest.mark.timeout(600)
def test_a_database_and_a_broker_of_ones_own_are_used(
    folder: Path, start: Callable[..., Dev], database_url: str, redis_url: str
) -> None:
    (folder / "app.py").write_text(
        APP.replace("Consumer(url", f'Consumer("{redis_url}"')
    )
    dev = start(
        folder, "app:consumer", "--database", database_url, "--broker", redis_url
    )
    dev.wait_for("ConsumerStarted")
    dev.wait_for("RelayStarted")

    engine = create_engine(sqlalchemy_url(database_url))
    with Session(engine) as session, session.begin():
        add(session, Message("orders.placed", "an order", key="1"))
    engine.dispose()

    dev.wait_for("consumer | billed an order")
    assert f"broker    {redis_url}" in dev.log()
    assert "starting PostgreSQL" not in dev.log()
    assert dev.end(signal.SIGINT) == 0
    assert dev.left_over() == []


def test_a_database_of_ones_own_is_neither_emptied_nor_waited_for(
    folder: Path, start: Callable[..., Dev]
) -> None:
    nobody = f"postgresql://billing:secret@127.0.0.1:{free_port()}/shop"
    dev = start(folder, "--database", nobody, "--reset")
    assert dev.wait() == 2
    assert "omit --database" in dev.log()

    dev = start(folder, "--database", nobody)
    assert dev.wait() == 2
    assert "shop: " in dev.log()
    assert "refused" in dev.log()
    assert "secret" not in dev.log()
    assert dev.left_over() == []


@pytest.mark.fault
def test_nothing_is_left_when_a_part_dies_or_dev_is_killed(
    folder: Path, start: Callable[..., Dev]
) -> None:
    dev = start(folder)
    dev.wait_for("WebStarted")
    os.kill(dev.process_of("web"), signal.SIGKILL)

    assert dev.wait() == 2
    assert "web ended with -9" in dev.log()
    assert dev.left_over() == []

    dev = start(folder)
    dev.wait_for("WebStarted")
    dev.kill()  # waits for the end of every process
