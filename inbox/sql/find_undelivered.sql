-- Does:  Find messages of the outbox that a consumer has neither handled nor dead-lettered, for tests.
-- Takes: consumer, at (available by then)
-- Gives: id, topic, key, tenant, headers, payload, content_type, schema_version, lane, available_at, in the order in which they became due
-- Index: none: it reads the whole table, which is small in tests
SELECT m.id, m.topic, m.key, m.tenant, m.headers, m.payload, m.content_type, m.schema_version, m.lane, m.available_at
  FROM outbox.message AS m
 WHERE coalesce(m.available_at <= CAST(:at AS timestamptz), true)
   AND NOT EXISTS (
       SELECT FROM inbox.receipt AS r
        WHERE r.message_id = m.id AND r.message_at = inbox.moment_of(m.id) AND r.consumer = CAST(:consumer AS text))
   AND NOT EXISTS (
       SELECT FROM inbox.dead_letter AS d
        WHERE d.message_id = CAST(m.id AS text) AND d.origin = 'consumer:' || CAST(:consumer AS text))
   AND NOT EXISTS (
       SELECT FROM outbox.deferral AS c
        WHERE c.id = m.id AND c.created_at = m.created_at AND c.reader = '')
 ORDER BY greatest(m.created_at, m.available_at), m.seq
