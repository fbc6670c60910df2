-- Does:  Request that a job be cancelled; the worker that holds it, or takes it next, ends it. A known job that no worker holds ends at once.
-- Takes: id, at (of the id), consumer, reason
-- Gives: state, worker (the last one)
-- Index: job_pkey of one partition
INSERT INTO inbox.job AS j (message_id, message_at, consumer, state, cancel_requested_at, reason)
VALUES (%(id)s, %(at)s, %(consumer)s, 'waiting', clock_timestamp(), %(reason)s)
ON CONFLICT (message_id, consumer, message_at) DO UPDATE
   SET cancel_requested_at = coalesce(j.cancel_requested_at, clock_timestamp()),
       state = CASE WHEN j.finished_at IS NOT NULL THEN j.state
                    WHEN j.topic IS NOT NULL AND coalesce(j.lease_until, '-infinity') < clock_timestamp() THEN 'cancelled'
                    ELSE 'waiting' END,
       finished_at = CASE WHEN j.finished_at IS NULL AND j.topic IS NOT NULL
                           AND coalesce(j.lease_until, '-infinity') < clock_timestamp() THEN clock_timestamp()
                          ELSE j.finished_at END,
       reason = CASE WHEN j.finished_at IS NULL THEN coalesce(excluded.reason, j.reason) ELSE j.reason END
RETURNING state, worker
