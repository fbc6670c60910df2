-- Does:  Save the checkpoint of a job.
-- Takes: id, at, consumer, lease, checkpoint (JSON as text)
-- Gives: one row; no row if the lease is lost
-- Index: job_pkey of one partition
UPDATE inbox.job
   SET checkpoint = CAST(:checkpoint AS jsonb)
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND lease = CAST(:lease AS integer)
   AND finished_at IS NULL
RETURNING 1
