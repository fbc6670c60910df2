-- Does:  Insert messages with a subscribed topic, in order.
-- Takes: arrays of the same length: ids, lanes, schema_versions, topics, keys, tenants, content_types, headers, payloads
-- Gives: topic, one row for each topic without a subscriber
-- Index: none; inbox.subscription is small
WITH message AS (
    SELECT *
      FROM unnest(%(ids)b::uuid[], %(lanes)b::smallint[], %(schema_versions)b::integer[],
                  %(topics)b::text[], %(keys)b::text[], %(tenants)b::text[],
                  %(content_types)b::text[], %(headers)b::text[], %(payloads)b::bytea[])
           WITH ORDINALITY
        AS m (id, lane, schema_version, topic, key, tenant, content_type, headers, payload, place)
), subscribed AS MATERIALIZED (
    SELECT named.topic
      FROM (SELECT DISTINCT topic FROM message) AS named
     WHERE EXISTS (SELECT FROM inbox.subscription AS s
                    WHERE s.topic = named.topic
                       OR (right(s.topic, 1) = '*' AND starts_with(named.topic, left(s.topic, -1))))
), added AS (
    INSERT INTO inbox.message
           (message_id, lane, schema_version, topic, key, tenant, content_type, headers, payload)
    SELECT m.id, m.lane, m.schema_version, m.topic, m.key, m.tenant, m.content_type, m.headers::jsonb, m.payload
      FROM message AS m
     WHERE m.topic IN (TABLE subscribed)
     -- The sequence assigns seq in this order.
     ORDER BY m.place
)
SELECT DISTINCT topic
  FROM message
 WHERE topic NOT IN (TABLE subscribed)
