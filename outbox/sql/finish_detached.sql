-- Does:  Finalize detaches, and drop detached partitions or attach them again, for each table.
-- Takes: nothing
-- Gives: partition (null: none was checked), outcome, problem to report
-- Index: none
SELECT f.partition, f.outcome, f.problem
  -- Leaders first: a follower's partition can be dropped once its leader's is.
  FROM (SELECT q.parent_table FROM outbox.partition_policy q ORDER BY q.follows NULLS FIRST, q.parent_table) p,
       outbox.finish_detached(p.parent_table) f
