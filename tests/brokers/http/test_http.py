"""Posting to webhooks: the behaviour that the suite doesn't cover."""

import asyncio
import hmac
import time
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader, StreamWriter
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web

from pillarbox import Message
from pillarbox.inbox.webhook import Verifier
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.http import HttpPublisher
from tests.fixtures.consumers import numbered
from tests.fixtures.http import (
    OTHER_SECRET,
    SECRET,
    SECRET_ENV,
    Arrival,
    MakeTarget,
    Target,
    answers,
    publish,
    until_answered,
)
from tests.fixtures.waiting import answer_after

ONE = Message("orders.placed", b'{"n": 1}', key="ä b", content_type="application/json")
TEMPORARY = [
    *(401, 403, 407, 408, 425, 429, 500, 501, 502, 503, 504, 599),
    *(402, 404, 405, 409, 421, 423, 428, 451),
]
PERMANENT = [400, 410, 413, 415, 422, 431]


async def test_a_message_is_a_signed_cloudevent(target: Target) -> None:
    assert await publish(target, ONE) == [Acked()]
    (arrival,) = target.arrivals
    headers = arrival.headers
    assert arrival.body == ONE.payload
    assert headers["content-type"] == "application/json"
    assert headers["ce-specversion"] == "1.0"
    assert headers["ce-id"] == headers["webhook-id"] == str(ONE.id)
    assert headers["idempotency-key"] == str(ONE.id)
    assert headers["ce-type"] == "orders.placed"
    assert headers["ce-partitionkey"] == "%C3%A4%20b"
    signed = f"{ONE.id}.{headers['webhook-timestamp']}.".encode() + ONE.payload
    secret = b64decode(SECRET.removeprefix("whsec_"))
    mac = b64encode(hmac.digest(secret, signed, "sha256")).decode()
    assert headers["webhook-signature"] == f"v1,{mac}"
    assert abs(time.time() - int(headers["webhook-timestamp"])) < 300


async def test_during_a_secret_rotation_both_secrets_sign(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_ENV, f"{OTHER_SECRET} {SECRET}")
    await publish(target, ONE)
    (arrival,) = target.arrivals
    for secret in (SECRET, OTHER_SECRET):
        assert Verifier([secret]).read(arrival.headers, arrival.body) == ONE


async def test_the_query_and_password_of_the_url_are_sent(target: Target) -> None:
    url = target.url("token=a%20b", path="/in?shop=7&").replace("//", "//me:pw@", 1)
    url = url.replace("&?", "&")
    async with HttpPublisher.from_url(url) as publisher:
        assert await publisher.publish([ONE]) == [Acked()]
    (arrival,) = target.arrivals
    assert arrival.path == "/in?shop=7&token=a%20b"
    assert arrival.headers["authorization"] == "Basic bWU6cHc="


