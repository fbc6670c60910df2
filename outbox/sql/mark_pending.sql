-- Does:  Record a retry after which a dead letter is still PENDING, with the reason and the next retry.
-- Takes: id, created_at, retry_count (as read), charge (1: it failed, 0: it asked for a delay), reason, stacktrace, delay (seconds; null: only by hand)
-- Gives: id, unless another session retried or settled it meanwhile
-- Index: dead_letter_pkey, in one partition
UPDATE {schema}.dead_letter
   SET retry_count = retry_count + CAST(%(charge)s AS integer),
       -- In seconds: the session may be the user's, and a day in its time zone can have 23 hours.
       retry_after = clock_timestamp() + make_interval(secs => CAST(%(delay)s AS float8)),
       error_reason = CAST(%(reason)s AS text),
       error_stacktrace = CAST(%(stacktrace)s AS text),
       updated_at = now()
 WHERE id = CAST(%(id)s AS uuid)
   AND created_at = CAST(%(created_at)s AS timestamptz)
   AND status = 'PENDING'
   AND retry_count = CAST(%(retry_count)s AS integer)
RETURNING id
