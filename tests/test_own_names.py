"""The wheel beside applications with packages outbox, inbox, relay and migrations."""

import subprocess
import sys
from pathlib import Path

import pytest

from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import one_at_a_time
from tests.fixtures.processes import RunningProcess
from tests.fixtures.sessions import execute
from tests.fixtures.variants import as_variant
from tests.fixtures.waiting import wait_for
from tests.install.__main__ import clean_environment
from tests.install.wheel import build_wheel

SHOP = {
    "relay/__init__.py": "",
    "relay/config.py": """
import os

from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

url = os.environ["PILLARBOX_DATABASE_URL"]
sessions = sessionmaker(create_engine(url))
""",
    "migrations/__init__.py": "",
    "migrations/__main__.py": """
from relay.config import sessions
from sqlalchemy import text

with sessions.begin() as session:
    session.execute(text("CREATE TABLE bill (number integer)"))
""",
    "outbox/__init__.py": "",
    "outbox/message.py": """
from pillarbox import Message, add


def place(session, number):
    add(session, Message("orders.placed", {"number": number}, key="k"))
""",
    "outbox/__main__.py": """
from outbox.message import place
from relay.config import sessions

with sessions.begin() as session:
    for number in (1, 2, 3):
        place(session, number)
""",
    "inbox/__init__.py": "",
    "inbox/consumer.py": """
import os

from pillarbox import Consumer
from relay.config import sessions, url
from sqlalchemy import text

consumer = Consumer(os.environ.get("BROKER", url), sessions, name="billing")


@consumer.handles("orders.placed")
def bill(session, message):
    session.execute(text("INSERT INTO bill (number) VALUES (:number)"), message.json())
""",
    "test_shop.py": """
import asyncio

from outbox.message import place
from pillarbox.testing import added, drain
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

pytest_plugins = ["pillarbox.outbox.testing.plugin"]


def test_an_order_is_billed(pillarbox_database_url, monkeypatch):
    monkeypatch.setenv("PILLARBOX_DATABASE_URL", pillarbox_database_url)
    from inbox.consumer import consumer
    from relay.config import sessions

    engine = create_engine(pillarbox_database_url)
    with Session(engine) as session, session.begin():
        session.execute(text("CREATE TABLE bill (number integer)"))
        place(session, 7)
        assert [it.json() for it in added(session)] == [{"number": 7}]
    drained = asyncio.run(drain(consumer, sessions=sessions))
    assert drained.topics == ["orders.placed"]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT number FROM bill")) == 7
    engine.dispose()
""",
}
DJANGO = {
    "site_settings.py": """
import os

from pillarbox.outbox.postgres.connection import conninfo
from psycopg.conninfo import conninfo_to_dict

database = conninfo_to_dict(conninfo(os.environ["PILLARBOX_DATABASE_URL"]))
SECRET_KEY = "secret"
INSTALLED_APPS = ["inbox", "outbox", "relay"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": database.pop("dbname"),
        "OPTIONS": database,
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
""",
    **{
        f"{app}/{file}": ""
        for app in ("inbox", "outbox", "relay")
        for file in ("__init__.py", "migrations/__init__.py")
    },
    "inbox/models.py": """
from django.db import models


class Bill(models.Model):
    number = models.IntegerField()

    class Meta:
        db_table = "bill"
""",
    "outbox/management/__init__.py": "",
    "outbox/management/commands/__init__.py": "",
    "outbox/management/commands/place.py": """
from django.core.management.base import BaseCommand
from django.db import connection, transaction
from inbox.models import Bill
from pillarbox import Message, add


class Command(BaseCommand):
    def handle(self, *args, **options):
        with transaction.atomic():
            Bill.objects.create(number=1)
            messages = [Message("orders.placed", {"number": n}) for n in (2, 3)]
            add(connection.connection, *messages)
""",
    "inbox/consumer.py": SHOP["inbox/consumer.py"],
    "relay/config.py": SHOP["relay/config.py"],
}
BILLED = [(1,), (2,), (3,)]


