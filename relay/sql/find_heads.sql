-- Does:  Find the first ready message of each lane, in all partitions and below the floor as well.
-- Takes: lanes, blocked keys
-- Gives: lane, seq and created_at (null where the lane has none), snapshot (xmin and age)
-- Index: message_ready_idx on every partition
SELECT leased.lane, head.seq, head.created_at,
       -- See outbox/postgres/lane_cursor.py.
       concat_ws(':', pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()),
                 pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid)) AS snapshot
  FROM unnest(%(lanes)s::smallint[]) AS leased (lane)
  LEFT JOIN LATERAL (
      SELECT m.seq, m.created_at
        FROM outbox.message AS m
       WHERE m.lane = leased.lane
         AND m.available_at IS NULL
         AND m.published_at IS NULL
         AND m.dead_lettered_at IS NULL
         AND (m.key IS NULL OR m.key <> ALL (%(blocked)s::text[]))
       ORDER BY m.seq
       LIMIT 1
  ) AS head ON true
