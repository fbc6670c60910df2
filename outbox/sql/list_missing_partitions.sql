-- Does:  List tables that lack partitions that the policy requires.
-- Takes: nothing
-- Gives: parent_table, missing, first, ahead, has_today
-- Index: none
SELECT p.parent_table, count(*), min(p.starts_at), h.ahead, h.has_today
  FROM outbox.upkeep_plan() p JOIN outbox.partition_health h USING (parent_table)
 WHERE p.step = 'make' GROUP BY p.parent_table, h.ahead, h.has_today
