-- Does:  Make deliveries ready again that were given back and whose time has come.
-- Takes: consumer, lanes, max_rows
-- Gives: lane, seq, key, created_at of each
-- Index: delivery_waiting_idx to find them, delivery_pkey to update them
WITH due AS MATERIALIZED (
    SELECT seq, created_at
      FROM inbox.delivery
     -- Not clock_timestamp(), which is volatile: the index would be walked to its end.
     WHERE available_at <= now()
       AND acked_at IS NULL
       AND consumer = %(consumer)s
       AND lane = ANY (%(lanes)s::smallint[])
     ORDER BY available_at
     LIMIT %(max_rows)s
)
UPDATE inbox.delivery AS d
   SET available_at = NULL
 -- Not a join, which may read whole partitions: here only the days between are touched.
 WHERE d.seq = ANY (ARRAY(SELECT seq FROM due))
   AND d.created_at BETWEEN (SELECT min(created_at) FROM due) AND (SELECT max(created_at) FROM due)
   AND d.acked_at IS NULL
RETURNING d.lane, d.seq, d.key, d.created_at
