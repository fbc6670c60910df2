-- Does:  Insert one delivery for each message and each consumer subscribed to its topic, in order.
-- Takes: arrays of the same length: ids, lanes, schema_versions, topics, keys, tenants, content_types, headers, payloads
-- Gives: topic, one row for each topic without a subscriber
-- Index: none; inbox.subscription is small
WITH message AS (
    SELECT *
      FROM unnest(%(ids)b::uuid[], %(lanes)b::smallint[], %(schema_versions)b::integer[],
                  %(topics)b::text[], %(keys)b::text[], %(tenants)b::text[],
                  %(content_types)b::text[], %(headers)b::text[], %(payloads)b::bytea[])
           WITH ORDINALITY
        AS m (id, lane, schema_version, topic, key, tenant, content_type, headers, payload, position)
), route AS (
    -- Once for each consumer, even if several of its subscriptions match.
    SELECT DISTINCT named.topic, s.consumer
      FROM (SELECT DISTINCT topic FROM message) AS named
      JOIN inbox.subscription AS s
        ON s.topic = named.topic
        OR (right(s.topic, 1) = '*' AND starts_with(named.topic, left(s.topic, -1)))
), added AS (
    INSERT INTO inbox.delivery
           (message_id, lane, schema_version, consumer, topic, key, tenant, content_type, headers, payload)
    SELECT m.id, m.lane, m.schema_version, r.consumer, m.topic, m.key, m.tenant, m.content_type,
           m.headers::jsonb, m.payload
      FROM message AS m
      JOIN route AS r USING (topic)
     -- The sequence assigns seq in this order.
     ORDER BY m.position
)
SELECT DISTINCT topic
  FROM message
 WHERE topic NOT IN (SELECT topic FROM route)
