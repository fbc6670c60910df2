-- Does:  Find partitions that pillarbox would not have created, and more missing ones than the last, which the next upkeep is to create.
-- Takes: nothing
-- Gives: severity, finding, remedy
-- Index: none
SELECT 'error', format('unexpected partition %%s of %%s: %%s', q.partition, p.parent_table, w.what), w.remedy
  FROM outbox.partition_policy p
  -- One table may have another owner, but hardly most of them.
  CROSS JOIN (SELECT mode() WITHIN GROUP (ORDER BY t.relowner) FROM pg_class t
               WHERE t.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND t.relkind IN ('r', 'p')) AS c (relowner)
 CROSS JOIN LATERAL outbox.partitions(p.parent_table) q
 CROSS JOIN LATERAL (
       SELECT 'its detach was interrupted, so queries don''t see its rows',
              format('ALTER TABLE %%1$s DETACH PARTITION %%2$s FINALIZE; ALTER TABLE %%1$s ATTACH PARTITION %%2$s FOR VALUES FROM (%%3$L) TO (%%4$L);',
                     p.parent_table, q.partition, q.starts_at, q.ends_at)
        WHERE q.detach_pending AND q.ends_at >= now() - p.retention
        UNION ALL
       SELECT format('it belongs to %%s, so the upkeep can''t drop it', q.owner::regrole), format('ALTER TABLE %%s OWNER TO %%s;', q.partition, c.relowner::regrole)
        WHERE q.owner <> c.relowner
        UNION ALL
       SELECT CASE WHEN q.is_default THEN 'it is a DEFAULT partition, which forbids concurrent detaches'
                   ELSE format('it covers %%s to %%s, not whole hours, days or weeks in UTC',
                               coalesce(q.starts_at::text, 'MINVALUE'), coalesce(q.ends_at::text, 'MAXVALUE')) END,
              format('ALTER TABLE %%s DETACH PARTITION %%s;  -- then rename it, run pillarbox maintain, and insert its rows into the table', p.parent_table, q.partition)
         FROM (VALUES (CASE WHEN q.ends_at < q.starts_at + interval '1 day' THEN 'hour' ELSE 'day' END)) AS u (unit)
        WHERE coalesce(q.starts_at <> date_trunc(u.unit, q.starts_at, 'UTC') OR q.ends_at <> date_trunc(u.unit, q.ends_at, 'UTC'), true)
       ) AS w (what, remedy)
 UNION ALL
(SELECT CASE WHEN (min(p.ends_at) <= now() AND q.follows IS NOT NULL) OR NOT h.has_today
                  -- A premake of 3 leaves 2 from midnight to the next upkeep.
                  OR h.ahead < least(3, q.premake - 1) THEN 'error' ELSE 'warning' END,
       format('%%s lacks %%s partition%%s, from %%s on%%s%%s', q.parent_table, count(*), CASE WHEN count(*) > 1 THEN 's' END, to_char(min(p.starts_at), 'YYYY-MM-DD'),
              CASE WHEN NOT h.has_today THEN ', and today''s is among them: rows are refused' END,
              CASE WHEN min(p.ends_at) <= now() AND q.follows IS NOT NULL THEN format(': rows that %%s has there can''t be settled', q.follows) END),
       format('SELECT outbox.make_partitions(%%L);', q.parent_table)
  FROM outbox.partition_policy q
 CROSS JOIN LATERAL outbox.missing_partitions(q.parent_table) p
 CROSS JOIN LATERAL (SELECT h.ahead, h.has_today FROM outbox.partition_health h WHERE h.parent_table = q.parent_table OFFSET 0) h
 WHERE to_regclass(q.parent_table) IS NOT NULL
 GROUP BY q.parent_table, h.ahead, q.span, q.premake, h.has_today, q.follows
HAVING count(*) > 1 OR min(p.starts_at) <= now() + (q.premake - 1) * q.span)
