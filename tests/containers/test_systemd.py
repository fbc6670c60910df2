"""The units in docker/systemd, run by a systemd."""

from pathlib import Path

from pillarbox import Message
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.containers.engine import DOCKER
from tests.containers.systemd import running_systemd
from tests.fixtures.passwords import set_password
from tests.fixtures.relay import insert, unsettled
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

LASTING = ("relay", "consumer@billing")
CONSUMERS = """
import os
import time
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from pillarbox import Consumer, sqlalchemy_url


def url(kind):
    return Path(os.environ[f"PILLARBOX_{kind}_URL_FILE"]).read_text()


sessions = sessionmaker(create_engine(sqlalchemy_url(url("DATABASE"))))
billing = Consumer(url("BROKER"), sessions, name="billing")


@billing.handles("orders")
def bill(session, order):
    number = {"placed": order.json()}
    session.execute(text("INSERT INTO public.bill VALUES (:placed)"), number)
    time.sleep(0.02)
"""


def test_a_killed_process_is_restarted_and_a_stop_drains(
    migrated_server: PostgresServer, redis_url: str, tmp_path: Path
) -> None:
    url = migrated_server.url
    execute(url, "CREATE TABLE public.bill (placed int)")

    def changes_its_password(password: str) -> None:
        changed = set_password(url, "mary", password)
        for process in ("relay", "consumer", "upkeep"):
            (tmp_path / f"{process}-database-url").write_text(changed)

    changes_its_password("old")
    execute(url, "GRANT SELECT, INSERT ON public.bill TO mary")
    execute(url, "GRANT pillarbox_maintainer TO mary")
    for process in ("relay", "consumer"):
        (tmp_path / f"{process}-broker-url").write_text(redis_url)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "consumers.py").write_text(CONSUMERS)

    def billed() -> int:
        ((orders, rows),) = execute(
            url, "SELECT count(DISTINCT placed), count(*) FROM public.bill"
        )
        assert orders == rows
        return int(orders)

    def are_billed(count: int) -> None:
        wait_for(f"{count} bills", lambda: billed() >= count, seconds=120)

    with running_systemd(
        {
            DOCKER / "systemd": "/etc/systemd/system",
            tmp_path: "/etc/pillarbox",
            tmp_path / "shop": "/opt/shop/shop",
        }
    ) as host:

        def run_again() -> bool:
            states = [host.shown(it, "NRestarts", "SubState") for it in LASTING]
            return states == [["1", "running"]] * 2

        # With one key, they are handled one by one.
        insert(url, *(Message("orders", n, key="one") for n in range(400)))
        host.systemctl("start", *LASTING)
        are_billed(20)
        host.systemctl("kill", "--signal=KILL", *LASTING)
        wait_for("both again", run_again, seconds=60)
        are_billed(billed() + 20)

        host.systemctl("stop", *LASTING)
        for unit in LASTING:
            assert host.shown(unit, "Result", "ExecMainStatus") == ["success", "0"]
        assert billed() < 400

        changes_its_password("new")
        host.systemctl("start", *LASTING)
        are_billed(400)

        host.systemctl("stop", "consumer@billing")
        insert(url, *(Message("orders", 400 + n) for n in range(10)))
        wait_for("they are published", lambda: unsettled(url) == 0, seconds=60)
        host.systemctl("start", "consumer-once@billing")
        assert billed() == 410
        host.systemctl("start", "upkeep")
