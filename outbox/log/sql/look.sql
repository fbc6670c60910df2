-- Does:  Read the snapshot of the transaction, and the next transaction id.
-- Takes: nothing
-- Gives: look (xmin:xmax:xip_list/age, the age counted from xmin)
-- Index: none
SELECT concat_ws('/', pg_catalog.pg_current_snapshot()::text,
                 pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid))
