-- Does:  Count the messages without a mark, by priority, topic and tenant, up to a number of each lane.
-- Takes: lanes, verified (the watermark of each), marked (the last seq in a mark of each), since (where a partition begins), most (of each lane)
-- Gives: part (total, priority, topic or tenant), name (null: no tenant), messages, ready, scheduled, oldest (when the oldest one that is due became due), and in the total: more (lanes that have more messages), estimated (how many there are)
-- Index: message_lane_idx above the watermarks
WITH unmarked AS MATERIALIZED (
    SELECT l.lane, m.seq, m.topic, m.tenant, m.is_due, m.due_at
      FROM unnest(%(lanes)s::smallint[], %(verified)s::bigint[], %(marked)s::bigint[]) AS l (lane, verified_up_to, marked_up_to)
     CROSS JOIN LATERAL (
           SELECT m.seq, m.topic, m.tenant, m.available_at IS NULL OR m.available_at <= now() AS is_due,
                  greatest(m.created_at, m.available_at) AS due_at
             FROM outbox.message AS m
            WHERE m.lane = l.lane AND m.seq > l.verified_up_to AND m.created_at >= %(since)s
              AND (m.seq > l.marked_up_to
                   OR (SELECT true
                         FROM outbox.settlement AS s
                        WHERE s.created_at = date_bin('15 minutes', m.created_at, '2000-01-01 00:00:00+00')
                          AND s.lane = m.lane AND s.last_seq >= m.seq AND s.last_seq < m.seq + 4096 AND s.first_seq <= m.seq
                          AND m.id = ANY (s.ids) AND s.created_at >= %(since)s
                        LIMIT 1) IS NULL)
            ORDER BY m.seq
            LIMIT %(most)s + 1
           ) AS m
), sampled AS (
    SELECT u.lane, count(*) AS messages, min(u.seq) AS first_seq, max(u.seq) AS last_seq FROM unmarked AS u GROUP BY u.lane
), estimate AS (
    -- Assumes as many messages for each seq as in the sample, up to the last seq.
    SELECT count(*) FILTER (WHERE s.messages > %(most)s) AS more,
           sum(s.messages + CASE WHEN s.messages > %(most)s
                                 THEN (last.seq - s.last_seq) * s.messages / (s.last_seq - s.first_seq + 1) ELSE 0 END)::bigint AS estimated
      FROM sampled AS s
      LEFT JOIN LATERAL (
           SELECT m.seq
             FROM outbox.message AS m
            WHERE m.lane = s.lane AND m.created_at >= %(since)s
            ORDER BY m.seq DESC
            LIMIT 1
           ) AS last ON s.messages > %(most)s
), counted AS (
    SELECT grouping(u.lane / 16, u.topic, u.tenant) AS part, u.lane / 16 AS priority, u.topic, u.tenant,
           count(*) AS messages,
           count(*) FILTER (WHERE u.is_due) AS ready,
           count(*) FILTER (WHERE NOT u.is_due) AS scheduled,
           min(u.due_at) FILTER (WHERE u.is_due) AS oldest
      FROM unmarked AS u
     GROUP BY GROUPING SETS ((), (u.lane / 16), (u.topic), (u.tenant))
)
SELECT CASE c.part WHEN 7 THEN 'total' WHEN 3 THEN 'priority' WHEN 5 THEN 'topic' ELSE 'tenant' END AS part,
       CASE c.part WHEN 3 THEN (ARRAY['realtime', 'default', 'bulk'])[c.priority + 1] WHEN 5 THEN c.topic WHEN 6 THEN c.tenant END AS name,
       c.messages, c.ready, c.scheduled, c.oldest,
       CASE WHEN c.part = 7 THEN e.more ELSE 0 END AS more,
       CASE WHEN c.part = 7 THEN coalesce(e.estimated, 0) ELSE 0 END AS estimated
  FROM counted AS c
 CROSS JOIN estimate AS e
