-- Does:  Read one dead letter with all its columns.
-- Takes: id
-- Gives: the columns of pillarbox.outbox.dead_letters.letter.Letter
-- Index: dead_letter_pkey, in each partition
SELECT id, created_at, updated_at, status, retry_count, retry_after, origin, message_id,
       topic, key, tenant, attempts, error_reason, discard_reason, discarded_by,
       schema_version, priority, content_type, CAST(outbox.readable_headers(headers) AS text) AS headers, payload, error_stacktrace
  FROM {schema}.dead_letter
 WHERE id = CAST(%(id)s AS uuid)
