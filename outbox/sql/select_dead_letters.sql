-- Does:  Select dead letters by criteria, for the statements that list, find and count them.
-- Takes: since, until, ids (of dead letters, or of their messages, as the text of an array), status, topic, topic_prefix, key, tenant, origin, reason (its first 80 characters), error (null: any)
-- Gives: the columns that the monitor may read
-- Index: dead_letter_status_idx; where they are given, dead_letter_topic_idx, dead_letter_reason_idx, or dead_letter_pkey and dead_letter_message_idx
SELECT id, created_at, updated_at, status, retry_count, retry_after, origin, message_id,
       topic, key, tenant, attempts, error_reason, discard_reason, discarded_by
  FROM {schema}.dead_letter
 WHERE created_at >= coalesce(CAST(%(since)s AS timestamptz), '-infinity')
   AND created_at <= coalesce(CAST(%(until)s AS timestamptz), 'infinity')
   AND (CAST(%(ids)s AS uuid[]) IS NULL
        OR id = ANY (CAST(%(ids)s AS uuid[])) OR message_id = ANY (CAST(CAST(%(ids)s AS uuid[]) AS text[])))
   AND (CAST(%(status)s AS text) IS NULL OR status = CAST(%(status)s AS text))
   AND (CAST(%(topic)s AS text) IS NULL OR topic = CAST(%(topic)s AS text))
   AND (CAST(%(topic_prefix)s AS text) IS NULL
        OR starts_with(topic, CAST(%(topic_prefix)s AS text)))
   AND (CAST(%(key)s AS text) IS NULL OR key = CAST(%(key)s AS text))
   AND (CAST(%(tenant)s AS text) IS NULL OR tenant = CAST(%(tenant)s AS text))
   AND (CAST(%(origin)s AS text) IS NULL OR origin = CAST(%(origin)s AS text))
   AND (CAST(%(reason)s AS text) IS NULL OR left(error_reason, 80) = CAST(%(reason)s AS text))
   AND (CAST(%(error)s AS text) IS NULL
        OR position(lower(CAST(%(error)s AS text)) IN lower(error_reason)) > 0)
