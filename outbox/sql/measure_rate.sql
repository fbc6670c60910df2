-- Does:  Measure from the latest marks how many messages were settled, and how long after they were added.
-- Takes: window (an interval), since (where a partition begins; marks of older messages are left out), most (marks of each lane)
-- Gives: published and dead_lettered (a second; null: no mark in the window), median, slow (the 95th percentile), each null if unknown
-- Index: settlement_lane_idx, the latest marks of each lane
WITH mark AS MATERIALIZED (
    SELECT l.lane, s.settled_at, s.outcome, s.messages, s.id, s.is_last
      FROM generate_series(0, 47) AS l (lane)
     CROSS JOIN LATERAL (
           SELECT k.settled_at, k.outcome, cardinality(k.ids) AS messages, k.ids[1] AS id,
                  row_number() OVER (ORDER BY k.last_seq DESC) = %(most)s AS is_last
             FROM outbox.settlement AS k
            WHERE k.lane = l.lane AND k.created_at >= %(since)s
            ORDER BY k.last_seq DESC
            LIMIT %(most)s
           ) AS s
     WHERE s.settled_at > now() - %(window)s::interval
), lane AS (
    -- The marks of a busy lane don't reach back over the window: its rate is measured over a shorter time.
    SELECT sum(m.messages) FILTER (WHERE m.outcome = 'published') AS published,
           sum(m.messages) FILTER (WHERE m.outcome = 'dead_lettered') AS dead_lettered,
           CASE WHEN bool_or(m.is_last) THEN greatest(extract(epoch FROM clock_timestamp() - min(m.settled_at)), 0.001)
                ELSE extract(epoch FROM %(window)s::interval) END AS seconds
      FROM mark AS m
     GROUP BY m.lane
), latency AS (
    -- A UUIDv7 begins with the time at which it was generated, in milliseconds.
    SELECT greatest(m.settled_at - to_timestamp(('x' || encode(substring(uuid_send(m.id) FROM 1 FOR 6), 'hex'))::bit(48)::bigint / 1000.0),
                    interval '0') AS waited
      FROM mark AS m
     WHERE m.outcome = 'published' AND get_byte(uuid_send(m.id), 6) >> 4 = 7
)
SELECT (SELECT sum(l.published / l.seconds)::float8 FROM lane AS l) AS published,
       (SELECT sum(l.dead_lettered / l.seconds)::float8 FROM lane AS l) AS dead_lettered,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY y.waited) AS median,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY y.waited) AS slow
  FROM latency AS y
