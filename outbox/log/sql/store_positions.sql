-- Does:  Store how far a reader has read lanes and days.
-- Takes: reader, and arrays of the same length: starts and ends (of the days), lanes, numbers, up_tos, snapshots, late_up_tos, late_snapshots, messages, deferred, next_xids
-- Gives: nothing
-- Index: position_pkey, for conflicts: another process has settled
INSERT INTO outbox.position (created_at, ends_at, number, up_to, late_up_to, messages, deferred, lane, reader,
                             snapshot, late_snapshot, next_xid)
SELECT starts_at, ends_at, number, up_to, late_up_to, messages, deferred, lane, %(reader)s,
       snapshot::pg_snapshot, late_snapshot::pg_snapshot, next_xid::xid8
  FROM unnest(%(starts)s::timestamptz[], %(ends)s::timestamptz[], %(lanes)s::smallint[], %(numbers)s::bigint[], %(up_tos)s::bigint[],
              %(snapshots)s::text[], %(late_up_tos)s::bigint[], %(late_snapshots)s::text[], %(messages)s::integer[],
              %(deferred)s::integer[], %(next_xids)s::text[])
       AS settled (starts_at, ends_at, lane, number, up_to, snapshot, late_up_to, late_snapshot, messages, deferred, next_xid)
