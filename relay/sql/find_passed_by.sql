-- Does:  Find messages without a mark in a lane and a partition, up to a seq.
-- Takes: lane, starts_at and ends_at (of the partition), up_to, max_rows
-- Gives: seq, id, created_at, key (null if it is too long), topic (its beginning)
-- Index: message_lane_idx and settlement_lane_idx of the partition
SELECT m.seq, m.id, m.created_at, CASE WHEN octet_length(m.key) <= %(max_indexed)s THEN m.key END, left(m.topic, 80)
  FROM outbox.message AS m
 WHERE m.lane = %(lane)s
   AND m.seq <= %(up_to)s
   AND m.created_at >= %(starts_at)s
   AND m.created_at < %(ends_at)s
   -- See claim_batch.sql.
   AND m.id NOT IN (
           SELECT unnest(ARRAY(
               SELECT unnest(s.ids)
                 FROM outbox.settlement AS s
                WHERE s.lane = %(lane)s
                  AND s.first_seq <= %(up_to)s
                  AND s.created_at >= %(starts_at)s
                  AND s.created_at < %(ends_at)s
                ORDER BY s.last_seq)))
 ORDER BY m.seq
 LIMIT %(max_rows)s
