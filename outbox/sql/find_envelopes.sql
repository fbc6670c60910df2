-- Does:  Find messages by id, and their causes.
-- Takes: ids, first and last (created_at of the days to look in; infinite for all days)
-- Gives: the columns of outbox.message_envelope that are fields of pillarbox.outbox.observability.message_life.Envelope
-- Index: message_pkey of each partition between first and last
SELECT id, created_at, seq, lane, schema_version, topic, key, tenant, available_at,
       content_type, payload_bytes, causation_id, traceparent
  FROM outbox.message_envelope
 WHERE id = ANY (%(ids)s::uuid[])
   AND created_at BETWEEN %(first)s::timestamptz AND %(last)s::timestamptz
 ORDER BY created_at, seq
