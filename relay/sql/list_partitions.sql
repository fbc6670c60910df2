-- Does:  List the partitions whose time has begun, except those being detached.
-- Takes: nothing
-- Gives: starts_at, ends_at, newest first
-- Index: none
SELECT starts_at, ends_at
  FROM outbox.partitions('outbox.message')
 WHERE starts_at <= now()
   AND NOT detach_pending
 ORDER BY starts_at DESC
