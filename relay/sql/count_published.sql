-- Does:  Count the messages that a replay would publish again, by topic.
-- Takes: the same as find_published.sql
-- Gives: topic, messages, oldest and newest created_at
-- Index: none; reads all days between since and until, and the positions of matching messages
SELECT topic, count(*) AS messages, min(created_at) AS oldest, max(created_at) AS newest
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
 GROUP BY topic
 ORDER BY topic
