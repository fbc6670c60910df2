-- Does:  List jobs, open ones first, then the newest.
-- Takes: consumer (null: all), states (null: all), max_rows
-- Gives: message_id, consumer, state, attempts, topic, key, tenant, worker, worker_is_gone (its lease has expired), reason, queued_at, started_at, cancel_requested_at, finished_at, lease_until
-- Index: job_open_idx if only open states are requested
SELECT message_id, consumer, state, attempts, topic, key, tenant, worker,
       finished_at IS NULL AND coalesce(lease_until < clock_timestamp(), false) AS worker_is_gone,
       reason, queued_at, started_at, cancel_requested_at, finished_at, lease_until
  FROM inbox.job
 WHERE (%(consumer)s::text IS NULL OR consumer = %(consumer)s)
   AND (%(states)s::text[] IS NULL OR state = ANY (%(states)s))
 ORDER BY finished_at DESC NULLS FIRST, queued_at
 LIMIT %(max_rows)s
