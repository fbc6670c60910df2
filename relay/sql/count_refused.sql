-- Does:  Count the messages that were nacked and wait for their next attempt.
-- Takes: nothing
-- Gives: keys (that are blocked), without_key (messages without a key, which block none)
-- Index: none, reads the log
SELECT count(DISTINCT key) AS keys, count(*) FILTER (WHERE key IS NULL) AS without_key
  FROM outbox.deferred_message
 WHERE state = 'waiting'
