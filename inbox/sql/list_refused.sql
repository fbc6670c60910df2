-- Does:  List the deliveries that consumers nacked and that wait for their next attempt, oldest first.
-- Takes: max_rows
-- Gives: the fields of outbox.cli.sides.Blocked
-- Index: none, reads the log; message_pkey for the topics
SELECT key, lane, message_id AS id, topic, consumer, attempts, created_at, available_at,
       NULL AS last_error
  FROM inbox.waiting_delivery
 WHERE attempts > 0
   AND state = 'waiting'
 ORDER BY created_at
 LIMIT %(max_rows)s
