-- Does:  Count the messages of a replay to a consumer that it has receipts for.
-- Takes: the same as find_published.sql
-- Gives: receipts
-- Index: as find_published.sql, and receipt_pkey of each partition for each message
SELECT count(*) AS receipts
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
   -- Queues of a consumer have readers of their own, and share its receipts.
   AND EXISTS (SELECT FROM inbox.receipt AS r
                WHERE r.message_id = id AND r.consumer IN (reader, split_part(reader, '--', 1)))
