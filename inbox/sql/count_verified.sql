-- Does:  Compare the number of deliveries in a verified stretch with the number when it was verified.
-- Takes: consumer, lane, starts_at and ends_at (of the partition), up_to (its watermark), cluster
-- Gives: deliveries, known (those that were verified, or found later)
-- Index: delivery_lane_idx, watermark_pkey and redelivery_pkey on that partition
SELECT (SELECT count(*)
          FROM inbox.delivery AS d
         WHERE d.consumer = %(consumer)s
           AND d.lane = %(lane)s
           AND d.seq <= %(up_to)s
           AND d.created_at >= %(starts_at)s
           AND d.created_at < %(ends_at)s) AS deliveries,
       (SELECT coalesce(sum(w.deliveries), 0)::bigint
          FROM inbox.watermark AS w
         WHERE w.consumer = %(consumer)s
           AND w.lane = %(lane)s
           AND w.created_at = %(starts_at)s
           AND w.cluster = %(cluster)s)
       + (SELECT count(DISTINCT (e.seq, e.created_at))
            FROM inbox.redelivery AS e
           WHERE e.consumer = %(consumer)s
             AND e.lane = %(lane)s
             AND e.cause = 'found'
             AND e.created_at >= %(starts_at)s
             AND e.created_at < %(ends_at)s) AS known
