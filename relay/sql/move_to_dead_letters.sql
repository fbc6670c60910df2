-- Does:  Settle messages as dead letters and copy them there, in one statement.
-- Takes: ids, reasons, attempts (started so far), origin, by_hand (no scheduled retry), max_topic_bytes, topic_header (where a longer one is kept), first and last created_at of the batch
-- Gives: nothing
-- Index: message_pkey on each partition between first and last
WITH given_up AS (
    UPDATE outbox.message AS m
       SET dead_lettered_at = clock_timestamp(),
           attempts = nacked.attempts,
           last_error = nacked.reason
      FROM unnest(%(ids)s::uuid[], %(reasons)s::text[], %(attempts)s::int[])
           AS nacked (id, reason, attempts)
     WHERE m.id = nacked.id
       AND m.created_at BETWEEN %(first)s AND %(last)s
       AND m.published_at IS NULL
       AND m.dead_lettered_at IS NULL
 RETURNING m.id, m.topic, m.key, m.tenant, m.attempts, m.schema_version,
           m.content_type, m.headers, m.payload, m.last_error
)
INSERT INTO outbox.dead_letter
       (origin, message_id, topic, key, tenant, attempts, schema_version,
        content_type, headers, payload, error_reason, retry_after)
SELECT %(origin)s, id::text,
       CASE WHEN long THEN left(topic, 200) || '…' ELSE topic END,
       key, tenant, attempts, schema_version, content_type,
       CASE WHEN NOT long THEN headers
            WHEN jsonb_typeof(headers) = 'object' THEN headers || jsonb_build_object(%(topic_header)s::text, topic)
            ELSE jsonb_build_object('headers', headers, %(topic_header)s::text, topic) END,
       payload, last_error, CASE WHEN NOT %(by_hand)s::boolean THEN now() END
  FROM given_up,
       -- A topic too long for the index can only have been inserted by hand.
       LATERAL (SELECT octet_length(topic) > %(max_topic_bytes)s) AS measured (long)
