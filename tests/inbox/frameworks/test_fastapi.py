"""The guard in a FastAPI route, under a real server."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from outbox.testing.lifetime import free_port
from tests.fixtures.processes import RunningProcess, command_line


def post(url: str, event: dict[str, object]) -> tuple[int, object]:
    request = urllib.request.Request(
        f"{url}/events",
        json.dumps(event).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


def test_a_resent_event_is_handled_once(
    url: str, invoices: Callable[[], list[int]], tmp_path: Path
) -> None:
    port = free_port()
    server = RunningProcess(
        command_line(
            "uvicorn", "examples.frameworks.fastapi_app:app", f"--port={port}"
        ),
        tmp_path / "server.log",
        {"PILLARBOX_DATABASE_URL": url},
    )
    server.wait_for_log("Uvicorn running")
    hook = f"http://127.0.0.1:{port}"

    assert post(hook, {"id": "evt_1", "order_id": 1}) == (200, {"handled": True})
    assert post(hook, {"id": "evt_1", "order_id": 1}) == (200, {"handled": False})
    assert post(hook, {"id": "evt_2", "order_id": 2}) == (200, {"handled": True})
    assert invoices() == [1, 2]

    # An order that can't be billed leaves no receipt: the sender can retry.
    too_large = {"id": "evt_3", "order_id": 2**40}
    assert post(hook, too_large) == (500, None)
    assert post(hook, {"id": "evt_3", "order_id": 3}) == (200, {"handled": True})
    assert invoices() == [1, 2, 3]
    server.terminate()
    server.wait()
