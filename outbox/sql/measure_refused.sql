-- Does:  Count messages that the broker refused and that are waiting for their next attempt.
-- Takes: nothing
-- Gives: keys (blocked by them), without_key (messages that block none), age of the oldest message, attempts (the most of any)
-- Index: message_blocked_idx
SELECT count(DISTINCT key), count(*) FILTER (WHERE key IS NULL),
       now() - min(created_at), max(attempts)
  FROM outbox.message
 WHERE attempts > 0
   AND available_at IS NOT NULL
   AND published_at IS NULL
   AND dead_lettered_at IS NULL
