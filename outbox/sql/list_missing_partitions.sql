-- Does:  List tables that lack partitions that the policy requires, or that the table they follow has.
-- Takes: nothing
-- Gives: parent_table, missing, first, ahead, has_today, follows (if one in the past is missing, which that table has)
-- Index: none
SELECT p.parent_table, count(*), min(p.starts_at), h.ahead, h.has_today,
       CASE WHEN min(p.ends_at) <= now() THEN q.follows END
  FROM outbox.upkeep_plan() p JOIN outbox.partition_health h USING (parent_table)
  JOIN outbox.partition_policy q USING (parent_table)
 WHERE p.step = 'make' GROUP BY p.parent_table, h.ahead, h.has_today, q.follows
