-- Does:  Count messages that wait after their first claim, by reader, priority, topic and tenant.
-- Takes: entries of the log (readers, ids, moments, lanes, causes, dues: arrays of one length), first and last (moments)
-- Gives: as count_uncovered.sql, and waiting (refused, to be tried again), blocked
-- Index: message_pkey of the partitions from first to last
WITH deferred AS MATERIALIZED (
    SELECT e.reader, e.lane, m.topic, m.tenant, e.cause, e.due_at, greatest(e.created_at, e.due_at) AS waits_since,
           e.due_at <= now() AS is_due
      FROM unnest(%(readers)s::text[], %(ids)s::uuid[], %(moments)s::timestamptz[], %(lanes)s::smallint[],
                  %(causes)s::text[], %(dues)s::timestamptz[]) AS e (reader, id, created_at, lane, cause, due_at)
     CROSS JOIN LATERAL (
           SELECT q.topic, q.tenant
             FROM outbox.message AS q
            WHERE q.id = e.id AND q.created_at = e.created_at AND q.created_at BETWEEN %(first)s AND %(last)s
            LIMIT 1
           ) AS m
)
SELECT d.reader, (ARRAY['realtime', 'default', 'bulk'])[d.lane / 16 + 1] AS priority, d.topic, d.tenant,
       count(*) AS messages,
       count(*) FILTER (WHERE d.cause NOT IN ('refused', 'postponed', 'blocked') AND d.is_due) AS ready,
       count(*) FILTER (WHERE d.cause NOT IN ('refused', 'postponed', 'blocked') AND NOT d.is_due) AS scheduled,
       count(*) FILTER (WHERE d.cause IN ('refused', 'postponed')) AS waiting,
       count(*) FILTER (WHERE d.cause = 'blocked') AS blocked,
       min(d.waits_since) FILTER (WHERE d.is_due) AS oldest,
       count(*) AS estimated
  FROM deferred AS d
 GROUP BY d.reader, d.lane / 16, d.topic, d.tenant
