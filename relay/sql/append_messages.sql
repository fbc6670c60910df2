-- Does:  Append messages to the outbox, in order, except those that it has.
-- Takes: arrays of the same length: ids, lanes, schema_versions, topics, keys, tenants, content_types, headers, payloads; since (the earliest time in an id, in seconds)
-- Gives: nothing
-- Index: message_pkey, in the days from the one before since until now
INSERT INTO outbox.message
       (id, lane, schema_version, topic, key, tenant, content_type, headers, payload)
SELECT m.id, m.lane, m.schema_version, m.topic, m.key, m.tenant, m.content_type, m.headers::jsonb, m.payload
  FROM unnest(%(ids)b::uuid[], %(lanes)b::smallint[], %(schema_versions)b::integer[],
              %(topics)b::text[], %(keys)b::text[], %(tenants)b::text[],
              %(content_types)b::text[], %(headers)b::text[], %(payloads)b::bytea[])
       WITH ORDINALITY
    AS m (id, lane, schema_version, topic, key, tenant, content_type, headers, payload, place)
 WHERE NOT EXISTS (SELECT FROM outbox.message AS known
                    WHERE known.id = m.id
                      -- Further from its creation, the time in an id is refused.
                      AND known.created_at >= least(to_timestamp(%(since)s::float8), now()) - interval '1 day'
                      AND known.created_at < now() + interval '1 hour')
 -- The sequence assigns seq in this order.
 ORDER BY m.place
