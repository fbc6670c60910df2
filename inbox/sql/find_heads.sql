-- Does:  Find the first delivery above the watermark of each lane in each partition.
-- Takes: consumer, lanes
-- Gives: lane, starts_at and ends_at of the partition, watermark (-1: none), seq (null: no delivery above it)
-- Index: watermark_pkey and delivery_lane_idx on every partition
SELECT leased.lane, p.starts_at, p.ends_at, mark.up_to AS watermark, head.seq
  FROM outbox.partitions('inbox.delivery') AS p
 CROSS JOIN unnest(%(lanes)s::smallint[]) AS leased (lane)
 CROSS JOIN LATERAL (
      SELECT coalesce(max(w.up_to), -1) AS up_to
        FROM inbox.watermark AS w
       WHERE w.consumer = %(consumer)s
         AND w.lane = leased.lane
         AND w.created_at = p.starts_at
         AND w.cluster = %(cluster)s
 ) AS mark
  LEFT JOIN LATERAL (
      SELECT d.seq
        FROM inbox.delivery AS d
       -- Rows and not columns, so that no index but delivery_lane_idx has the order: by seq alone the way
       -- leads through all other lanes and consumers.
       WHERE (d.consumer, d.lane, d.seq) > (%(consumer)s, leased.lane, mark.up_to)
         AND (d.consumer, d.lane) <= (%(consumer)s, leased.lane)
         AND d.created_at >= p.starts_at
         AND d.created_at < p.ends_at
       ORDER BY d.consumer, d.lane, d.seq
       LIMIT 1
 ) AS head ON true
 WHERE NOT p.is_default
 ORDER BY leased.lane, p.starts_at
