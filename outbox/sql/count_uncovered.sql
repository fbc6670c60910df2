-- Does:  Count the messages that readers have not settled, and no position covers, by priority, topic and tenant, up to a number of each lane.
-- Takes: readers, apart (whether each is counted by itself), lanes, since (where a partition begins), most (of each lane)
-- Gives: reader (null: all together), priority, topic, tenant, messages, ready, scheduled, oldest (when the oldest one that is due became due), and in one row of each reader, else 0: more (lanes that have more messages), estimated (how many there are)
-- Index: message_lane_idx above the positions, message_xid_idx, deferral_message_idx of messages with a tenant
WITH last AS MATERIALIZED (
    SELECT p.*, CASE WHEN %(apart)s THEN p.reader ELSE '' END AS whose
      FROM outbox.last_positions(%(since)s) AS p
     WHERE p.last_seq > p.up_to AND p.lane = ANY (%(lanes)s::smallint[]) AND p.reader = ANY (%(readers)s::text[])
), uncovered AS MATERIALIZED (
    SELECT l.whose, m.lane, m.seq, m.topic, m.tenant, m.available_at IS NULL OR m.available_at <= now() AS is_due,
           greatest(m.created_at, m.available_at) AS due_at, false AS is_late
      FROM (SELECT DISTINCT q.whose, q.lane FROM last AS q) AS l
     CROSS JOIN LATERAL (
           SELECT above.*
             FROM last AS p
            CROSS JOIN LATERAL (
                  SELECT q.lane, q.seq, q.created_at, q.topic, q.tenant, q.available_at
                    FROM outbox.message AS q
                   WHERE q.lane = p.lane AND q.seq > p.up_to AND q.created_at >= p.starts_at AND q.created_at < p.ends_at
                     AND q.created_at >= %(since)s  -- so that it is planned for these days alone
                     AND outbox.covers(p.last, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)) IS NOT TRUE
                     AND (q.tenant IS NULL AND q.available_at IS NULL OR NOT outbox.is_logged(p.reader, q.id, q.created_at))
                     AND EXISTS (SELECT FROM outbox.subscription AS s
                                  WHERE s.reader = p.reader
                                    AND outbox.brings(s, q.topic, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)))
                   ORDER BY q.seq
                   LIMIT %(most)s + 1
                  ) AS above
            WHERE p.whose = l.whose AND p.lane = l.lane
            LIMIT %(most)s + 1
           ) AS m
     UNION ALL
    SELECT CASE WHEN %(apart)s THEN m.reader ELSE '' END, m.lane, m.seq, m.topic, m.tenant, m.available_at IS NULL OR m.available_at <= now(),
           greatest(m.created_at, m.available_at), true
      FROM outbox.late_messages(%(since)s, 48 * %(most)s) AS m
     WHERE m.lane = ANY (%(lanes)s::smallint[]) AND m.reader = ANY (%(readers)s::text[])
), estimate AS (
    -- Assumes as many messages for each seq as in the sample, up to the last seq.
    SELECT e.whose, count(*) FILTER (WHERE e.is_more) AS more, sum(e.messages)::bigint AS messages
      FROM (SELECT s.whose, s.messages > %(most)s AS is_more,
                   s.messages + CASE WHEN s.messages > %(most)s THEN (last.seq - s.last_seq) * s.messages / (s.last_seq - s.first_seq + 1) ELSE 0 END AS messages
              FROM (SELECT u.whose, u.lane, count(*) AS messages, min(u.seq) AS first_seq, max(u.seq) AS last_seq
                      FROM uncovered AS u WHERE NOT u.is_late GROUP BY u.whose, u.lane) AS s
              LEFT JOIN LATERAL (
                   SELECT m.seq
                     FROM outbox.message AS m
                    WHERE m.lane = s.lane AND m.created_at >= %(since)s
                    ORDER BY m.seq DESC
                    LIMIT 1
                   ) AS last ON s.messages > %(most)s
             UNION ALL
            SELECT u.whose, count(*) = 48 * %(most)s, count(*) FROM uncovered AS u WHERE u.is_late GROUP BY u.whose) AS e
     GROUP BY e.whose
), counted AS (
    SELECT u.whose, u.lane / 16 AS priority, u.topic, u.tenant,
           count(*) AS messages,
           count(*) FILTER (WHERE u.is_due) AS ready,
           count(*) FILTER (WHERE NOT u.is_due) AS scheduled,
           min(u.due_at) FILTER (WHERE u.is_due) AS oldest,
           row_number() OVER (PARTITION BY u.whose) = 1 AS is_first
      FROM uncovered AS u
     GROUP BY u.whose, u.lane / 16, u.topic, u.tenant
)
SELECT nullif(c.whose, '') AS reader, (ARRAY['realtime', 'default', 'bulk'])[c.priority + 1] AS priority, c.topic, c.tenant,
       c.messages, c.ready, c.scheduled, c.oldest,
       CASE WHEN c.is_first THEN e.more ELSE 0 END AS more, CASE WHEN c.is_first THEN e.messages ELSE 0 END AS estimated
  FROM counted AS c
  JOIN estimate AS e USING (whose)
