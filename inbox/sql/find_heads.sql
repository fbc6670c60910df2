-- Does:  Find the first ready delivery of each lane, wherever it lies: the sweep without floor.
-- Takes: consumer, lanes
-- Gives: lane, seq and created_at (null where the lane is empty), now
-- Index: delivery_ready_idx on every partition
SELECT leased.lane, head.seq, head.created_at, clock_timestamp() AS now
  FROM unnest(%(lanes)s::smallint[]) AS leased (lane)
  LEFT JOIN LATERAL (
      SELECT d.seq, d.created_at
        FROM inbox.delivery AS d
       WHERE d.consumer = %(consumer)s
         AND d.lane = leased.lane
         AND d.acked_at IS NULL
         AND d.available_at IS NULL
       ORDER BY d.seq
       LIMIT 1
  ) AS head ON true
