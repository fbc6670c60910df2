-- Does:  Compare the number of messages in a lane and a partition up to a seq with the number that were verified.
-- Takes: lane, starts_at and ends_at (of the partition), up_to
-- Gives: one row: whether the numbers are equal
-- Index: message_lane_idx and watermark_pkey of the partition
SELECT (SELECT count(*)
          FROM outbox.message AS m
         WHERE m.lane = %(lane)s
           AND m.seq <= %(up_to)s
           AND m.created_at >= %(starts_at)s
           AND m.created_at < %(ends_at)s)
       = (SELECT coalesce(sum(w.messages), 0)
            FROM outbox.watermark AS w
           WHERE w.lane = %(lane)s
             AND w.up_to <= %(up_to)s
             AND w.created_at >= %(starts_at)s
             AND w.created_at < %(ends_at)s
             AND w.cluster = (SELECT outbox.cluster()))
