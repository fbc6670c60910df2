-- Does:  List waiting messages that match, the oldest first.
-- Takes: lanes, since (created_at), key, topic, topic_prefix, tenant, state (each null: any), max_rows
-- Gives: as list_messages.sql
-- Index: message_lane_idx above the positions, up to max_rows of each lane and day; reads the log
SELECT m.id, m.created_at, m.topic, m.key, m.tenant, m.state, m.attempts, m.run, m.available_at,
       NULL::timestamptz AS published_at, m.last_error, m.reader
  FROM (
      SELECT above.id, above.created_at, above.topic, above.key, above.tenant, above.state,
             0 AS attempts, 0 AS run, above.available_at, NULL::text AS last_error, p.reader
        FROM outbox.last_positions(%(since)s::timestamptz) AS p
       CROSS JOIN LATERAL (
             SELECT q.id, q.created_at, q.topic, q.key, q.tenant, q.available_at,
                    CASE WHEN q.available_at > now() THEN 'scheduled' ELSE 'ready' END AS state
               FROM outbox.message AS q
              WHERE p.last_seq > p.up_to AND q.lane = p.lane AND q.seq > p.up_to AND q.created_at >= p.starts_at AND q.created_at < p.ends_at
                AND outbox.covers(p.last, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)) IS NOT TRUE
                AND (q.tenant IS NULL AND q.available_at IS NULL OR NOT outbox.is_logged(p.reader, q.id, q.created_at))
                AND EXISTS (SELECT FROM outbox.subscription AS s
                             WHERE s.reader = p.reader
                               AND outbox.brings(s, q.topic, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)))
                AND q.created_at >= %(since)s::timestamptz
                AND (%(key)s::text IS NULL OR q.key = %(key)s::text)
                AND (%(topic)s::text IS NULL OR q.topic = %(topic)s::text)
                AND (%(topic_prefix)s::text IS NULL OR starts_with(q.topic, %(topic_prefix)s::text))
                AND (%(tenant)s::text IS NULL OR q.tenant = %(tenant)s::text)
                AND (%(state)s::text IS NULL OR %(state)s::text = CASE WHEN q.available_at > now() THEN 'scheduled' ELSE 'ready' END)
              ORDER BY q.seq
              LIMIT %(max_rows)s
             ) AS above
       WHERE p.lane = ANY (%(lanes)s::smallint[])
       UNION ALL
      SELECT l.id, l.created_at, l.topic, l.key, l.tenant, CASE WHEN l.available_at > now() THEN 'scheduled' ELSE 'ready' END,
             0, 0, l.available_at, NULL, l.reader
        FROM outbox.late_messages(%(since)s::timestamptz) AS l
       UNION ALL
      SELECT d.id, d.created_at, d.topic, d.key, d.tenant, d.state, d.attempts, d.run, d.available_at, d.last_error, d.reader
        FROM outbox.deferred_message AS d
       UNION ALL
      SELECT n.id, n.created_at, n.topic, n.key, n.tenant, 'unrouted', 0, 0, n.available_at, NULL, NULL
        FROM outbox.unrouted_messages() AS n
  ) AS m
 WHERE m.created_at >= %(since)s::timestamptz
   AND (%(key)s::text IS NULL OR m.key = %(key)s::text)
   AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
   AND (%(topic_prefix)s::text IS NULL OR starts_with(m.topic, %(topic_prefix)s::text))
   AND (%(tenant)s::text IS NULL OR m.tenant = %(tenant)s::text)
   AND (%(state)s::text IS NULL OR m.state = %(state)s::text)
 ORDER BY m.created_at
 LIMIT %(max_rows)s
