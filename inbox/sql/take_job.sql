-- Does:  Lease a job that no worker holds, and count the attempt.
-- Takes: id, at, consumer, worker, seconds (of the lease)
-- Gives: lease, started_at, lease_until, attempts, checkpoint (as text); no row if the job is held, finished or to be cancelled
-- Index: job_pkey of one partition
UPDATE inbox.job
   SET state = 'in_progress',
       lease = lease + 1,
       attempts = attempts + 1,
       worker = CAST(:worker AS text),
       started_at = clock_timestamp(),
       lease_until = clock_timestamp() + make_interval(secs => CAST(:seconds AS float8))
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND finished_at IS NULL
   AND cancel_requested_at IS NULL
   AND (lease_until IS NULL OR lease_until < clock_timestamp())
RETURNING lease, started_at, lease_until, attempts, CAST(checkpoint AS text) AS checkpoint
