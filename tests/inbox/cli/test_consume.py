"""`pillarbox consume`: start, drain, kill and error messages."""

import re
import signal

import psycopg
import pytest

from outbox.cli.main import main
from pillarbox import Message
from tests.fixtures.consumers import numbered
from tests.fixtures.sessions import execute
from tests.fixtures.site import Site
from tests.fixtures.waiting import wait_for


async def test_sigterm_lets_handlers_finish_and_exits_with_0(site: Site) -> None:
    await site.publish(Message("orders", b"wait", key="k"), *numbered(3))
    with psycopg.connect(site.url, autocommit=True) as gate:
        gate.execute("SELECT pg_advisory_lock(1)")
        process = site.run("shop_app:make")
        process.wait_for_log("waiting")
        wait_for("the others are done", lambda: site.unacked() == 1)
        process.terminate()
        # Wait, because a second signal would end it at once.
        wait_for("it drains", lambda: not process.catches(signal.SIGTERM))
        await site.publish(Message("orders", b"too late"))
        gate.execute("SELECT pg_advisory_unlock(1)")
        assert process.wait() == 0, process.log()
    assert sorted(site.effects()) == ["0", "1", "2", "wait"]
    assert site.unacked() == 1
    assert "Traceback" not in process.log()


async def test_a_second_sigterm_ends_the_process_at_once(site: Site) -> None:
    await site.publish(Message("orders", b"hang"))
    process = site.run()
    process.wait_for_log("hanging", seconds=60)
    process.terminate()
    wait_for("it drains", lambda: not process.catches(signal.SIGTERM), seconds=60)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    assert site.unacked() == 1


async def test_a_hanging_handler_does_not_keep_the_process_from_exiting(
    site: Site,
) -> None:
    await site.publish(Message("orders", b"hang"))
    process = site.run(TEST_DRAIN="0.1")
    process.wait_for_log("hanging")
    process.terminate()
    assert process.wait() == 0, process.log()
    abandoned = re.search("WARNING HandlersAbandoned (.*)", process.log())
    assert abandoned is not None
    assert re.match(r"consumer=\S+ handlers=1 remedy='let the handlers", abandoned[1])
    assert site.effects() == []
    assert site.unacked() == 1


async def test_messages_of_a_killed_consumer_are_handled_once_by_the_next(
    site: Site,
) -> None:
    await site.publish(Message("orders", b"wait", key="key 0"), *numbered(5))
    with psycopg.connect(site.url, autocommit=True) as gate:
        gate.execute("SELECT pg_advisory_lock(1)")
        process = site.run()
        process.wait_for_log("waiting")
        process.kill()
    site.run()
    wait_for("all is handled", lambda: site.unacked() == 0)
    assert site.effects() == ["wait", "0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("path", "variables", "words"),
    [
        ("shop_app:broken", {}, "should be a Consumer"),
        ("shop_app:fail", {}, "'fail' raised LookupError: no such setting"),
        ("no_such:consumer", {}, "No module named 'no_such'"),
        ("shop_app:consumer", {"TEST_BROKER": "x://y"}, "no source for the scheme"),
        ("shop_app:consumer", {"TEST_BROKER": ""}, "URL of the source is empty"),
        (
            "shop_app:consumer",
            {"TEST_BROKER": "redis://127.0.0.1:1"},
            "can't be reached",
        ),
        (
            "shop_app:consumer",
            {"TEST_URL": "postgresql://127.0.0.1:1/x"},
            "can't read the inbox",
        ),
    ],
)
def test_an_error_at_start_prints_one_line_and_exits_with_2(
    site: Site, path: str, variables: dict[str, str], words: str
) -> None:
    process = site.run(path, **variables)
    assert process.wait() == 2
    # Dead letters may have been retried before the broker was found unavailable.
    (line,) = (line for line in process.log().splitlines() if " INFO " not in line)
    assert words in line


def test_commands_create_and_end_subscriptions(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        assert main([*arguments, "--database", database_url]) == 0
        return capsys.readouterr().out

    query = "SELECT consumer, topic FROM inbox.subscription"
    for _ in range(2):
        said = run("subscribe", "billing", "orders.*", "refunds")
        assert said == "billing is subscribed to orders.*, refunds\n"
    assert sorted(execute(database_url, query)) == [
        ("billing", "orders.*"),
        ("billing", "refunds"),
    ]
    assert "no longer subscribed to refunds" in run("unsubscribe", "billing", "refunds")
    assert "none of refunds" in run("unsubscribe", "billing", "refunds")
    assert execute(database_url, query) == [("billing", "orders.*")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["billing", "a*b"], "topic 'a*b'"),
        (["", "a"], "receipt consumer ''"),
        (["billing", "a", "--database", "mysql://x"], "use postgresql://"),
        (["billing", "a", "--database", "postgresql://127.0.0.1:1/x"], "can't reach"),
    ],
)
def test_an_invalid_subscription_prints_one_line_and_exits_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["subscribe", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
