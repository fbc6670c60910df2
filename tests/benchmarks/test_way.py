"""What a message that comes alone costs, counted in calls of Python functions."""

from benchmarks.way import BARE, CONSUMER, RELAY, WAYS, counts_in
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import FEW_DAYS, Template, new_database


def test_a_message_that_comes_alone_costs_few_calls_and_one_claim(
    server: PostgresServer, template: Template
) -> None:
    spent = {}
    for way in WAYS:
        with new_database(server, "pillarbox_way", template, ahead=FEW_DAYS) as name:
            url = server.database_url(name)
            spent[way], _ = counts_in(url, way, alone=30, backlog=1, idle_for=2.0)

    bare = spent[BARE].calls
    assert spent[CONSUMER].calls < 2.5 * bare, spent
    assert spent[RELAY].calls < 1.25 * bare, spent
    assert spent[CONSUMER].count("Read the next messages of leased lanes") < 1.1, spent
