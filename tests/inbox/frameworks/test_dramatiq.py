"""Dramatiq's actors under a real worker: their messages are sent by a relay."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.passwords import PASSWORD
from tests.fixtures.processes import ROOT, RunningProcess, command_line
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.servers.redis import RedisServer

ACTORS = "examples.frameworks.dramatiq_actors"
SEND = f"""
from dataclasses import replace
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from {ACTORS} import bill, send

with Session(create_engine(sqlalchemy_url({{url!r}}))) as session:
    send(session, bill.message(1))
    session.rollback()
    send(session, replace(bill.message(3), actor_name="gone"))
    send(session, bill.message(order_id=2))
    session.commit()
"""


def reason(url: str) -> str:
    """Return why the relay can't publish."""
    return str(execute(url, "SELECT reason FROM outbox.process"))


@pytest.mark.fault
def test_a_message_is_sent_if_and_only_if_its_transaction_commits(
    url: str, private_redis: RedisServer, tmp_path: Path
) -> None:
    environment = {
        "PILLARBOX_DATABASE_URL": url,
        "PILLARBOX_BROKER_URL": private_redis.url,
    }
    python = command_line("python")[:1]
    # While the broker is down, the application can send, and the relay waits.
    private_redis.stop()
    subprocess.run(
        [*python, "-c", SEND.format(url=url)],
        check=True,
        cwd=ROOT,
        env={"PATH": "", **PASSWORD, **environment},
    )
    relay = RunningProcess([*python, "-m", ACTORS], tmp_path / "relay.log", environment)
    wait_for("an attempt", lambda: "Connection refused" in reason(url))
    private_redis.start()
    worker = RunningProcess(
        command_line("dramatiq", ACTORS, "--processes=1", "--threads=1"),
        tmp_path / "worker.log",
        environment,
    )
    worker.wait_for_log("billed 2")
    wait_for(
        "the other one is a dead letter",
        lambda: execute(url, "SELECT 1 FROM outbox.dead_letter"),
    )
    for process in (relay, worker):
        process.terminate()
        process.wait()
    # Dramatiq's processes share the log, and can write into each other's lines.
    assert re.findall(r"billed \d", worker.log()) == ["billed 2"]
