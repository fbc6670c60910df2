-- Does:  List gaps between future partitions that the upkeep can't fill: parts of a day or week.
-- Takes: nothing
-- Gives: parent_table, starts_at, ends_at
-- Index: none
SELECT p.parent_table, x.before AS starts_at, x.starts_at AS ends_at
  FROM outbox.partition_policy p,
       LATERAL (SELECT q.starts_at, lag(q.ends_at) OVER (ORDER BY q.starts_at) AS before
                  FROM outbox.partitions(p.parent_table) q) AS x
 WHERE x.before < x.starts_at
   AND x.starts_at > now()
   AND x.before < now() + p.premake * p.span
   AND NOT EXISTS (SELECT FROM outbox.missing_partitions(p.parent_table) m
                    WHERE m.starts_at < x.starts_at AND m.ends_at > x.before)
 ORDER BY p.parent_table, x.starts_at
