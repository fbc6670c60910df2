"""A statement reads its snapshot, and an id above all that have been assigned."""

from typing import Any

import psycopg
import pytest

from pillarbox.outbox.log.claims import Claims
from pillarbox.outbox.log.view import ReadView
from pillarbox.outbox.postgres.connection import connect, conninfo
from pillarbox.outbox.postgres.sql_files import load
from tests.plans.test_relay_plans import LIMITS

CLAIM: dict[str, Any] = {
    **Claims().plan([]).parameters,
    "reader": "main",
    "gets_all": False,
    **LIMITS,
    "max_read": 1,
    "max_rows": 1,
}


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize(
    ("package", "name"), [("outbox.log", "read_view"), ("outbox.log", "claim_batch")]
)
async def test_a_view_has_an_id_above_all_open_ones_without_assigning_one(
    package: str, name: str, in_transaction: bool, database_url: str
) -> None:
    async with await connect(database_url, application_name="test") as connection:
        with (
            psycopg.connect(conninfo(database_url)) as first,
            # Its id is above all that have ended: xmax doesn't cover it.
            psycopg.connect(conninfo(database_url)) as last,
        ):
            ids = [
                id
                for writer in (first, last)
                for (id,) in writer.execute("SELECT pg_current_xact_id()::text::bigint")
            ]
            if in_transaction:
                await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor = await connection.execute(load(package, name), CLAIM)
            (*_, text) = (await cursor.fetchall())[0]
            view = ReadView.parse(text)
            cursor = await connection.execute("SELECT pg_current_xact_id_if_assigned()")

            assert view.snapshot.xmin <= ids[0]
            assert view.next_xid > ids[1]
            assert await cursor.fetchone() == (None,)
