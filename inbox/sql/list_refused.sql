-- Does:  List deliveries that a consumer gave back and that wait for their next attempt, the oldest first.
-- Takes: max_rows
-- Gives: the fields of outbox.cli.sides.Blocked
-- Index: delivery_waiting_idx
SELECT key, lane, message_id AS id, topic, consumer, attempts, created_at, available_at,
       NULL AS last_error
  FROM inbox.delivery
 WHERE attempts > 0
   AND available_at IS NOT NULL
   AND acked_at IS NULL
 ORDER BY created_at
 LIMIT %(max_rows)s
