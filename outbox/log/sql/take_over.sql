-- Does:  Read how far a reader has read lanes, day by day.
-- Takes: reader, lanes, since (the seq up to which rows of a day without a position are not read), oldest and newest (between which days are listed in any case)
-- Gives: lane, starts_at, ends_at, number, up_to, snapshot, late_up_to, late_snapshot (null from number on: nothing is stored), head (the first seq above the position; null: none)
-- Index: position_pkey and message_lane_idx on every partition
SELECT leased.lane, day.starts_at, day.ends_at,
       stored.number, stored.up_to, stored.snapshot::text, stored.late_up_to, stored.late_snapshot::text, above.seq
  FROM unnest(%(lanes)s::smallint[]) AS leased (lane)
 CROSS JOIN outbox.partitions('outbox.message') AS day
  LEFT JOIN LATERAL (
      SELECT p.number, p.up_to, p.snapshot, p.late_up_to, p.late_snapshot
        FROM outbox.position AS p
       WHERE p.reader = %(reader)s
         AND p.lane = leased.lane
         AND p.created_at = day.starts_at
       ORDER BY p.number DESC
       LIMIT 1
  ) AS stored ON true
  LEFT JOIN LATERAL (
      SELECT m.seq
        FROM outbox.message AS m
       WHERE m.lane = leased.lane
         AND m.seq > coalesce(stored.up_to, %(since)s)
         AND m.created_at >= day.starts_at
         AND m.created_at < day.ends_at
       ORDER BY m.seq
       LIMIT 1
  ) AS above ON true
 WHERE NOT day.detach_pending
   AND NOT day.is_default
   AND (stored.number IS NOT NULL OR above.seq IS NOT NULL
        OR day.starts_at < %(newest)s AND day.ends_at > %(oldest)s)
