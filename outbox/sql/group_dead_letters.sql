-- Does:  Count dead letters by reason and by who gave them up, the most frequent first.
-- Takes: as list_dead_letters.sql, but before_at and before_id
-- Gives: reason (its first 80 characters), origin, topics, a topic, letters, oldest, newest, letters of all groups, groups
-- Index: as list_dead_letters.sql, or dead_letter_reason_idx where a reason is given
SELECT left(error_reason, 80) AS reason, origin, count(DISTINCT topic) AS topics, min(topic) AS topic,
       count(*) AS letters, min(created_at) AS oldest, max(created_at) AS newest,
       CAST(sum(count(*)) OVER () AS bigint) AS total, count(*) OVER () AS groups
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
 GROUP BY 1, 2
 ORDER BY letters DESC, newest DESC, 1, 2
 LIMIT CAST(%(max_rows)s AS bigint)
