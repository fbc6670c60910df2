-- Does:  List the pauses that haven't ended, the oldest first.
-- Takes: nothing
-- Gives: the fields of pillarbox.outbox.administration.pauses.Pause
-- Index: operation_pause_idx
SELECT selection ->> 'consumer' AS consumer, selection ->> 'topic' AS topic, reason, asked_by AS paused_by, asked_at AS paused_at
  FROM outbox.operation
 WHERE kind = 'pause' AND state = 'running'
 ORDER BY asked_at
