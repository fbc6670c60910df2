-- Does:  Renew the lease of a job that this process is running; until the transaction ends, no other process leases the job.
-- Takes: id, at, consumer, lease, started_at, until (see Leased), seconds, checkpoint (to save, JSON as text; null: none)
-- Gives: is_cancelled, lease_until; no row if the lease is lost, or the server lost a commit under it
-- Index: job_pkey of one partition
UPDATE inbox.job
   SET checkpoint = coalesce(CAST(:checkpoint AS jsonb), checkpoint),
       lease_until = greatest(lease_until + interval '1 microsecond',
                            clock_timestamp() + make_interval(secs => CAST(:seconds AS float8)))
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND lease = CAST(:lease AS integer)
   AND started_at = CAST(:started_at AS timestamptz)
   AND finished_at IS NULL
   AND lease_until >= CAST(:until AS timestamptz)
RETURNING cancel_requested_at IS NOT NULL AS is_cancelled, lease_until
