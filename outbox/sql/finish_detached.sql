-- Does:  Finalize detaches, and drop detached partitions or attach them again, for each table.
-- Takes: nothing
-- Gives: partition (null: none was checked), outcome, problem to report
-- Index: none
SELECT f.partition, f.outcome, f.problem
  FROM outbox.partition_policy p, outbox.finish_detached(p.parent_table) f
