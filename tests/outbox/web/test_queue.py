"""The page's queue: who has left it holds up nobody."""

import asyncio
import threading
from typing import Any

import httpx2
import pytest

from pillarbox.outbox.web import Settings, TokenLogin, web_app
from pillarbox.outbox.web.database import _MOST, Database
from pillarbox.outbox.web.history import History
from tests.fixtures.web import ANN, TOKENS
from tests.fixtures.webhook import served


async def test_requests_whose_client_is_gone_are_not_carried_out(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried_out, released = threading.Semaphore(0), threading.Event()
    count = 0
    run = Database._run

    def hold(database: Database, function: Any) -> Any:
        nonlocal count
        count += 1
        carried_out.release()
        released.wait(60)
        return run(database, function)

    app = web_app(Settings(database=database_url), TokenLogin(TOKENS))
    async with served(app) as url, httpx2.AsyncClient(base_url=url) as client:
        await client.post("/login", data={"token": ANN})
        monkeypatch.setattr(History, "begin", lambda _: None)
        monkeypatch.setattr(Database, "_run", hold)
        async with httpx2.AsyncClient(
            base_url=url, cookies=client.cookies
        ) as reloading:
            reloads = [
                asyncio.create_task(reloading.get("/jobs", timeout=60))
                for _ in range(_MOST + 50)
            ]
            for _ in range(_MOST):
                await asyncio.to_thread(carried_out.acquire)
            for reload in reloads:
                reload.cancel()
            await asyncio.wait(reloads)
        # By its answer, the server has seen that those connections are closed.
        assert (await client.get("/login")).status_code == 200

        waiting = asyncio.create_task(client.get("/jobs", timeout=60))
        released.set()
        assert (await waiting).status_code == 200
    assert count == _MOST + 1
