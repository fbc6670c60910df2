-- Does:  Ask for a job to be cancelled: whoever has it, or gets it next, does it.
-- Takes: id, at (of the id), consumer, reason
-- Gives: state
-- Index: job_pkey of one partition
INSERT INTO inbox.job AS j (message_id, message_at, consumer, state, cancel_requested_at, reason)
VALUES (%(id)s, %(at)s, %(consumer)s, 'waiting', clock_timestamp(), %(reason)s)
ON CONFLICT (message_id, consumer, message_at) DO UPDATE
   SET cancel_requested_at = coalesce(j.cancel_requested_at, clock_timestamp()),
       state = CASE WHEN j.finished_at IS NULL THEN 'waiting' ELSE j.state END,
       reason = CASE WHEN j.finished_at IS NULL THEN excluded.reason ELSE j.reason END
RETURNING state
