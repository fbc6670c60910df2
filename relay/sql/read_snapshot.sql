-- Does:  Read the transaction's snapshot, and mark the end of a look.
-- Takes: nothing
-- Gives: one row: snapshot, mark
-- Index: none
SELECT pg_catalog.pg_current_snapshot()::text AS snapshot,
       -- See find_heads.sql.
       pg_catalog.pg_current_xact_id() IS NOT NULL AS mark
