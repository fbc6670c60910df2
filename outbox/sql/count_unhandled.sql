-- Does:  Count the messages that consumers that read the outbox have not handled, by consumer and topic, up to a number of each lane of a day.
-- Takes: consumers, most (the number of each lane of a day that is counted, and of those that wait after their first claim)
-- Gives: consumer, topic, messages, ready, scheduled, waiting, blocked, oldest (when the oldest one that is due became due), more (lanes with more)
-- Index: message_lane_idx above the positions, message_xid_idx, deferral_message_idx of those with a tenant; reads the log
WITH unsettled AS (
    SELECT p.reader, f.topic, CASE WHEN f.available_at > now() THEN 'scheduled' ELSE 'ready' END AS state,
           greatest(f.created_at, f.available_at) AS since,
           row_number() OVER (PARTITION BY p.reader, p.lane, p.starts_at) > %(most)s AS is_more
      FROM outbox.last_positions() AS p
     CROSS JOIN LATERAL (
           SELECT m.topic, m.created_at, m.available_at
             FROM outbox.message AS m
            WHERE p.last_seq > p.up_to AND m.lane = p.lane AND m.seq > p.up_to AND m.created_at >= p.starts_at AND m.created_at < p.ends_at
              AND outbox.covers(p.last, m.seq, m.xid, (SELECT max(b.seq) FROM outbox.base AS b)) IS NOT TRUE
              AND (m.tenant IS NULL  -- else the log can have it already
                   OR (SELECT true FROM outbox.deferral AS e WHERE e.id = m.id AND e.created_at = m.created_at AND (e.reader = p.reader) IS TRUE LIMIT 1) IS NULL)
              AND EXISTS (SELECT FROM outbox.subscription AS s
                           WHERE s.reader = p.reader
                             AND outbox.brings(s, m.topic, m.seq, m.xid, (SELECT max(b.seq) FROM outbox.base AS b)))
            ORDER BY m.seq
            LIMIT %(most)s + 1
           ) AS f
     WHERE p.reader = ANY (%(consumers)s::text[])
     UNION ALL
    SELECT late.reader, late.topic, 'ready', late.created_at, false
      FROM outbox.late_messages(at_most => %(most)s) AS late
     WHERE late.reader = ANY (%(consumers)s::text[])
     UNION ALL
    (SELECT d.reader, d.topic, d.state, greatest(d.created_at, d.available_at), row_number() OVER () > %(most)s
       FROM outbox.deferred_message AS d
      WHERE d.reader = ANY (%(consumers)s::text[])
      LIMIT %(most)s + 1)
)
SELECT u.reader AS consumer, u.topic, count(*) AS messages,
       count(*) FILTER (WHERE u.state = 'ready') AS ready,
       count(*) FILTER (WHERE u.state = 'scheduled') AS scheduled,
       count(*) FILTER (WHERE u.state = 'waiting') AS waiting,
       count(*) FILTER (WHERE u.state = 'blocked') AS blocked,
       min(u.since) FILTER (WHERE u.since <= now()) AS oldest,
       count(*) FILTER (WHERE u.is_more) AS more
  FROM unsettled AS u
 GROUP BY u.reader, u.topic
