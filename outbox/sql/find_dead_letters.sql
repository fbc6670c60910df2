-- Does:  Find dead letters in the order in which to retry them, oldest first.
-- Takes: as list_dead_letters.sql; after_at and after_id (null: from the oldest) instead of before_at and before_id
-- Gives: id, created_at
-- Index: as list_dead_letters.sql
SELECT id, created_at
  FROM {schema}.dead_letter
 WHERE created_at >= greatest(now() - CAST(%(newer_than)s AS interval), CAST(%(since)s AS timestamptz), '-infinity')
   AND created_at <= least(now() - CAST(%(older_than)s AS interval), CAST(%(until)s AS timestamptz), 'infinity')
   AND (CAST(%(id)s AS uuid) IS NULL OR id = CAST(%(id)s AS uuid))
   AND (CAST(%(status)s AS text) IS NULL OR status = CAST(%(status)s AS text))
   AND (CAST(%(topic)s AS text) IS NULL OR topic = CAST(%(topic)s AS text))
   AND (CAST(%(topic_prefix)s AS text) IS NULL
        OR starts_with(topic, CAST(%(topic_prefix)s AS text)))
   AND (CAST(%(key)s AS text) IS NULL OR key = CAST(%(key)s AS text))
   AND (CAST(%(tenant)s AS text) IS NULL OR tenant = CAST(%(tenant)s AS text))
   AND (CAST(%(origin)s AS text) IS NULL OR origin = CAST(%(origin)s AS text))
   AND (CAST(%(message_id)s AS text) IS NULL OR message_id = CAST(%(message_id)s AS text))
   AND (CAST(%(reason)s AS text) IS NULL OR left(error_reason, 80) = CAST(%(reason)s AS text))
   AND (CAST(%(error)s AS text) IS NULL
        OR position(lower(CAST(%(error)s AS text)) IN lower(error_reason)) > 0)
   AND (CAST(%(after_id)s AS uuid) IS NULL
        OR (created_at, id) > (CAST(%(after_at)s AS timestamptz), CAST(%(after_id)s AS uuid)))
 ORDER BY created_at, id
 LIMIT CAST(%(max_rows)s AS bigint)
