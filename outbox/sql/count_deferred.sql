-- Does:  Count messages that wait after their first claim, by priority, topic and tenant.
-- Takes: entries of the log (ids, moments, seqs, lanes, runs, causes, dues: arrays of one length), first and last (moments)
-- Gives: as count_unmarked.sql, and waiting (refused, to be tried again), blocked
-- Index: message_pkey and settlement_lane_idx of the partitions from first to last
WITH deferred AS MATERIALIZED (
    SELECT e.lane, m.topic, m.tenant, e.cause, e.due_at, greatest(e.created_at, e.due_at) AS waits_since,
           e.due_at <= now() AS is_due
      FROM unnest(%(ids)s::uuid[], %(moments)s::timestamptz[], %(seqs)s::bigint[], %(lanes)s::smallint[], %(runs)s::integer[],
                  %(causes)s::text[], %(dues)s::timestamptz[]) AS e (id, created_at, seq, lane, run, cause, due_at)
     CROSS JOIN LATERAL (
           SELECT q.topic, q.tenant
             FROM outbox.message AS q
            WHERE q.id = e.id AND q.created_at = e.created_at AND q.created_at BETWEEN %(first)s AND %(last)s
            LIMIT 1
           ) AS m
     -- A relay that had lost the lane may have written a mark late.
     WHERE e.run > 0
        OR (SELECT true
              FROM outbox.settlement AS s
             WHERE s.created_at = date_bin('15 minutes', e.created_at, '2000-01-01 00:00:00+00')
               AND s.created_at BETWEEN %(first)s::timestamptz - interval '15 minutes' AND %(last)s
               AND s.lane = e.lane AND s.last_seq >= e.seq AND s.last_seq < e.seq + 4096 AND s.first_seq <= e.seq
               AND e.id = ANY (s.ids) AND s.outcome <> 'deferred'
             LIMIT 1) IS NULL
), counted AS (
    SELECT grouping(d.lane / 16, d.topic, d.tenant) AS part, d.lane / 16 AS priority, d.topic, d.tenant,
           count(*) AS messages,
           count(*) FILTER (WHERE d.cause IN ('scheduled', 'replayed') AND d.is_due) AS ready,
           count(*) FILTER (WHERE d.cause IN ('scheduled', 'replayed') AND NOT d.is_due) AS scheduled,
           count(*) FILTER (WHERE d.cause IN ('refused', 'postponed')) AS waiting,
           count(*) FILTER (WHERE d.cause = 'blocked') AS blocked,
           min(d.waits_since) FILTER (WHERE d.is_due) AS oldest
      FROM deferred AS d
     GROUP BY GROUPING SETS ((), (d.lane / 16), (d.topic), (d.tenant))
)
SELECT CASE c.part WHEN 7 THEN 'total' WHEN 3 THEN 'priority' WHEN 5 THEN 'topic' ELSE 'tenant' END AS part,
       CASE c.part WHEN 3 THEN (ARRAY['realtime', 'default', 'bulk'])[c.priority + 1] WHEN 5 THEN c.topic WHEN 6 THEN c.tenant END AS name,
       c.messages, c.ready, c.scheduled, c.waiting, c.blocked, c.oldest, c.messages AS estimated
  FROM counted AS c
