-- Does:  Count the messages that were added, published, handled and dead-lettered in each minute of a period, up to a number of rows for each minute.
-- Takes: minutes (before the current one), most (rows of each minute; if there are more, their rate is used for the whole minute)
-- Gives: series (added, published, handled or dead_lettered), name (of the consumer, or the side), minute (0: the latest complete one), messages
-- Index: message_pkey, position_settled_idx, receipt_pkey, dead_letter_status_idx
WITH minute AS MATERIALIZED (
    SELECT n, b.starts_at, b.ends_at,
           -- The smallest UUIDv7 of each moment.
           (lpad(to_hex((extract(epoch FROM b.starts_at) * 1000)::bigint), 12, '0') || '70008000000000000000')::uuid AS first_id,
           (lpad(to_hex((extract(epoch FROM b.ends_at) * 1000)::bigint), 12, '0') || '70008000000000000000')::uuid AS end_id
      FROM generate_series(0, %(minutes)s - 1) AS n
     CROSS JOIN LATERAL (
           SELECT date_trunc('minute', now()) - (n + 1) * interval '1 minute' AS starts_at,
                  date_trunc('minute', now()) - n * interval '1 minute' AS ends_at
           ) AS b
), row_ AS (
    SELECT 'added' AS series, CAST(NULL AS text) AS name, m.n, m.starts_at, m.ends_at, 1 AS messages,
           to_timestamp(('x' || encode(substring(uuid_send(r.id) FROM 1 FOR 6), 'hex'))::bit(48)::bigint / 1000.0) AS at
      FROM minute AS m
     CROSS JOIN LATERAL (
           SELECT a.id
             FROM outbox.message AS a
            WHERE a.id >= m.first_id AND a.id < m.end_id
              AND a.created_at > now() - (%(minutes)s + 60) * interval '1 minute' AND a.created_at < now() + interval '1 hour'
            ORDER BY a.id
            LIMIT %(most)s
           ) AS r
     UNION ALL
    SELECT 'published', NULL, m.n, m.starts_at, m.ends_at, r.published, r.settled_at
      FROM minute AS m
     CROSS JOIN LATERAL (
           SELECT s.settled_at, s.messages - s.deferred AS published
             FROM outbox.position AS s
            WHERE s.settled_at >= m.starts_at AND s.settled_at < m.ends_at
              -- Partitions are a week wide at most.
              AND s.created_at > now() - interval '8 days 1 hour' AND s.created_at < now() + interval '1 hour'
              AND s.ends_at > now() - interval '25 hours'
            ORDER BY s.settled_at
            LIMIT %(most)s
           ) AS r
     UNION ALL
    SELECT 'handled', r.consumer, m.n, m.starts_at, m.ends_at, 1, r.message_at
      FROM minute AS m
     CROSS JOIN LATERAL (
           SELECT e.consumer, e.message_at
             FROM inbox.receipt AS e
            WHERE e.message_id >= m.first_id AND e.message_id < m.end_id
              AND e.message_at > now() - (%(minutes)s + 60) * interval '1 minute' AND e.message_at < now() + interval '1 hour'
            ORDER BY e.message_id
            LIMIT %(most)s
           ) AS r
     UNION ALL
    SELECT 'dead_lettered', 'outbox', m.n, m.starts_at, m.ends_at, 1, r.created_at
      FROM minute AS m
     CROSS JOIN LATERAL (
           SELECT d.created_at
             FROM outbox.dead_letter AS d
            WHERE d.status IN ('PENDING', 'SUCCEEDED', 'DISCARDED') AND d.created_at >= m.starts_at AND d.created_at < m.ends_at
              AND d.created_at > now() - (%(minutes)s + 1) * interval '1 minute'
            LIMIT %(most)s
           ) AS r
     UNION ALL
    SELECT 'dead_lettered', 'inbox', m.n, m.starts_at, m.ends_at, 1, r.created_at
      FROM minute AS m
     CROSS JOIN LATERAL (
           SELECT d.created_at
             FROM inbox.dead_letter AS d
            WHERE d.status IN ('PENDING', 'SUCCEEDED', 'DISCARDED') AND d.created_at >= m.starts_at AND d.created_at < m.ends_at
              AND d.created_at > now() - (%(minutes)s + 1) * interval '1 minute'
            LIMIT %(most)s
           ) AS r
), seen AS (
    SELECT r.series, r.name, r.n, sum(r.messages) AS messages,
           sum(count(*)) OVER of_minute AS rows,
           extract(epoch FROM max(max(r.at)) OVER of_minute - min(r.starts_at)) AS seconds
      FROM row_ AS r
     GROUP BY r.series, r.name, r.n
    WINDOW of_minute AS (PARTITION BY r.series, CASE r.series WHEN 'dead_lettered' THEN r.name END, r.n)
)
SELECT s.series, s.name, s.n AS minute,
       (s.messages * CASE WHEN s.rows >= %(most)s THEN 60 / greatest(least(s.seconds, 60), 0.001) ELSE 1 END)::float8 AS messages
  FROM seen AS s
 ORDER BY s.series, s.name, s.n DESC
