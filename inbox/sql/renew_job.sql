-- Does:  Renew the lease of a job that this process is running.
-- Takes: id, at, consumer, lease (its number), seconds
-- Gives: is_cancelled; no row if the lease is lost
-- Index: job_pkey of one partition
UPDATE inbox.job
   SET lease_until = clock_timestamp() + make_interval(secs => CAST(:seconds AS float8))
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND lease = CAST(:lease AS integer)
   AND finished_at IS NULL
   AND lease_until IS NOT NULL
RETURNING cancel_requested_at IS NOT NULL AS is_cancelled
