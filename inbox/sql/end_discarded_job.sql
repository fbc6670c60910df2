-- Does:  End a job whose message must not be handled any more, unless a worker holds it.
-- Takes: id, at (of the id), consumer
-- Gives: nothing
-- Index: job_pkey of one partition
UPDATE inbox.job
   SET state = 'cancelled',
       reason = 'its dead letter was discarded',
       finished_at = clock_timestamp(),
       lease_until = NULL
 WHERE message_id = %(id)s
   AND message_at = %(at)s
   AND consumer = %(consumer)s
   AND finished_at IS NULL
   AND (lease_until IS NULL OR lease_until < clock_timestamp())
