-- Does:  Measure how long the oldest due message has waited.
-- Takes: nothing
-- Gives: waited, retention
-- Index: message_ready_idx and message_waiting_idx
SELECT now() - min(greatest(m.created_at, m.available_at)),
       (SELECT retention FROM outbox.partition_policy
         WHERE parent_table = 'outbox.message')
  FROM outbox.message m
 WHERE m.published_at IS NULL AND m.dead_lettered_at IS NULL
   AND (m.available_at IS NULL OR m.available_at <= now())
