-- Does:  Keep other processes from leasing a job until this transaction ends.
-- Takes: id, at, consumer, lease
-- Gives: one row; no row if the lease is lost
-- Index: job_pkey of one partition
SELECT 1
  FROM inbox.job
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND lease = CAST(:lease AS integer)
   AND finished_at IS NULL
   AND lease_until IS NOT NULL
   FOR SHARE
