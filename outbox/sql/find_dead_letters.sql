-- Does:  Find dead letters in the order in which to retry them, oldest first.
-- Takes: as list_dead_letters.sql
-- Gives: id, created_at
-- Index: as list_dead_letters.sql
SELECT id, created_at
  FROM {schema}.dead_letter
 WHERE created_at >= coalesce(now() - CAST(%(newer_than)s AS interval), '-infinity')
   AND created_at <= coalesce(now() - CAST(%(older_than)s AS interval), 'infinity')
   AND (CAST(%(status)s AS text) IS NULL OR status = CAST(%(status)s AS text))
   AND (CAST(%(topic)s AS text) IS NULL OR topic = CAST(%(topic)s AS text))
   AND (CAST(%(topic_prefix)s AS text) IS NULL
        OR starts_with(topic, CAST(%(topic_prefix)s AS text)))
   AND (CAST(%(key)s AS text) IS NULL OR key = CAST(%(key)s AS text))
   AND (CAST(%(tenant)s AS text) IS NULL OR tenant = CAST(%(tenant)s AS text))
   AND (CAST(%(origin)s AS text) IS NULL OR origin = CAST(%(origin)s AS text))
   AND (CAST(%(message_id)s AS text) IS NULL OR message_id = CAST(%(message_id)s AS text))
   AND (CAST(%(error)s AS text) IS NULL
        OR position(lower(CAST(%(error)s AS text)) IN lower(error_reason)) > 0)
 ORDER BY created_at, id
 LIMIT CAST(%(max_rows)s AS bigint)
