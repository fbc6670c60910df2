-- Does:  Find the worker that holds a job.
-- Takes: id, at (of the id), consumer
-- Gives: worker; no row if none holds it
-- Index: job_pkey of one partition
SELECT worker
  FROM inbox.job
 WHERE message_id = %(id)s
   AND message_at = %(at)s
   AND consumer = %(consumer)s
   AND lease_until > clock_timestamp()
