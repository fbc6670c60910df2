-- Does:  Count the messages that were nacked and wait for their next attempt.
-- Takes: nothing
-- Gives: keys (that are blocked), without_key (messages without a key, which block none)
-- Index: message_blocked_idx
SELECT count(DISTINCT key) AS keys, count(*) FILTER (WHERE key IS NULL) AS without_key
  FROM outbox.message
 WHERE attempts > 0
   AND available_at IS NOT NULL
   AND published_at IS NULL
   AND dead_lettered_at IS NULL
