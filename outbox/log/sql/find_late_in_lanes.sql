-- Does:  Find rows at or below a position that it doesn't cover, in lanes that have few.
-- Takes: lanes, up_tos, snapshots, late_up_tos, late_snapshots (same length), base, oldest and newest created_at
-- Gives: lane, seq (the lowest)
-- Index: message_lane_idx on each partition between oldest and newest
SELECT leased.lane, late.seq
  FROM (
      SELECT lane, up_to, snapshot::pg_snapshot AS snapshot, late_up_to, late_snapshot::pg_snapshot AS late_snapshot
        FROM unnest(%(lanes)s::smallint[], %(up_tos)s::bigint[], %(snapshots)s::text[], %(late_up_tos)s::bigint[], %(late_snapshots)s::text[])
             AS leased (lane, up_to, snapshot, late_up_to, late_snapshot)
      OFFSET 0
  ) AS leased
 CROSS JOIN LATERAL (
      SELECT m.seq
        FROM outbox.message AS m
       WHERE m.lane = leased.lane
         AND m.seq > %(base)s
         AND m.seq <= leased.up_to
         AND m.created_at >= %(oldest)s
         AND m.created_at < %(newest)s
         AND NOT pg_visible_in_snapshot(m.xid, leased.snapshot)
         AND (m.seq <= leased.late_up_to AND pg_visible_in_snapshot(m.xid, leased.late_snapshot)) IS NOT TRUE
       ORDER BY m.seq
       LIMIT 1
  ) AS late