async def test_proxies_from_the_environment_are_not_used(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert await publish(target, ONE) == [Acked()]


@pytest.mark.parametrize("status", [200, 201, 202, 204])
async def test_any_success_is_an_ack(target: Target, status: int) -> None:
    target.script = answers(status)
    assert await publish(target, ONE) == [Acked()]


@pytest.mark.parametrize("status", TEMPORARY + PERMANENT)
async def test_a_failure_is_nacked_permanently_only_if_the_message_is_to_blame(
    target: Target, status: int
) -> None:
    target.script = answers(status)
    (answer,) = await publish(target, ONE)
    assert isinstance(answer, Nacked)
    assert answer.permanent is (status in PERMANENT)
    assert f"HTTP {status}" in answer.reason


@pytest.mark.parametrize("status", [401, 403, 407, 503])
async def test_a_host_that_refuses_everything_is_unavailable_and_few_are_charged(
    target: Target, status: int
) -> None:
    target.script = answers(*[status] * 20)
    async with HttpPublisher.from_url(target.url("max_connections=1")) as publisher:
        with pytest.raises(
            BrokerUnavailableError, match=f"refusing messages: HTTP {status}"
        ):
            await publisher.publish(numbered(20, keys=20))


async def test_an_unknown_topic_delays_no_other(target: Target) -> None:
    async def script(arrival: Arrival) -> web.StreamResponse:
        known = arrival.message().topic == "orders"
        return web.Response(status=204 if known else 404)

    target.script = script
    batch = [*numbered(20, keys=20, topic="new"), Message("orders", b"")]
    *unknown, acked = await publish(target, *batch)
    assert acked == Acked()
    assert all(isinstance(a, Nacked) and not a.permanent for a in unknown)
    target.script = answers()
    assert await publish(target, *batch) == [Acked()] * 21


async def test_the_reason_quotes_the_beginning_of_the_receivers_answer(
    target: Target,
) -> None:
    async def script(arrival: Arrival) -> web.StreamResponse:
        return web.Response(status=422, text="no such\nshop " + "x" * 100_000)

    target.script = script
    (answer,) = await publish(target, ONE)
    assert isinstance(answer, Nacked)
    # Python 3.13 calls it Unprocessable Content.
    assert answer.reason.startswith("HTTP 422 Unprocessable ")
    assert ": no such shop xxx" in answer.reason
    assert len(answer.reason) < 300


async def test_a_secret_in_the_path_of_the_url_is_in_no_error(
    make_target: MakeTarget,
) -> None:
    path = "/services/hemlighet/häm"
    target = make_target()

    async def quoting(arrival: Arrival) -> web.StreamResponse:
        return web.Response(status=404, text=f"Cannot POST {arrival.path}")

    async def moved(arrival: Arrival) -> web.StreamResponse:
        where = {"Location": f"https://elsewhere.example{arrival.path}"}
        return web.Response(status=307, headers=where)

    publisher = HttpPublisher.from_url(target.url("to=hemlighet", path=path))
    said = [publisher.identity]
    async with publisher:
        target.script = quoting
        said += [str(await publisher.publish([ONE]))]
        target.script = moved
        with pytest.raises(BrokerUnavailableError) as raised:
            await publisher.publish([ONE])
        said += [str(raised.value)]
    head = b"HTTP/1.1 200 OK\r\nNo colon\r\n\r\n"
    async with (
        answering(make_target(), head) as broken,
        HttpPublisher.from_url(broken.url(path=path)) as publisher,
    ):
        said += [str(await publisher.publish([ONE]))]
    with pytest.raises(BrokerUnavailableError) as raised:
        async with HttpPublisher.from_url(broken.url(path=path)):
            pass
    said += [str(raised.value)]
    assert [text for text in said if "hemlighet" in text] == []
    assert f"http://127.0.0.1:{target.port}" in said[0]
    assert "404 Not Found: Cannot POST /…" in said[1]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed_and_cost_no_attempt(
    target: Target, status: int
) -> None:
    where = target.url(path="/elsewhere")
    target.script = answers(status, headers={"Location": where})
    with pytest.raises(
        BrokerUnavailableError, match=r"a redirect to .*: change the URL"
    ):
        await publish(target, ONE)
    assert len(target.arrivals) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_requested_pause_is_respected_and_costs_no_attempt(
    target: Target, status: int
) -> None:
    arrived_at: list[float] = []

    async def script(arrival: Arrival) -> web.StreamResponse:
        arrived_at.append(time.monotonic())
        if len(arrived_at) == 1:
            return web.Response(status=status, headers={"Retry-After": "2"})
        return web.Response(status=204)

    target.script = script
    async with HttpPublisher.from_url(target.url()) as publisher:
        with pytest.raises(BrokerUnavailableError, match="pause of 2 s"):
            await publisher.publish([ONE])
        with pytest.raises(BrokerUnavailableError, match=r"requested a pause: .* left"):
            await publisher.publish([ONE])
        assert len(arrived_at) == 1
        assert await until_answered(publisher, ONE) == [Acked()]
    assert arrived_at[1] - arrived_at[0] >= 1.99


async def test_a_postponed_message_holds_back_its_key_but_not_the_host(
    target: Target,
) -> None:
    async def script(arrival: Arrival) -> web.StreamResponse:
        if arrival.message().key == "key 6":
            return web.Response(status=204)
        return web.Response(status=425, headers={"Retry-After": "90"})

    target.script = script
    answers = await publish(target, *numbered(8, keys=7))
    for answer in answers[:6]:
        assert isinstance(answer, Nacked)
        assert answer.retry_after == timedelta(seconds=90)
    assert answers[6:] == [
        Acked(),
        Nacked("waiting behind a refused message of its key"),
    ]


async def test_a_message_is_postponed_no_longer_than_allowed(target: Target) -> None:
    target.script = answers(425, headers={"Retry-After": "86400"})
    (answer,) = await publish(target, ONE, options="max_retry_after=3s")
    assert isinstance(answer, Nacked)
    assert answer.retry_after == timedelta(seconds=3)


@pytest.mark.parametrize("is_date", [False, True])
async def test_a_pause_can_be_a_date_and_has_a_limit(
    target: Target, is_date: bool
) -> None:
    tomorrow = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
    value = tomorrow if is_date else "86400"
    target.script = answers(429, headers={"Retry-After": value})
    async with HttpPublisher.from_url(target.url("max_retry_after=1s")) as publisher:
        with pytest.raises(BrokerUnavailableError, match="pause of 1 s"):
            await publisher.publish([ONE])
        assert await until_answered(publisher, ONE) == [Acked()]


@pytest.mark.parametrize(
    "value",
    [
        "soon",
        "-1",
        "1e9",
        "",
        f"Mon, 01 Jan 2024 {'9' * 30}:00:00 GMT",
        f"Mon, 01 Jan 2024 00:00:00 +{'9' * 30}",
    ],
)
async def test_an_invalid_pause_is_ignored(target: Target, value: str) -> None:
    for status in (425, 429):
        target.script = answers(status, headers={"Retry-After": value})
        (answer,) = await publish(target, ONE)
        assert isinstance(answer, Nacked)
        assert answer.retry_after is None


async def test_a_refused_message_holds_back_its_key_and_no_other(
    target: Target,
) -> None:
    first, other, second = numbered(3, keys=2)

    async def script(arrival: Arrival) -> web.StreamResponse:
        refused = arrival.message() == first
        return web.Response(status=500 if refused else 204)

    target.script = script
    answers = await publish(target, first, other, second)
    assert [isinstance(a, Acked) for a in answers] == [False, True, False]
    assert {m.id for m in target.messages()} == {first.id, other.id}


async def test_a_permanently_refused_message_holds_nothing_back(
    target: Target,
) -> None:
    target.script = answers(422)
    first, second, third = await publish(target, *numbered(3))
    assert isinstance(first, Nacked)
    assert [second, third] == [Acked()] * 2


async def test_a_slow_answer_is_awaited(target: Target) -> None:
    async def script(arrival: Arrival) -> web.StreamResponse:
        await answer_after(0.5)
        return web.Response(status=204)

    target.script = script
    assert await publish(target, ONE, options="timeout=60s") == [Acked()]


async def test_the_status_decides_and_an_endless_answer_is_not_read(
    target: Target,
) -> None:
    async def endless(arrival: Arrival) -> web.StreamResponse:
        return web.Response(status=200, body=b"x" * 50_000_000)

    target.script = endless
    async with asyncio.timeout(60):
        assert await publish(target, *numbered(2)) == [Acked()] * 2


async def test_a_cookie_is_not_kept(target: Target) -> None:
    target.script = answers(204, headers={"Set-Cookie": "a=b"})
    await publish(target, *numbered(2))
    assert all("cookie" not in arrival.headers for arrival in target.arrivals)


async def test_a_header_of_an_answer_may_be_60_kb(target: Target) -> None:
    target.script = answers(200, headers={"X-Trace": "x" * 60_000})
    assert await publish(target, ONE) == [Acked()]


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nX-Trace: " + b"x" * 70_000 + b"\r\nContent-Length: 0",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 1",
        b"HTTP/1.1 200 OK\r\nNo colon",
        b"HTTP/1.1 200 OK\r\nContent-Length: many",
        b"220 mail.example ESMTP",
    ],
)
async def test_an_answer_that_cannot_be_read_costs_an_attempt(
    make_target: MakeTarget, head: bytes
) -> None:
    async with answering(make_target(), head + b"\r\n\r\n") as target:
        (nacked,) = await publish(target, ONE)
    assert isinstance(nacked, Nacked)
    assert "gave an answer that can't be read" in nacked.reason
    assert not nacked.permanent


