-- Does:  End a job whose cancellation was requested and that no worker holds.
-- Takes: id, at, consumer
-- Gives: nothing
-- Index: job_pkey of one partition
UPDATE inbox.job
   SET state = 'cancelled', finished_at = clock_timestamp(), lease_until = NULL
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND cancel_requested_at IS NOT NULL
   AND finished_at IS NULL
   AND (lease_until IS NULL OR lease_until < clock_timestamp())
