"""Makes the fixtures and the options available to all tests."""

import gc
import os
import secrets
import signal
from itertools import groupby
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

from pillarbox.outbox.testing import cluster
from tests.servers.process import use_chosen_postgres

# An example's duration depends on the machine, not on the code.
settings.register_profile(
    "pillarbox", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pillarbox")

# Users' processes buffer their output.
os.environ.pop("PYTHONUNBUFFERED", None)

# A shell makes its background processes ignore SIGINT, and every process that a test
# starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Roles of tests have no password. Those that could run programs as the user of the
# server, or become one that can, need one, which all clients find in the environment.
if "PILLARBOX_DATABASE_URL" not in os.environ:
    os.environ.setdefault("PGPASSWORD", secrets.token_hex(16))
    cluster.RULES = (
        "local all all trust\n"
        "host all,replication postgres,pillarbox_owner,pillarbox_detacher"
        " 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"
    )

use_chosen_postgres()

_left_out: Final = pytest.StashKey[int]()

pytest_plugins = [
    "pillarbox.outbox.testing.plugin",
    "tests.fixtures.http",
    "tests.fixtures.proxy",
    "tests.fixtures.kafka",
    "tests.fixtures.nats",
    "tests.fixtures.pauses",
    "tests.fixtures.pgbouncer",
    "tests.fixtures.postgres",
    "tests.fixtures.rabbitmq",
    "tests.fixtures.redis",
    "tests.fixtures.site",
    "tests.fixtures.spans",
    "tests.fixtures.webhook",
    "tests.fixtures.sqs",
    "tests.fixtures.doctor",
    "tests.acceptance.fixtures",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="test faults and real input in their full numbers, which takes minutes",
    )
    for name in ("messages", "keys", "faults", "seed"):
        help = f"{name} of the tests in which faults happen at random"
        parser.addoption(f"--{name}", type=int, help=help)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection.

    Tests that check for open resources collect garbage after each test; traversing all
    modules each time would take longer than most of these tests.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out variants and long tests without --full, and spread long modules.

    On servers without pg_partman, tests that name it are left out, too.
    """
    if "PILLARBOX_TEST_WITHOUT_PARTMAN" in os.environ:
        about_it = [item for item in items if "partman" in item.nodeid]
        items[:] = [item for item in items if item not in set(about_it)]
        config.hook.pytest_deselected(items=about_it)
    if not config.getoption("--full"):
        left = [
            it
            for it in items
            if {"variant", "long"} & {m.name for m in it.iter_markers()}
        ]
        items[:] = [item for item in items if item not in set(left)]
        config.hook.pytest_deselected(items=left)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = len(left)
    spread_long_modules(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Store how many tests a worker left out, which pytest-xdist doesn't show."""
    node.config.stash[_left_out] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print how many tests were left out."""
    if left_out := config.stash.get(_left_out, 0):
        terminalreporter.line(
            f"{left_out} variants and long tests not run: add --full, or make fault"
        )


def spread_long_modules(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a worker from starting a long test when the others are almost done.

    Modules stay in their random order, except that those with real processes are spread
    over the first four fifths.
    """
    if not hasattr(config, "workerinput"):
        return
    modules = [list(module) for _, module in groupby(items, lambda item: item.path)]
    long = [module for module in modules if any(map(is_long, module))]
    short = [module for module in modules if not any(map(is_long, module))]
    spread = [((n + 0.5) / len(long) * 0.8, module) for n, module in enumerate(long)]
    spread += [((n + 0.5) / len(short), module) for n, module in enumerate(short)]
    spread.sort(key=lambda placed: placed[0])
    items[:] = [item for _, module in spread for item in module]


def is_long(item: pytest.Item) -> bool:
    """Return whether a test kills, stops or disconnects real processes."""
    return item.get_closest_marker("fault") is not None
