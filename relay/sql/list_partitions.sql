-- Does:  List the partitions that have or had messages.
-- Takes: nothing
-- Gives: starts_at, ends_at, newest first
-- Index: none
SELECT starts_at, ends_at
  FROM outbox.partitions('outbox.message')
 WHERE starts_at <= now()
   AND NOT detach_pending
 ORDER BY starts_at DESC
