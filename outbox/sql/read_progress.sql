-- Does:  Read how far each lane was verified and marked in the partitions from a moment on.
-- Takes: since (where a partition begins)
-- Gives: lane, verified_up_to and marked_up_to (null: no such row in these partitions), has_messages (it has some in these partitions)
-- Index: watermark_pkey, settlement_lane_idx and message_lane_idx of these partitions
SELECT l.lane,
       -- Ignores a watermark from before the sequence was set back.
       CASE WHEN verified.up_to <= (SELECT q.last_value FROM outbox.message_seq AS q) THEN verified.up_to END AS verified_up_to,
       marked.last_seq AS marked_up_to,
       coalesce(message.exists, false) AS has_messages
  FROM generate_series(0, 47) AS l (lane)
  LEFT JOIN LATERAL (
       SELECT w.up_to
         FROM outbox.watermark AS w
        WHERE w.lane = l.lane AND w.cluster = (SELECT outbox.cluster()) AND w.created_at >= %(since)s
        ORDER BY w.above DESC
        LIMIT 1
       ) AS verified ON true
  LEFT JOIN LATERAL (
       SELECT s.last_seq
         FROM outbox.settlement AS s
        WHERE s.lane = l.lane AND s.created_at >= %(since)s
        ORDER BY s.last_seq DESC
        LIMIT 1
       ) AS marked ON true
  LEFT JOIN LATERAL (
       SELECT true FROM outbox.message AS m WHERE m.lane = l.lane AND m.created_at >= %(since)s ORDER BY m.seq DESC LIMIT 1
       ) AS message (exists) ON true
 ORDER BY l.lane
