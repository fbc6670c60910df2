-- Does:  Find how far all deliveries of a stretch of a lane in one partition have a mark or wait, and which ones have neither.
-- Takes: consumer, lane, starts_at and ends_at (of the partition), above and up_to (the stretch), max_open
-- Gives: deliveries, last (the number of deliveries before the first that has neither, and the seq of the last of them; null: none), open_seqs, open_moments, open_keys (of those that have neither, at most max_open), snapshot (xmin and age)
-- Index: delivery_lane_idx, ack_lane_idx and redelivery_pkey on that partition
WITH covered AS MATERIALIZED (
    -- Arrays, so that the planner expects few and hashes them, however many there are.
    SELECT array_agg(seq) AS seqs, array_agg(created_at) AS moments
      FROM (
          SELECT marked.seq, marked.created_at
            FROM inbox.ack AS a
           CROSS JOIN LATERAL unnest(a.seqs, a.moments) AS marked (seq, created_at)
           WHERE a.consumer = %(consumer)s
             AND a.lane = %(lane)s
             AND a.last_seq > %(above)s
             AND a.last_seq < %(up_to)s::bigint + 4096
             AND a.created_at >= %(starts_at)s
             AND a.created_at < %(ends_at)s
           UNION ALL
          SELECT e.seq, e.created_at
            FROM inbox.redelivery AS e
           WHERE e.consumer = %(consumer)s
             AND e.lane = %(lane)s
             AND e.seq > %(above)s
             AND e.seq <= %(up_to)s
             AND e.created_at >= %(starts_at)s
             AND e.created_at < %(ends_at)s
      ) AS each
), open AS MATERIALIZED (
    SELECT d.seq, d.created_at, d.key
      FROM inbox.delivery AS d
     -- Rows and not columns, so that no index but delivery_lane_idx has the order: the first few end it.
     WHERE (d.consumer, d.lane, d.seq) > (%(consumer)s, %(lane)s, %(above)s)
       AND (d.consumer, d.lane, d.seq) <= (%(consumer)s, %(lane)s, %(up_to)s)
       AND d.created_at >= %(starts_at)s
       AND d.created_at < %(ends_at)s
       AND (d.seq, d.created_at) NOT IN (SELECT unnest(c.seqs), unnest(c.moments) FROM covered AS c)
     ORDER BY d.consumer, d.lane, d.seq
     LIMIT %(max_open)s
)
SELECT before.deliveries, before.last, found.seqs, found.moments, found.keys,
       concat_ws(':', pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()),
                 pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid)) AS snapshot
  FROM (
      SELECT coalesce(array_agg(o.seq ORDER BY o.seq), '{}') AS seqs,
             coalesce(array_agg(o.created_at ORDER BY o.seq), '{}') AS moments,
             coalesce(array_agg(o.key ORDER BY o.seq), '{}') AS keys,
             coalesce(min(o.seq) - 1, %(up_to)s) AS before_first
        FROM open AS o
  ) AS found
 CROSS JOIN LATERAL (
      SELECT count(*) AS deliveries, max(d.seq) AS last
        FROM inbox.delivery AS d
       WHERE d.consumer = %(consumer)s
         AND d.lane = %(lane)s
         AND d.seq > %(above)s
         AND d.seq <= found.before_first
         AND d.created_at >= %(starts_at)s
         AND d.created_at < %(ends_at)s
  ) AS before
