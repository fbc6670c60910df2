"""A repeated `Idempotency-Key` gets the first answer, and writes nothing."""

from collections.abc import AsyncIterator
from datetime import timedelta

import psycopg
import pytest
from httpx2 import ASGITransport, AsyncClient, Response

from examples.frameworks.idempotency_key import app, forget
from tests.fixtures.sessions import execute
from tests.inbox.frameworks.test_writers import saved

KEY = "a-key-of-the-client"
KEPT = "SELECT client, status FROM first_answer ORDER BY 1"


class Client:
    def __init__(self, http: AsyncClient) -> None:
        self._http = http

    async def order(
        self, reference: str, key: str = KEY, client: str = "shop"
    ) -> Response:
        headers = {"Idempotency-Key": key, "X-Client": client}
        body = {"reference": reference}
        return await self._http.post("/orders", json=body, headers=headers)


@pytest.fixture
async def client(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setenv("PILLARBOX_DATABASE_URL", url)
    transport = ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        AsyncClient(transport=transport, base_url="http://t") as http,
    ):
        yield Client(http)


async def test_a_repeated_request_gets_the_first_answer(
    url: str, client: Client
) -> None:
    first, again = await client.order("a"), await client.order("a")

    assert (first.status_code, first.json()) == (201, {"reference": "a"})
    assert (again.status_code, again.content) == (201, first.content)
    assert saved(url) == (["a"], ["a"])


async def test_another_request_with_the_key_is_refused(
    url: str, client: Client
) -> None:
    await client.order("a")
    other = await client.order("b")

    assert other.status_code == 422
    assert "use a new one" in other.text
    assert saved(url) == (["a"], ["a"])


async def test_a_request_is_refused_while_the_first_one_runs(
    url: str, client: Client
) -> None:
    with psycopg.connect(url) as running:
        lock = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
        running.execute(lock, [f"shop {KEY}"])
        assert (await client.order("a")).status_code == 409
        assert (await client.order("b", key="another-key")).status_code == 201
    assert (await client.order("a")).status_code == 201
    assert saved(url) == (["b", "a"], ["b", "a"])


async def test_nothing_is_kept_of_a_request_that_fails(
    url: str, client: Client
) -> None:
    await client.order("a")
    # The reference exists, which the commit finds.
    assert (await client.order("a", key="another-key")).status_code == 500
    assert execute(url, KEPT) == [("shop", 201)]
    assert (await client.order("b", key="another-key")).status_code == 201


async def test_a_key_is_that_of_a_client(url: str, client: Client) -> None:
    await client.order("a")
    assert (await client.order("b", client="mobile")).status_code == 201
    assert execute(url, KEPT) == [("mobile", 201), ("shop", 201)]


async def test_a_key_is_new_again_when_its_answer_is_old(
    url: str, client: Client
) -> None:
    await client.order("a")
    old = "UPDATE first_answer SET answered_at = now() - interval '25 hours'"
    for expected in (422, 201):
        async with app.state.sessions.begin() as session:
            await forget(session, timedelta(days=1))
        assert (await client.order("b")).status_code == expected
        execute(url, old)


async def test_a_request_without_a_key_is_refused(url: str, client: Client) -> None:
    assert (await client.order("a", key="short")).status_code == 422
    assert saved(url) == ([], [])
