-- Does:  List the newest messages of each lane that match, with their states.
-- Takes: lanes, since (created_at), key, topic, topic_prefix, tenant, state (each null: any), max_rows (of each lane, and of all)
-- Gives: id, created_at, topic, key, tenant, state, attempts, run, available_at, published_at, last_error, reader
-- Index: message_lane_idx of each partition since then: all messages of the lanes are read until enough match
SELECT found.*
  FROM unnest(%(lanes)s::smallint[]) AS wanted (lane)
 CROSS JOIN LATERAL (
     SELECT m.id, m.created_at, m.topic, m.key, m.tenant, m.state, m.attempts, m.run, m.available_at,
            m.published_at, m.last_error, m.reader
       FROM outbox.message_status AS m
      WHERE m.lane = wanted.lane
        AND m.created_at >= %(since)s::timestamptz
        AND (%(key)s::text IS NULL OR m.key = %(key)s::text)
        AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
        AND (%(topic_prefix)s::text IS NULL OR starts_with(m.topic, %(topic_prefix)s::text))
        AND (%(tenant)s::text IS NULL OR m.tenant = %(tenant)s::text)
        AND (%(state)s::text IS NULL OR m.state = %(state)s::text)
      ORDER BY m.seq DESC
      LIMIT %(max_rows)s
 ) AS found
 ORDER BY found.created_at DESC
 LIMIT %(max_rows)s
