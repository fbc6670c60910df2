-- Does:  Find rows at or below a position that it doesn't cover, by their transactions.
-- Takes: lanes, up_tos, snapshots, late_up_tos, late_snapshots (same length), base, oldest and newest created_at, xids and xid_from (the transactions in question)
-- Gives: lane, seq (the lowest)
-- Index: message_xid_idx on each partition between oldest and newest
SELECT late.lane, min(late.seq)
  FROM (
      SELECT m.lane, m.seq, m.xid
        FROM outbox.message AS m
       WHERE m.created_at >= %(oldest)s
         AND m.created_at < %(newest)s
         AND ((m.xid::text)::bigint >= %(xid_from)s OR (m.xid::text)::bigint = ANY (%(xids)s::bigint[]))
      -- Otherwise the planner may read each lane from its beginning.
      OFFSET 0
  ) AS late
  JOIN (
      SELECT lane, up_to, snapshot::pg_snapshot AS snapshot, late_up_to, late_snapshot::pg_snapshot AS late_snapshot
        FROM unnest(%(lanes)s::smallint[], %(up_tos)s::bigint[], %(snapshots)s::text[], %(late_up_tos)s::bigint[], %(late_snapshots)s::text[])
             AS leased (lane, up_to, snapshot, late_up_to, late_snapshot)
      OFFSET 0
  ) AS leased USING (lane)
 WHERE late.seq <= leased.up_to
   AND late.seq > %(base)s
   AND NOT pg_visible_in_snapshot(late.xid, leased.snapshot)
   AND (late.seq <= leased.late_up_to AND pg_visible_in_snapshot(late.xid, leased.late_snapshot)) IS NOT TRUE
 GROUP BY late.lane
