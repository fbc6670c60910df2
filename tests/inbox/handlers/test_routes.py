"""Topics are routed to handlers and queues."""

from typing import Any

import pytest

from pillarbox import Message
from pillarbox.inbox.handlers.routes import Routes
from pillarbox.outbox.errors import ConfigError


def one(session: object, message: Message) -> None: ...
def two(session: object, message: Message) -> None: ...


def test_the_exact_topic_wins_over_prefixes_and_the_longest_prefix_over_others() -> (
    None
):
    routes = Routes[Any]()
    handlers = {
        topic: (lambda session, message: None)
        for topic in ("orders.placed", "orders.*", "orders.eu.*", "*")
    }
    for topic, handler in handlers.items():
        routes.add(topic, handler)
    found = {
        "orders.placed": "orders.placed",
        "orders.paid": "orders.*",
        "orders.eu.placed": "orders.eu.*",
        "orders": "*",
    }
    for topic, registered in found.items():
        assert routes.find(topic) is handlers[registered]
    assert set(routes.topics) == set(handlers)
    assert Routes[Any]().find("orders") is None


@pytest.mark.parametrize("topic", ["orders", "orders.*"])
def test_two_handlers_for_one_topic_are_named_and_refused(topic: str) -> None:
    routes = Routes[Any]()
    routes.add(topic, one)
    with pytest.raises(ConfigError, match=r"already handled by one: .* two"):
        routes.add(topic, two)


@pytest.mark.parametrize("topic", ["", "*.placed", "a*b*", None])
def test_an_invalid_topic_is_refused(topic: str) -> None:
    with pytest.raises(ConfigError, match="write a topic"):
        Routes[Any]().add(topic, one)


def test_topics_are_grouped_by_queue() -> None:
    routes = Routes[Any]()
    routes.add("orders.*", one, "batch")
    routes.add("orders.placed", two, "batch")
    routes.add("refunds", one)
    assert routes.queues == {
        "default": ["refunds"],
        "batch": ["orders.placed", "orders.*"],
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [("orders.*", "orders.placed"), ("orders.placed", "orders.*"), ("*", "orders.*")],
)
def test_a_topic_in_two_queues_is_refused(first: str, second: str) -> None:
    routes = Routes[Any]()
    routes.add(first, one, "batch")
    with pytest.raises(ConfigError, match="use one queue for both"):
        routes.add(second, two)


@pytest.mark.parametrize("queue", ["", "a.b", "a--b", "-a", "a b", None])
def test_an_invalid_queue_name_is_refused(queue: Any) -> None:
    with pytest.raises(ConfigError, match="use letters, digits"):
        Routes[Any]().add("orders", one, queue)
