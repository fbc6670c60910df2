-- Does:  Count the messages that relays have not settled, and no position covers, by priority, topic and tenant, up to a number of each lane.
-- Takes: lanes, since (where a partition begins), most (of each lane)
-- Gives: priority, topic, tenant, messages, ready, scheduled, oldest (when the oldest one that is due became due), and in one row, else 0: more (lanes that have more messages), estimated (how many there are)
-- Index: message_lane_idx above the positions, message_xid_idx
WITH last AS MATERIALIZED (
    SELECT p.* FROM outbox.last_positions(%(since)s) AS p WHERE p.lane = ANY (%(lanes)s::smallint[])
       AND p.reader <> ALL (ARRAY(SELECT r.reader FROM outbox.reader AS r WHERE r.broker = 'direct'))
), uncovered AS MATERIALIZED (
    SELECT m.lane, m.seq, m.topic, m.tenant, m.available_at IS NULL OR m.available_at <= now() AS is_due,
           greatest(m.created_at, m.available_at) AS due_at, false AS is_late
      FROM unnest(%(lanes)s::smallint[]) AS l (lane)
     CROSS JOIN LATERAL (
           SELECT above.*
             FROM last AS p
            CROSS JOIN LATERAL (
                  SELECT q.lane, q.seq, q.created_at, q.topic, q.tenant, q.available_at
                    FROM outbox.message AS q
                   WHERE p.last_seq > p.up_to AND q.lane = p.lane AND q.seq > p.up_to AND q.created_at >= p.starts_at AND q.created_at < p.ends_at
                     AND q.created_at >= %(since)s  -- so that it is planned for these days alone
                     AND outbox.covers(p.last, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)) IS NOT TRUE
                     AND EXISTS (SELECT FROM outbox.subscription AS s
                                  WHERE s.reader = p.reader
                                    AND outbox.brings(s, q.topic, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)))
                   ORDER BY q.seq
                   LIMIT %(most)s + 1
                  ) AS above
            WHERE p.lane = l.lane
            LIMIT %(most)s + 1
           ) AS m
     UNION ALL
    SELECT m.lane, m.seq, m.topic, m.tenant, m.available_at IS NULL OR m.available_at <= now(),
           greatest(m.created_at, m.available_at), true
      FROM outbox.late_messages(%(since)s, 48 * %(most)s) AS m
     WHERE m.lane = ANY (%(lanes)s::smallint[])
       AND m.reader <> ALL (ARRAY(SELECT r.reader FROM outbox.reader AS r WHERE r.broker = 'direct'))
), sampled AS (
    SELECT u.lane, count(*) AS messages, min(u.seq) AS first_seq, max(u.seq) AS last_seq FROM uncovered AS u WHERE NOT u.is_late GROUP BY u.lane
), late AS (
    SELECT count(*) AS messages FROM uncovered AS u WHERE u.is_late
), estimate AS (
    -- Assumes as many messages for each seq as in the sample, up to the last seq.
    SELECT count(*) FILTER (WHERE s.messages > %(most)s) + (SELECT count(*) FROM late AS t WHERE t.messages = 48 * %(most)s) AS more,
           (coalesce(sum(s.messages + CASE WHEN s.messages > %(most)s
                                           THEN (last.seq - s.last_seq) * s.messages / (s.last_seq - s.first_seq + 1) ELSE 0 END), 0)
            + (SELECT t.messages FROM late AS t))::bigint AS estimated
      FROM sampled AS s
      LEFT JOIN LATERAL (
           SELECT m.seq
             FROM outbox.message AS m
            WHERE m.lane = s.lane AND m.created_at >= %(since)s
            ORDER BY m.seq DESC
            LIMIT 1
           ) AS last ON s.messages > %(most)s
)
SELECT (ARRAY['realtime', 'default', 'bulk'])[u.lane / 16 + 1] AS priority, u.topic, u.tenant,
       count(*) AS messages,
       count(*) FILTER (WHERE u.is_due) AS ready,
       count(*) FILTER (WHERE NOT u.is_due) AS scheduled,
       min(u.due_at) FILTER (WHERE u.is_due) AS oldest,
       CASE row_number() OVER () WHEN 1 THEN (SELECT e.more FROM estimate AS e) ELSE 0 END AS more,
       CASE row_number() OVER () WHEN 1 THEN (SELECT e.estimated FROM estimate AS e) ELSE 0 END AS estimated
  FROM uncovered AS u
 GROUP BY u.lane / 16, u.topic, u.tenant
