-- Does:  Find the jobs of a message.
-- Takes: id, at (of the id)
-- Gives: consumer, state
-- Index: job_pkey of one partition
SELECT consumer, state
  FROM inbox.job
 WHERE message_id = %(id)s
   AND message_at = %(at)s
 ORDER BY consumer