@pytest.mark.parametrize("words", [b"\xff\xed\xa0\x80", b"a\x00b", b"x" * 60_000])
async def test_a_reason_is_short_and_can_be_stored(
    make_target: MakeTarget, words: bytes
) -> None:
    head = b"HTTP/1.1 400 " + words + b"\r\nContent-Length: 0\r\n\r\n"
    async with answering(make_target(), head) as target:
        (nacked,) = await publish(target, ONE)
    assert isinstance(nacked, Nacked)
    assert nacked.reason.encode()
    assert "\0" not in nacked.reason
    assert len(nacked.reason) < 1000


async def test_headers_of_an_answer_that_breaks_off_are_in_no_error(
    make_target: MakeTarget,
) -> None:
    head = b"HTTP/1.1 200 OK\r\nSet-Cookie: session=secret\r\nContent-"
    async with answering(make_target(), head) as target:
        with pytest.raises(BrokerUnavailableError, match="without an answer") as raised:
            await publish(target, ONE)
    assert "secret" not in str(raised.value)


@asynccontextmanager
async def answering(target: Target, text: bytes) -> AsyncIterator[Target]:
    """Let a server that writes this, whatever it is asked, take a target's place."""

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(IncompleteReadError, LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(text)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", free_port())
    target.port = server.sockets[0].getsockname()[1]
    async with server:
        yield target


async def test_a_payload_over_the_limit_is_never_sent(target: Target) -> None:
    large, small = await publish(
        target,
        Message("t", b"1234"),
        Message("t", b"123"),
        options="max_payload_bytes=3",
    )
    assert isinstance(large, Nacked)
    assert large.permanent
    assert "limit is 3 (max_payload_bytes)" in large.reason
    assert small == Acked()
    assert len(target.arrivals) == 1
