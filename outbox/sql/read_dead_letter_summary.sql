-- Does:  Read the part of a dead letter that the monitor may read, and whether this role may read the rest.
-- Takes: id
-- Gives: the columns of pillarbox.outbox.dead_letters.letter.Summary; schema_version, priority, content_type, whether payload, headers and stack trace can be read
-- Index: dead_letter_pkey
SELECT id, created_at, updated_at, status, retry_count, retry_after, origin, message_id,
       topic, key, tenant, attempts, error_reason, discard_reason, discarded_by,
       schema_version, priority, content_type,
       has_column_privilege('{schema}.dead_letter', 'payload', 'SELECT')
       AND has_column_privilege('{schema}.dead_letter', 'headers', 'SELECT')
       AND has_column_privilege('{schema}.dead_letter', 'error_stacktrace', 'SELECT')
  FROM {schema}.dead_letter
 WHERE id = CAST(%(id)s AS uuid)
