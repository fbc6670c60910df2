-- Does:  Lock a dead letter that is still PENDING, unless another session has locked it.
-- Takes: id, created_at
-- Gives: the columns of pillarbox.outbox.dead_letters.letter.Letter, or nothing
-- Index: dead_letter_pkey, in one partition
SELECT id, created_at, updated_at, status, retry_count, retry_after, origin, message_id,
       topic, key, tenant, attempts, error_reason, discard_reason, discarded_by,
       schema_version, priority, content_type, CAST(outbox.readable_headers(headers) AS text) AS headers, payload, error_stacktrace
  FROM {schema}.dead_letter
 WHERE id = CAST(%(id)s AS uuid)
   AND created_at = CAST(%(created_at)s AS timestamptz)
   AND status = 'PENDING'
   FOR UPDATE SKIP LOCKED
