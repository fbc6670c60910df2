-- Does:  Find who works at a job.
-- Takes: id, at (of the id), consumer
-- Gives: worker; no row if nobody does
-- Index: job_pkey of one partition
SELECT worker
  FROM inbox.job
 WHERE message_id = %(id)s
   AND message_at = %(at)s
   AND consumer = %(consumer)s
   AND lease_until > clock_timestamp()
