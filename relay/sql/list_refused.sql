-- Does:  List messages that were nacked and wait for their next attempt, the oldest first.
-- Takes: max_rows
-- Gives: the fields of outbox.cli.sides.Blocked, but consumer
-- Index: message_blocked_idx
SELECT key, lane, id, topic, attempts, created_at, available_at, last_error
  FROM outbox.message
 WHERE attempts > 0
   AND available_at IS NOT NULL
   AND published_at IS NULL
   AND dead_lettered_at IS NULL
 ORDER BY created_at
 LIMIT %(max_rows)s
