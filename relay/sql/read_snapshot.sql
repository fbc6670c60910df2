-- Does:  Read the part of the transaction's snapshot that a lane's floor depends on.
-- Takes: nothing
-- Gives: one row: snapshot (xmin and age)
-- Index: none
-- See outbox/postgres/lane_cursor.py.
SELECT concat_ws(':', pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()),
                 pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid)) AS snapshot
