-- Does:  List the readers of the outbox, with the backlog of each and the days that it holds.
-- Takes: readers (null: all), most (messages that are counted of each)
-- Gives: reader, broker, role, topics, discards, created_at, dropped_at, messages (up to most), oldest (when its oldest message was created; if more wait in the log of that day, the oldest of those counted), days (partitions with such messages), bytes (of these, with the positions and the log)
-- Index: message_lane_idx above the positions; reads the log
WITH last AS MATERIALIZED (
    SELECT p.* FROM outbox.last_positions() AS p WHERE p.last_seq > p.up_to AND (p.reader = ANY (%(readers)s) OR %(readers)s::text[] IS NULL)
), other AS MATERIALIZED (
    SELECT w.reader, d.starts_at, count(*) AS messages, min(w.created_at) AS created_at
      FROM (SELECT m.reader, m.created_at FROM outbox.late_messages() AS m
             UNION ALL
            SELECT e.reader, e.created_at FROM outbox.open_deferrals(%(readers)s, %(most)s) AS e) AS w
      JOIN outbox.partitions('outbox.message') AS d ON w.created_at >= d.starts_at AND w.created_at < d.ends_at
     GROUP BY w.reader, d.starts_at
), kept AS MATERIALIZED (
    -- The oldest message of each lane and day, and those in the log.
    SELECT p.reader, p.starts_at, m.created_at
      FROM last AS p
     CROSS JOIN LATERAL (
           SELECT q.created_at
             FROM outbox.message AS q
            WHERE q.lane = p.lane AND q.seq > p.up_to AND q.created_at >= p.starts_at AND q.created_at < p.ends_at
              AND outbox.covers(p.last, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)) IS NOT TRUE
              AND (q.tenant IS NULL AND q.available_at IS NULL OR NOT outbox.is_logged(p.reader, q.id, q.created_at))
              AND EXISTS (SELECT FROM outbox.subscription AS s
                           WHERE s.reader = p.reader
                             AND outbox.brings(s, q.topic, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)))
            ORDER BY q.seq
            LIMIT 1
           ) AS m
     UNION ALL
    SELECT o.reader, o.starts_at, o.created_at FROM other AS o
), size AS MATERIALIZED (
    SELECT x.starts_at, sum(pg_total_relation_size(x.partition)) AS bytes
      FROM outbox.partition_policy AS p
     CROSS JOIN LATERAL outbox.partitions(p.parent_table) AS x
     WHERE 'outbox.message' IN (p.parent_table, p.follows) AND x.starts_at IN (SELECT k.starts_at FROM kept AS k)
     GROUP BY x.starts_at
)
SELECT r.reader, r.broker, r.role, s.topics, s.discards, r.created_at, s.dropped_at, open.messages, held.oldest, held.days, held.bytes
  FROM outbox.reader AS r
  JOIN (
       -- The topics that it gets, or got until it was last dropped.
       SELECT s.reader, array_agg(s.topic ORDER BY s.topic) AS topics, bool_and(s.is_discarded) AS discards, max(s.ended_at) AS dropped_at
         FROM (SELECT q.*, rank() OVER (PARTITION BY q.reader ORDER BY q.ended_at DESC NULLS FIRST) AS place FROM outbox.subscription AS q) AS s
        WHERE s.place = 1
        GROUP BY s.reader
       ) AS s USING (reader)
 CROSS JOIN LATERAL (
       SELECT least(count(*) + (SELECT coalesce(sum(o.messages), 0) FROM other AS o WHERE o.reader = r.reader), %(most)s)::bigint AS messages
         FROM (SELECT
                 FROM last AS p
                CROSS JOIN LATERAL (
                      SELECT
                        FROM outbox.message AS q
                       WHERE q.lane = p.lane AND q.seq > p.up_to AND q.created_at >= p.starts_at AND q.created_at < p.ends_at
                         AND outbox.covers(p.last, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)) IS NOT TRUE
                         AND (q.tenant IS NULL AND q.available_at IS NULL OR NOT outbox.is_logged(p.reader, q.id, q.created_at))
                         AND EXISTS (SELECT FROM outbox.subscription AS s
                                      WHERE s.reader = p.reader
                                        AND outbox.brings(s, q.topic, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)))
                       LIMIT %(most)s
                      ) AS m
                WHERE p.reader = r.reader
                LIMIT %(most)s) AS m
       ) AS open
 CROSS JOIN LATERAL (
       SELECT min(k.created_at) AS oldest, count(*) AS days, coalesce(sum(z.bytes), 0)::bigint AS bytes
         FROM (SELECT q.starts_at, min(q.created_at) AS created_at FROM kept AS q WHERE q.reader = r.reader GROUP BY q.starts_at) AS k
         JOIN size AS z USING (starts_at)
       ) AS held
 WHERE r.reader = ANY (%(readers)s) OR %(readers)s::text[] IS NULL
 ORDER BY s.dropped_at IS NOT NULL, r.created_at, r.reader
