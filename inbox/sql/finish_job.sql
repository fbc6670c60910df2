-- Does:  End a job permanently.
-- Takes: id, at, consumer, lease, started_at, until (see Leased), state, reason, attempts
-- Gives: one row; no row if the lease is lost, or the server lost a commit under it
-- Index: job_pkey of one partition
UPDATE inbox.job
   SET state = CAST(:state AS text),
       -- The person who cancelled it has given the reason.
       reason = CASE WHEN CAST(:state AS text) = 'cancelled' THEN reason
                     ELSE CAST(:reason AS text) END,
       attempts = CAST(:attempts AS integer),
       finished_at = clock_timestamp(),
       lease_until = NULL
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND lease = CAST(:lease AS integer)
   AND started_at = CAST(:started_at AS timestamptz)
   AND finished_at IS NULL
   AND lease_until >= CAST(:until AS timestamptz)
RETURNING 1
