-- Does:  Finalize, drop or attach again what was detached from each table.
-- Takes: nothing
-- Gives: partition (null: none was looked at), outcome, problem (to be reported)
-- Index: none
SELECT f.partition, f.outcome, f.problem
  FROM outbox.partition_policy p, outbox.finish_detached(p.parent_table) f
