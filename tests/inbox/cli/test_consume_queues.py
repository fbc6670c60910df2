"""`pillarbox consume` with `--queue`, and with `--once`."""

import pytest

from pillarbox import Message
from tests.fixtures.consumers import numbered
from tests.fixtures.sessions import execute
from tests.fixtures.site import Site
from tests.fixtures.waiting import wait_for

CONSUMER = "shop_app:consumer"
PAYLOADS_LEFT = """
    SELECT convert_from(payload, 'UTF8') FROM inbox.message
      JOIN inbox.delivery_status USING (seq, created_at)
     WHERE acked_at IS NULL
"""


async def test_once_handles_the_waiting_messages_and_exits_with_0(site: Site) -> None:
    await site.publish(*numbered(20, keys=5), Message("bulk.a", b"bulk"))
    process = site.run(CONSUMER, "--once", INTERVALS="idle=0.5")
    assert process.wait(60) == 0, process.log()
    assert sorted(site.effects()) == sorted([*map(str, range(20)), "bulk"])
    assert site.unacked() == 0


async def test_once_exits_with_1_if_a_message_was_dead_lettered(site: Site) -> None:
    await site.publish(Message("orders", b"bad"), Message("orders", b"good"))
    process = site.run(CONSUMER, "--once", INTERVALS="idle=0.5")
    assert process.wait(60) == 1, process.log()
    assert site.effects() == ["good"]
    assert execute(site.url, "SELECT error_reason FROM inbox.dead_letter") == [
        ("DeadLetter: it is bad",)
    ]


async def test_once_does_not_wait_for_later_retries(site: Site) -> None:
    await site.publish(Message("orders", b"later", key="k"), Message("orders", b"now"))
    process = site.run(CONSUMER, "--once", INTERVALS="idle=0.5")
    assert process.wait(60) == 0, process.log()
    assert site.effects() == ["now"]
    assert execute(site.url, PAYLOADS_LEFT) == [("later",)]


async def test_a_handler_that_calls_exit_does_not_end_the_process(site: Site) -> None:
    await site.publish(Message("orders", b"exit"), Message("orders", b"good"))
    process = site.run(CONSUMER, "--once", INTERVALS="idle=0.5")
    assert process.wait(60) == 0, process.log()
    assert site.effects() == ["good"]
    assert "the handler raised SystemExit: 0" in process.log()


async def test_only_the_named_queues_are_served(site: Site) -> None:
    await site.publish(Message("orders", b"order"), Message("bulk.a", b"bulk"))
    process = site.run(CONSUMER, "--queue=batch=3", "--once", INTERVALS="idle=0.5")
    assert process.wait(60) == 0, process.log()
    assert site.effects() == ["bulk"]
    assert execute(site.url, PAYLOADS_LEFT) == [("order",)]
    process = site.run(CONSUMER, "--queue", "default", "--queue", "batch=2")
    both = ["bulk", "order"]
    wait_for("both are served", lambda: sorted(site.effects()) == both, seconds=60)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--queue=batch=0"], "weight 0 of queue 'batch': must be a whole number"),
        (["--queue=batch=-1"], "weight -1 of queue 'batch'"),
        (
            ["--queue=batch=two"],
            "--queue batch=two: weight 'two' is not a whole number",
        ),
        (["--queue=batch", "--queue=batch=2"], "'batch' was named before"),
        (["--queue=bacth"], "queue 'bacth': no handler is registered for it"),
        (["--watchdog=-1s"], "'--watchdog': '-1s': write 90s"),
        (["--listen=99999"], "listen=99999: not an address"),
        (["--listen=::1:80"], "listen=::1:80: not an address"),
    ],
)
def test_an_invalid_option_prints_one_line_and_exits_with_2(
    site: Site, options: list[str], words: str
) -> None:
    process = site.run(CONSUMER, *options)
    assert process.wait(60) == 2
    (line,) = process.log().splitlines()
    assert words in line
