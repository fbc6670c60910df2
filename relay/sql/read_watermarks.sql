-- Does:  Read the seq up to which every message of a lane was verified to have a mark.
-- Takes: lanes, drawn (the last seq drawn; a higher watermark predates a reset of the sequence)
-- Gives: lane, seq (-1: nothing was verified)
-- Index: watermark_pkey on every partition, from its end
SELECT leased.lane, coalesce(verified.up_to, -1)
  FROM unnest(%(lanes)s::smallint[]) AS leased (lane)
  LEFT JOIN LATERAL (
      SELECT w.up_to
        FROM outbox.watermark AS w
       WHERE w.lane = leased.lane
         AND w.cluster = (SELECT outbox.cluster())
       -- Stretches form a chain: the last one also ends last.
       ORDER BY w.above DESC
       LIMIT 1
  ) AS verified ON verified.up_to <= %(drawn)s
