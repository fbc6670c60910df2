-- Does:  Find the messages of a key, the newest of each lane first.
-- Takes: key, lanes (of the key, one for each priority), since (created_at), max_rows (of each lane)
-- Gives: as find_envelopes.sql
-- Index: message_lane_idx of each partition from since on: all messages of the lanes are read until there are enough
SELECT found.*
  FROM unnest(%(lanes)s::smallint[]) AS wanted (lane)
 CROSS JOIN LATERAL (
     SELECT m.id, m.created_at, m.seq, m.lane, m.schema_version, m.topic, m.key, m.tenant, m.available_at,
            m.content_type, m.payload_bytes, m.causation_id, m.traceparent
       FROM outbox.message_envelope AS m
      WHERE m.lane = wanted.lane
        AND m.key = %(key)s::text
        AND m.created_at >= %(since)s::timestamptz
      ORDER BY m.seq DESC
      LIMIT %(max_rows)s
 ) AS found
 ORDER BY found.created_at DESC, found.seq DESC
