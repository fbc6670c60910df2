-- Does:  List the partitions that pillarbox would not have created.
-- Takes: nothing
-- Gives: parent_table, partition, why it is listed, remedy
-- Index: none
SELECT p.parent_table, q.partition::text,
       CASE WHEN h.is_half THEN 'it is half detached, so that queries don''t see its rows'
            WHEN q.is_default THEN 'it is a DEFAULT partition, which forbids concurrent detaches'
            WHEN q.owner <> c.relowner THEN format('it belongs to %s, so that the upkeep can''t drop it', q.owner::regrole)
            ELSE format('it holds %s to %s, not whole hours, days or weeks in UTC',
                        coalesce(q.starts_at::text, 'MINVALUE'), coalesce(q.ends_at::text, 'MAXVALUE')) END,
       CASE WHEN h.is_half THEN format('ALTER TABLE %1$s DETACH PARTITION %2$s FINALIZE; ALTER TABLE %1$s ATTACH PARTITION %2$s FOR VALUES FROM (%3$L) TO (%4$L);',
                                        p.parent_table, q.partition, q.starts_at, q.ends_at)
            WHEN q.owner <> c.relowner THEN format('ALTER TABLE %s OWNER TO %s;', q.partition, c.relowner::regrole)
            ELSE format('ALTER TABLE %s DETACH PARTITION %s;  -- then rename it, run pillarbox maintain, and insert its rows into the table',
                        p.parent_table, q.partition) END
  FROM outbox.partition_policy p
  -- Any table may have been given away, but hardly most of them.
  CROSS JOIN (SELECT mode() WITHIN GROUP (ORDER BY t.relowner) FROM pg_class t
               WHERE t.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND t.relkind IN ('r', 'p')) AS c (relowner)
 CROSS JOIN LATERAL outbox.partitions(p.parent_table) q
 CROSS JOIN LATERAL (SELECT CASE WHEN q.ends_at < q.starts_at + interval '1 day' THEN 'hour' ELSE 'day' END) AS u (unit)
 CROSS JOIN LATERAL (SELECT q.detach_pending AND q.ends_at >= now() - p.retention) AS h (is_half)
 WHERE h.is_half OR q.owner <> c.relowner
    OR coalesce(q.starts_at <> date_trunc(u.unit, q.starts_at, 'UTC') OR q.ends_at <> date_trunc(u.unit, q.ends_at, 'UTC'), true)
 ORDER BY p.parent_table, q.starts_at
