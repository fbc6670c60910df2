"""The guard in a Celery task, under a real worker."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from pillarbox import uuid7
from tests.fixtures.passwords import PASSWORD
from tests.fixtures.processes import ROOT, RunningProcess, command_line
from tests.fixtures.waiting import wait_for

APP = "examples.frameworks.celery_app"
OPTIONS = ("--pool", "solo", "--without-gossip", "--without-mingle", "-l", "INFO")


def start_worker(app: str, folder: Path, environment: dict[str, str]) -> RunningProcess:
    line = command_line("celery", "-A", app, "worker", *OPTIONS)
    return RunningProcess(line, folder / "worker.log", environment)


def run_python(code: str, environment: dict[str, str]) -> None:
    subprocess.run(
        [*command_line("python")[:1], "-c", code],
        check=True,
        cwd=ROOT,
        env={"PATH": "", **PASSWORD, **environment},
    )


def test_a_task_delivered_twice_runs_once(
    url: str, redis_url: str, invoices: Callable[[], list[int]], tmp_path: Path
) -> None:
    environment = {"PILLARBOX_DATABASE_URL": url, "PILLARBOX_BROKER_URL": redis_url}
    worker = start_worker(APP, tmp_path, environment)
    first, second = str(uuid7()), str(uuid7())

    tasks = ((first, 1), (first, 1), (second, 2), (first, 1))
    call = f"from {APP} import bill\nfor task in {tasks!r}: bill.delay(*task)"
    run_python(call, environment)
    worker.wait_for_log("succeeded in", times=4)

    assert invoices() == [1, 2]
    worker.terminate()
    assert worker.wait() == 0
    wait_for("it has gone", lambda: not worker.is_running())


TASKS = "examples.frameworks.celery_tasks"
SEND = f"""
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from {TASKS} import bill, send

with Session(create_engine(sqlalchemy_url({{url!r}}))) as session:
    send(session, bill, 1)
    session.rollback()
    send(session, bill, 2)
    session.commit()
"""


def test_a_task_is_sent_if_and_only_if_its_transaction_commits(
    url: str, redis_url: str, tmp_path: Path
) -> None:
    environment = {"PILLARBOX_DATABASE_URL": url, "PILLARBOX_BROKER_URL": redis_url}
    worker = start_worker(TASKS, tmp_path, environment)
    relay = RunningProcess(
        [*command_line("python")[:1], "-m", TASKS], tmp_path / "relay.log", environment
    )
    run_python(SEND.format(url=url), environment)
    worker.wait_for_log("succeeded in")
    log = worker.log()
    assert "billed 2" in log
    assert "billed 1" not in log
    for process in (relay, worker):
        process.terminate()
        process.wait()
