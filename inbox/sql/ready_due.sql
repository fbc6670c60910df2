-- Does:  Make deliveries ready again that were given back and whose time has come.
-- Takes: consumer, lanes, max_rows
-- Gives: lane, seq, key, created_at of each
-- Index: delivery_waiting_idx to find them, delivery_pkey to update them
WITH due AS MATERIALIZED (
    SELECT seq, created_at
      FROM inbox.delivery
     WHERE available_at <= clock_timestamp()
       AND acked_at IS NULL
       AND consumer = %(consumer)s
       AND lane = ANY (%(lanes)s::smallint[])
     ORDER BY available_at
     LIMIT %(max_rows)s
)
UPDATE inbox.delivery AS d
   SET available_at = NULL
  FROM due
 WHERE d.seq = due.seq
   AND d.created_at = due.created_at
   AND d.acked_at IS NULL
RETURNING d.lane, d.seq, d.key, d.created_at
