-- Does:  List tables that lack more partitions than the last one, which the next upkeep is to create.
-- Takes: nothing
-- Gives: parent_table, missing, first, ahead, premake, has_today, follows (if one in the past is missing, which that table has)
-- Index: none
SELECT p.parent_table, count(*), min(p.starts_at), h.ahead, q.premake, h.has_today,
       CASE WHEN min(p.ends_at) <= now() THEN q.follows END
  FROM outbox.upkeep_plan() p JOIN outbox.partition_health h USING (parent_table)
  JOIN outbox.partition_policy q USING (parent_table)
 WHERE p.step = 'make' GROUP BY p.parent_table, h.ahead, q.span, q.premake, h.has_today, q.follows
HAVING count(*) > 1 OR min(p.starts_at) <= now() + (q.premake - 1) * q.span
