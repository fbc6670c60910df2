-- Does:  Count the deliveries of the postgres broker that are not acked, by consumer and topic, up to a number of each lane of a day.
-- Takes: most (the number of each lane of a day that is counted, and of those that wait after their first claim)
-- Gives: consumer, topic, messages, ready, waiting, blocked, oldest (when the oldest one that is due became due), more (lanes with more)
-- Index: message_lane_idx above the positions; deferral_delivery_idx
WITH fresh AS MATERIALIZED (
    SELECT p.consumer, f.topic, f.created_at,
           row_number() OVER (PARTITION BY p.consumer, p.lane, p.starts_at) > %(most)s AS is_more
      FROM inbox.last_positions() AS p
     CROSS JOIN LATERAL (
           SELECT m.topic, m.created_at
             FROM inbox.message AS m
            -- Compared as a row: otherwise the planner may read the seqs of all lanes by the primary key.
            WHERE m.lane = p.lane AND (m.lane, m.seq) > (p.lane, p.up_to)
              AND m.created_at >= p.starts_at AND m.created_at < p.ends_at
              AND inbox.covers(p.up_to, p.snapshot, p.late_up_to, p.late_snapshot, m.seq, m.xid, (SELECT max(b.seq) FROM inbox.base AS b)) IS NOT TRUE
              AND EXISTS (SELECT FROM inbox.subscription AS s
                           WHERE s.consumer = p.consumer
                             AND inbox.brings(s, m.topic, m.seq, m.xid, (SELECT max(b.seq) FROM inbox.base AS b)))
              AND (SELECT true FROM inbox.deferral AS e
                    WHERE e.seq = m.seq AND e.created_at = m.created_at AND (e.consumer = p.consumer) IS TRUE LIMIT 1) IS NULL
            LIMIT %(most)s + 1
           ) AS f
     UNION ALL
    SELECT s.consumer, s.topic, s.created_at, false
      FROM inbox.late_deliveries(%(most)s) AS late
     CROSS JOIN LATERAL (
           SELECT d.consumer, d.topic, d.created_at FROM inbox.delivery_status AS d
            WHERE d.seq = late.seq AND d.created_at = late.created_at AND (d.consumer = late.consumer) IS TRUE AND d.state = 'ready'
           OFFSET 0
           ) AS s
), unsettled AS (
    SELECT f.consumer, f.topic, 'ready' AS state, f.created_at AS since, f.is_more FROM fresh AS f
     UNION ALL
    (SELECT w.consumer, w.topic, w.state, greatest(w.created_at, w.available_at), row_number() OVER () > %(most)s
       FROM inbox.waiting_delivery AS w
      LIMIT %(most)s + 1)
)
SELECT u.consumer, u.topic, count(*) AS messages,
       count(*) FILTER (WHERE u.state = 'ready') AS ready,
       count(*) FILTER (WHERE u.state = 'waiting') AS waiting,
       count(*) FILTER (WHERE u.state = 'blocked') AS blocked,
       min(u.since) FILTER (WHERE u.since <= now()) AS oldest,
       count(*) FILTER (WHERE u.is_more) AS more
  FROM unsettled AS u
 GROUP BY u.consumer, u.topic
