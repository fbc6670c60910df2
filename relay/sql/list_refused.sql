-- Does:  List messages that were nacked and wait for their next attempt, oldest first.
-- Takes: max_rows
-- Gives: the fields of outbox.cli.sides.Blocked, except consumer
-- Index: none for the log; message_pkey for the topics
SELECT key, lane, id, topic, reader, attempts, created_at, available_at, last_error
  FROM outbox.deferred_message
 WHERE state = 'waiting'
 ORDER BY created_at
 LIMIT %(max_rows)s
