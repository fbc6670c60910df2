-- Does:  List the steps that the upkeep would take now, and why.
-- Takes: nothing
-- Gives: step, parent_table, partition, starts_at, ends_at, unsettled, reason, statement
-- Index: none
SELECT step, parent_table, partition, starts_at, ends_at, unsettled, reason, statement
  FROM outbox.upkeep_plan()
