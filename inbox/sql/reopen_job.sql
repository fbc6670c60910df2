-- Does:  Reopen a job that failed, timed out or is queued, as if it had never been started.
-- Takes: id, at, consumer
-- Gives: nothing
-- Index: job_pkey of one partition
UPDATE inbox.job
   SET state = 'queued',
       attempts = 0,
       finished_at = NULL,
       cancel_requested_at = NULL
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND state IN ('failure', 'timed_out', 'queued')
