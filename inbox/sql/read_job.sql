-- Does:  Read why a job could not be leased.
-- Takes: id, at, consumer
-- Gives: state, attempts, reason, seconds (until its lease ends; null: no lease)
-- Index: job_pkey of one partition
SELECT state, attempts, reason,
       CAST(extract(epoch FROM lease_until - clock_timestamp()) AS float8) AS seconds
  FROM inbox.job
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