class Application:
    """A folder with an application, and an environment with the wheel."""

    def __init__(self, folder: Path, installed: Path, files: dict[str, str]) -> None:
        self._scripts = installed / "bin"
        self._folder = folder / "application"
        for name, text in files.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.environment = clean_environment() | {"HOME": str(folder)}

    def run(self, script: str, *arguments: str) -> str:
        """Run a program to its end; return its output."""
        done = subprocess.run(
            [self._scripts / script, *arguments],
            cwd=self._folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, *arguments: str) -> RunningProcess:
        """Start a command, which runs until it is terminated."""
        log = self._folder.with_name(f"{arguments[0]}.log")
        line = [str(self._scripts / "pillarbox"), *arguments]
        return RunningProcess(line, log, self.environment, self._folder)

    def wait_for_bills(self, url: str) -> None:
        query = "SELECT number FROM bill ORDER BY number"
        wait_for("the bills", lambda: execute(url, query) == BILLED, seconds=60)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(tmp_path_factory.mktemp("built"))
    python = [sys.executable, "-m"]
    subprocess.run([*python, "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (ours,) = {it for it in sys.path if it.endswith("site-packages")}
    # Its .pth files aren't read there, and so the editable installation isn't found.
    (site / "dependencies.pth").write_text(f"{ours}\n")
    pip = [*python, "pip", "--python", str(folder / "bin" / "python"), "install"]
    subprocess.run([*pip, "-q", "--no-deps", "--no-index", wheel], check=True)
    return folder


@pytest.fixture
def shop(tmp_path: Path, installed: Path) -> Application:
    return Application(tmp_path, installed, SHOP)


def test_the_environment_has_the_wheel(shop: Application, installed: Path) -> None:
    found = shop.run("python", "-c", "import pillarbox; print(pillarbox.__file__)")
    assert Path(found).is_relative_to(installed)


@pytest.mark.parametrize("broker", ["redis", as_variant(None)])
def test_the_commands_leave_an_applications_packages_alone(
    shop: Application,
    server: PostgresServer,
    empty_database_url: str,
    redis_url: str,
    broker: str | None,
) -> None:
    shop.environment["PILLARBOX_DATABASE_URL"] = sqlalchemy_url(empty_database_url)
    if broker is not None:
        shop.environment |= {"BROKER": redis_url, "PILLARBOX_BROKER_URL": redis_url}
    with one_at_a_time(server):
        shop.run("pillarbox", "migrate", "--without-cron")
    shop.run("python", "-m", "migrations")
    shop.run("python", "-m", "outbox")
    started = [shop.start("consume", "inbox.consumer:consumer")]
    if broker is not None:
        started.append(shop.start("relay"))
    shop.wait_for_bills(empty_database_url)

    assert "orders.placed" in shop.run("pillarbox", "trace", "--key", "k")
    shop.run("pillarbox", "maintain")
    for command in ("status", "doctor"):
        shop.run("pillarbox", command)
    for process in started:
        process.terminate()
        assert process.wait() == 0, process.log()


@pytest.mark.long
def test_an_applications_tests_use_the_plugin(shop: Application) -> None:
    assert "1 passed" in shop.run("python", "-m", "pytest", "-p", "no:randomly")


@pytest.mark.long
def test_dev_runs_beside_an_applications_packages(shop: Application) -> None:
    dev = shop.start("dev", "inbox.consumer:consumer")
    dev.wait_for_log("ConsumerStarted")
    dev.terminate()
    dev.wait()
    assert "Traceback" not in dev.log()


@pytest.mark.long
def test_a_django_project_has_applications_of_these_names(
    tmp_path: Path,
    installed: Path,
    server: PostgresServer,
    empty_database_url: str,
) -> None:
    site = Application(tmp_path, installed, DJANGO)
    url = sqlalchemy_url(empty_database_url)
    site.environment |= {
        "PILLARBOX_DATABASE_URL": url,
        "DJANGO_SETTINGS_MODULE": "site_settings",
    }
    with one_at_a_time(server):
        site.run("pillarbox", "migrate", "--without-cron")
    manage = ("python", "-m", "django")
    site.run(*manage, "makemigrations", "inbox")
    site.run(*manage, "migrate")
    site.run(*manage, "place")
    consumer = site.start("consume", "inbox.consumer:consumer")
    site.wait_for_bills(url)
    consumer.terminate()
    assert consumer.wait() == 0, consumer.log()
