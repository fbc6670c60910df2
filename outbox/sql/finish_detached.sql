-- Does:  Finalize, drop or attach again what was detached from each table.
-- Takes: nothing
-- Gives: partition, outcome
-- Index: none
SELECT f.partition, f.outcome
  FROM outbox.partition_policy p, outbox.finish_detached(p.parent_table) f
