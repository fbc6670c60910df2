-- Does:  Find the messages that the handlers of some messages added.
-- Takes: causes (ids as text), since (created_at of the first day to look in), max_rows
-- Gives: as find_envelopes.sql
-- Index: message_cause_idx of each partition from since on
SELECT id, created_at, seq, lane, schema_version, topic, key, tenant, available_at,
       content_type, payload_bytes, causation_id, traceparent
  FROM outbox.message_envelope
 WHERE is_caused
   AND causation_id = ANY (%(causes)s::text[])
   AND created_at >= %(since)s::timestamptz
 ORDER BY created_at, seq
 LIMIT %(max_rows)s
