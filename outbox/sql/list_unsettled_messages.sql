-- Does:  List waiting messages that match, the oldest first.
-- Takes: since (created_at), key, topic, topic_prefix, tenant, state (each null: any), max_rows
-- Gives: as list_messages.sql
-- Index: message_lane_idx above the positions; reads the log
SELECT m.id, m.created_at, m.topic, m.key, m.tenant, m.state, m.attempts, m.run, m.available_at,
       NULL::timestamptz AS published_at, m.last_error, m.reader
  FROM outbox.unsettled_message AS m
 WHERE m.created_at >= %(since)s::timestamptz
   AND (%(key)s::text IS NULL OR m.key = %(key)s::text)
   AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
   AND (%(topic_prefix)s::text IS NULL OR starts_with(m.topic, %(topic_prefix)s::text))
   AND (%(tenant)s::text IS NULL OR m.tenant = %(tenant)s::text)
   AND (%(state)s::text IS NULL OR m.state = %(state)s::text)
 ORDER BY m.created_at
 LIMIT %(max_rows)s
