-- Does:  Release a job, to be started again by any process, or by a retry.
-- Takes: id, at, consumer, lease, started_at, state (queued, or failure: not queued again), reason, is_failed (whether the attempt counts)
-- Gives: one row; no row if the lease is lost
-- Index: job_pkey of one partition
UPDATE inbox.job
   SET state = CASE WHEN cancel_requested_at IS NULL THEN CAST(:state AS text) ELSE 'waiting' END,
       finished_at = CASE WHEN cancel_requested_at IS NULL AND CAST(:state AS text) = 'failure'
                          THEN clock_timestamp() END,
       reason = CASE WHEN cancel_requested_at IS NULL THEN CAST(:reason AS text) ELSE reason END,
       attempts = attempts - CASE WHEN CAST(:is_failed AS boolean) THEN 0 ELSE 1 END,
       queued_at = clock_timestamp(),
       lease_until = NULL
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND lease = CAST(:lease AS integer)
   AND started_at = CAST(:started_at AS timestamptz)
   AND finished_at IS NULL
RETURNING 1
