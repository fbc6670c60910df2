-- Does:  List scheduled messages that are not due, nor cancelled, and match, the next ones first.
-- Takes: lanes, key, topic, topic_prefix, tenant (each null: any), max_rows
-- Gives: id, created_at, due_at, topic, key, tenant, lane, readers (that have to publish or handle it)
-- Index: deferral_due_idx, up to max_rows of each reader, lane and day that match; message_lane_idx above the positions
WITH found AS (
    SELECT d.*
      FROM (SELECT DISTINCT s.reader FROM outbox.subscription AS s WHERE s.ended_at IS NULL) AS r
     CROSS JOIN unnest(%(lanes)s::smallint[]) AS l (lane)
     CROSS JOIN LATERAL (
           SELECT m.id, m.created_at, e.due_at, m.topic, m.key, m.tenant, m.lane, r.reader
             FROM outbox.deferral AS e
            CROSS JOIN LATERAL (SELECT q.id, q.created_at, q.topic, q.key, q.tenant, q.lane
                                  FROM outbox.message AS q WHERE q.id = e.id AND q.created_at = e.created_at LIMIT 1) AS m
            WHERE e.reader = r.reader AND e.lane = l.lane AND e.due_at > now() AND e.cause = 'scheduled'
              AND (SELECT true FROM outbox.deferral AS c
                    WHERE c.id = e.id AND c.created_at = e.created_at AND (c.reader IN (e.reader, '')) IS TRUE AND c.cause <> 'scheduled'
                    LIMIT 1) IS NULL
              AND (%(key)s::text IS NULL OR m.key = %(key)s::text)
              AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
              AND (%(topic_prefix)s::text IS NULL OR starts_with(m.topic, %(topic_prefix)s::text))
              AND (%(tenant)s::text IS NULL OR m.tenant = %(tenant)s::text)
            ORDER BY e.due_at
            LIMIT %(max_rows)s
           ) AS d
     UNION ALL
    SELECT m.*
      FROM (
           SELECT q.id, q.created_at, q.available_at, q.topic, q.key, q.tenant, q.lane, p.reader
             FROM outbox.last_positions() AS p
            CROSS JOIN outbox.message AS q
            WHERE p.last_seq > p.up_to AND q.lane = p.lane AND q.seq > p.up_to AND q.created_at >= p.starts_at AND q.created_at < p.ends_at
              AND outbox.covers(p.last, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)) IS NOT TRUE
              -- In this order: a backlog is mostly of others.
              AND CASE WHEN q.available_at > now() THEN NOT outbox.is_logged(p.reader, q.id, q.created_at) END
              AND EXISTS (SELECT FROM outbox.subscription AS s
                           WHERE s.reader = p.reader
                             AND outbox.brings(s, q.topic, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)))
            UNION ALL
           SELECT n.id, n.created_at, n.available_at, n.topic, n.key, n.tenant, n.lane, NULL
             FROM outbox.unrouted_messages() AS n
           ) AS m
     WHERE m.available_at > now() AND m.lane = ANY (%(lanes)s::smallint[])
       AND (%(key)s::text IS NULL OR m.key = %(key)s::text)
       AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
       AND (%(topic_prefix)s::text IS NULL OR starts_with(m.topic, %(topic_prefix)s::text))
       AND (%(tenant)s::text IS NULL OR m.tenant = %(tenant)s::text)
)
SELECT f.id, f.created_at, min(f.due_at) AS due_at, f.topic, f.key, f.tenant, f.lane,
       coalesce(array_agg(DISTINCT f.reader) FILTER (WHERE f.reader IS NOT NULL), '{}') AS readers
  FROM found AS f
 GROUP BY f.id, f.created_at, f.topic, f.key, f.tenant, f.lane
 ORDER BY min(f.due_at), f.id
 LIMIT %(max_rows)s
