-- Does:  Survey congested lanes: find their first ready row, and among max_examined rows the first that was passed by but isn't blocked.
-- Takes: lanes, positions and floors (same length), returning (keys that catch up), readied (seqs that do), refused_since, max_examined
-- Gives: lane, first created_at, stray seq and created_at (null where there is none), snapshot (xmin and age)
-- Index: message_ready_idx for the rows, message_blocked_idx for their heads; on every partition
SELECT leased.lane, first.created_at, stray.seq, stray.created_at,
       -- See outbox/postgres/lane_cursor.py.
       concat_ws(':', pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()),
                 pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid)) AS snapshot
  FROM unnest(%(lanes)s::smallint[], %(positions)s::bigint[], %(floors)s::bigint[]) AS leased (lane, position, floor)
  LEFT JOIN LATERAL (
      SELECT m.created_at
        FROM outbox.message AS m
       WHERE m.lane = leased.lane
         AND m.available_at IS NULL
         AND m.published_at IS NULL
         AND m.dead_lettered_at IS NULL
       ORDER BY m.seq
       LIMIT 1
  ) AS first ON true
  LEFT JOIN LATERAL (
      SELECT examined.seq, examined.created_at
        FROM (
            SELECT m.seq, m.key, m.created_at
              FROM outbox.message AS m
             WHERE m.lane = leased.lane
               AND m.seq > leased.position
               AND m.seq <= leased.floor
               AND m.available_at IS NULL
               AND m.published_at IS NULL
               AND m.dead_lettered_at IS NULL
             ORDER BY m.seq
             LIMIT %(max_examined)s
        ) AS examined
       WHERE examined.seq <> ALL (%(readied)s::bigint[])
         AND (examined.key IS NULL
              OR (    examined.key <> ALL (%(returning)s::text[])
                  AND NOT EXISTS (
                      SELECT
                        FROM outbox.message AS head
                       WHERE head.lane = leased.lane
                         AND head.key = examined.key
                         AND head.attempts > 0
                         AND head.published_at IS NULL
                         AND head.dead_lettered_at IS NULL
                         AND head.created_at >= %(refused_since)s
                         AND head.available_at IS NOT NULL
                         AND head.seq <> examined.seq
                  )))
       LIMIT 1
  ) AS stray ON true
