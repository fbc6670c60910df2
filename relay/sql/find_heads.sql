-- Does:  Find the first ready message of each lane, wherever it lies: without floor, on every day.
-- Takes: lanes, blocked keys
-- Gives: lane, seq and created_at (null where the lane has none), snapshot, mark
-- Index: message_ready_idx on every partition
SELECT leased.lane, head.seq, head.created_at, pg_catalog.pg_current_snapshot()::text AS snapshot,
       -- Ours ends after this look, above the ids of all that are open now: see relay/lanes/lane.py.
       pg_catalog.pg_current_xact_id() IS NOT NULL AS mark
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
