-- Does:  Find published messages, in the order in which they were added.
-- Takes: reader, since, until (created_at), topic, topic_prefix, key, tenant, max_rows; null for any
-- Gives: id, created_at
-- Index: none; reads all days between since and until, and the positions of matching messages
SELECT id, created_at
  FROM outbox.message_status
 WHERE created_at >= %(since)s
   AND created_at < %(until)s
   AND state IN ('published', 'handled')
   AND (reader = %(reader)s) IS TRUE
   AND (CAST(%(topic)s AS text) IS NULL OR topic = CAST(%(topic)s AS text))
   AND (CAST(%(topic_prefix)s AS text) IS NULL
        OR starts_with(topic, CAST(%(topic_prefix)s AS text)))
   AND (CAST(%(key)s AS text) IS NULL OR key = CAST(%(key)s AS text))
   AND (CAST(%(tenant)s AS text) IS NULL OR tenant = CAST(%(tenant)s AS text))
 ORDER BY seq
 LIMIT CAST(%(max_rows)s AS bigint)
