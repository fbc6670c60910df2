-- Does:  Find keys whose head was nacked and waits, some of each lane: their later messages must wait too.
-- Takes: lanes, max_keys (of each lane)
-- Gives: lane, key
-- Index: message_blocked_idx
SELECT leased.lane, waiting.key
  FROM unnest(%(lanes)s::smallint[]) AS leased (lane)
 CROSS JOIN LATERAL (
     SELECT m.key
       FROM outbox.message AS m
      WHERE m.lane = leased.lane
        AND m.key IS NOT NULL
        AND m.attempts > 0
        AND m.available_at IS NOT NULL
        AND m.published_at IS NULL
        AND m.dead_lettered_at IS NULL
      LIMIT %(max_keys)s
 ) AS waiting
