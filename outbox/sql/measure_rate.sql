-- Does:  Measure from the latest positions and log entries how many messages relays settled, and how long after they were added.
-- Takes: window (an interval), since (where a partition begins; older messages are left out), most (positions, and entries, of each lane)
-- Gives: published and dead_lettered (a second; null: none in the window), median, slow (the 95th percentile), each null if unknown
-- Index: position_seq_idx, message_lane_idx and deferral_pkey, the latest of each lane
WITH leased AS MATERIALIZED (
    SELECT DISTINCT s.reader, l.lane
      FROM outbox.subscription AS s
     CROSS JOIN generate_series(0, 47) AS l (lane)
     WHERE s.ended_at IS NULL AND NOT s.is_discarded
       AND s.reader <> ALL (ARRAY(SELECT r.reader FROM outbox.reader AS r WHERE r.broker = 'direct'))
       AND EXISTS (SELECT FROM outbox.message AS m WHERE m.lane = l.lane AND m.created_at >= %(since)s ORDER BY m.seq OFFSET 0)
), settlement AS MATERIALIZED (
    SELECT l.lane, l.reader, s.*
      FROM leased AS l
     CROSS JOIN LATERAL (
           SELECT p.created_at, p.ends_at, p.settled_at, p.up_to, p.messages - p.deferred AS published,
                  row_number() OVER (ORDER BY p.up_to DESC, p.number DESC) = %(most)s AS is_last
             FROM outbox.position AS p
            WHERE p.reader = l.reader AND p.lane = l.lane AND p.created_at >= %(since)s AND p.created_at <= now()
            ORDER BY p.up_to DESC, p.number DESC
            LIMIT %(most)s
           ) AS s
     WHERE s.settled_at > now() - %(window)s::interval
), entry AS MATERIALIZED (
    SELECT l.lane, l.reader, e.*
      FROM leased AS l
     CROSS JOIN LATERAL (
           SELECT d.deferred_at, d.outcome, row_number() OVER (ORDER BY d.entry DESC) = %(most)s AS is_last
             FROM outbox.deferral AS d
            WHERE d.reader = l.reader AND d.lane = l.lane AND d.created_at >= %(since)s AND d.created_at <= now()
            ORDER BY d.entry DESC
            LIMIT %(most)s
           ) AS e
     WHERE e.deferred_at > now() - %(window)s::interval
), lane AS (
    -- Those of a busy lane don't reach back over the window: its rate is measured over a shorter time.
    SELECT sum(s.published) AS published, 0 AS dead_lettered, bool_or(s.is_last) AS is_busy, min(s.settled_at) AS began_at
      FROM settlement AS s
     GROUP BY s.reader, s.lane
     UNION ALL
    SELECT count(*) FILTER (WHERE e.outcome = 'published'), count(*) FILTER (WHERE e.outcome = 'dead_lettered'),
           bool_or(e.is_last), min(e.deferred_at)
      FROM entry AS e
     GROUP BY e.reader, e.lane
), rate AS (
    SELECT l.published, l.dead_lettered,
           CASE WHEN l.is_busy THEN greatest(extract(epoch FROM clock_timestamp() - l.began_at), 0.001)
                ELSE extract(epoch FROM %(window)s::interval) END AS seconds
      FROM lane AS l
), latency AS (
    -- Of the last message of each claim, if it was published then. A UUIDv7 begins with the time at which
    -- it was generated, in milliseconds.
    SELECT greatest(s.settled_at - to_timestamp(('x' || encode(substring(uuid_send(m.id) FROM 1 FOR 6), 'hex'))::bit(48)::bigint / 1000.0),
                    interval '0') AS waited
      FROM settlement AS s
     CROSS JOIN LATERAL (
           SELECT q.id, q.created_at FROM outbox.message AS q
            WHERE q.lane = s.lane AND q.seq = s.up_to AND q.created_at >= s.created_at AND q.created_at < s.ends_at
              AND q.created_at >= %(since)s
            LIMIT 1
           ) AS m
     WHERE s.published > 0 AND get_byte(uuid_send(m.id), 6) >> 4 = 7
       AND NOT EXISTS (SELECT FROM outbox.deferral AS d WHERE d.id = m.id AND d.created_at = m.created_at AND d.created_at >= %(since)s AND d.run = 0)
)
SELECT (SELECT sum(r.published / r.seconds)::float8 FROM rate AS r) AS published,
       (SELECT sum(r.dead_lettered / r.seconds)::float8 FROM rate AS r) AS dead_lettered,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY y.waited) AS median,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY y.waited) AS slow
  FROM latency AS y
