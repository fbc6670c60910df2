-- Does:  Count the deliveries of the postgres broker that are not acked, by consumer and topic, up to a number of each lane of a day.
-- Takes: most (the number of each lane of a day that is counted, and of those that wait after their first claim)
-- Gives: consumer, topic (null: all), messages, ready, waiting, blocked, waited (the oldest one that is due), more (lanes with more)
-- Index: delivery_lane_idx above the watermarks; redelivery_delivery_idx
WITH fresh AS MATERIALIZED (
    SELECT p.consumer, f.topic, f.created_at,
           row_number() OVER (PARTITION BY p.consumer, p.lane, p.starts_at) > %(most)s AS is_more
      FROM inbox.lane_progress() AS p
     CROSS JOIN LATERAL (
           SELECT d.topic, d.created_at
             FROM inbox.delivery AS d
            -- Compared as a row: otherwise the planner may read the seqs of all lanes by the primary key.
            WHERE d.consumer = p.consumer AND d.lane = p.lane AND (d.lane, d.seq) > (p.lane, p.verified_up_to)
              AND d.created_at >= p.starts_at AND d.created_at < p.ends_at
              AND (d.seq > p.marked_up_to
                   OR (SELECT true
                         FROM inbox.ack AS a
                        WHERE a.created_at = date_bin('15 minutes', d.created_at, '2000-01-01 00:00:00+00')
                          AND a.consumer = d.consumer AND a.lane = d.lane
                          AND a.last_seq >= d.seq AND a.last_seq < d.seq + 4096 AND a.first_seq <= d.seq
                          AND d.seq = ANY (a.seqs) AND d.created_at = ANY (a.moments)
                        LIMIT 1) IS NULL)
              AND (SELECT true FROM inbox.redelivery AS e
                    WHERE e.seq = d.seq AND e.created_at = d.created_at AND (e.consumer = d.consumer) IS TRUE LIMIT 1) IS NULL
            LIMIT %(most)s + 1
           ) AS f
), unsettled AS (
    SELECT f.consumer, f.topic, 'ready' AS state, f.created_at AS since, f.is_more FROM fresh AS f
     UNION ALL
    (SELECT w.consumer, w.topic, w.state, greatest(w.created_at, w.available_at), row_number() OVER () > %(most)s
       FROM inbox.waiting_delivery AS w
      LIMIT %(most)s + 1)
)
SELECT u.consumer, CASE WHEN grouping(u.topic) = 0 THEN u.topic END AS topic, count(*) AS messages,
       count(*) FILTER (WHERE u.state = 'ready') AS ready,
       count(*) FILTER (WHERE u.state = 'waiting') AS waiting,
       count(*) FILTER (WHERE u.state = 'blocked') AS blocked,
       now() - min(u.since) FILTER (WHERE u.since <= now()) AS waited,
       count(*) FILTER (WHERE u.is_more) AS more
  FROM unsettled AS u
 GROUP BY GROUPING SETS ((u.consumer), (u.consumer, u.topic))
 ORDER BY u.consumer, grouping(u.topic) DESC, messages DESC, topic
