"""Makes the fixtures and the options known to all tests."""

import gc

import pytest
from hypothesis import HealthCheck, settings

# How fast an example is says something about the machine, and nothing about the code.
settings.register_profile(
    "pillarbox", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pillarbox")

pytest_plugins = [
    "tests.fixtures.http",
    "tests.fixtures.kafka",
    "tests.fixtures.nats",
    "tests.fixtures.pgbouncer",
    "tests.fixtures.postgres",
    "tests.fixtures.proxy",
    "tests.fixtures.rabbitmq",
    "tests.fixtures.redis",
    "tests.fixtures.refusals",
    "tests.fixtures.site",
    "tests.fixtures.webhook",
    "tests.fixtures.sqs",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="test faults and real input in their full numbers, which takes minutes",
    )
    parser.addoption(
        "--webhooks",
        metavar="PATH",
        help="the file github-webhooks.jsonl.gz (default: $PILLARBOX_WEBHOOKS, "
        "or shared/data/ beside the repository)",
    )


def pytest_collection_finish() -> None:
    """Take what was imported out of the sight of the garbage collector.

    Tests that look for what was left open collect after each test; walking all modules
    each time would take longer than most of these tests.
    """
    gc.collect()
    gc.freeze()
