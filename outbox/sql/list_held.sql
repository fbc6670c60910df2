-- Does:  List the partitions of a table that are past their retention and held, with what holds them.
-- Takes: table
-- Gives: partition, starts_at, ends_at, unsettled (rows that hold it, counted up to 1,000; null: unknown), reason
-- Index: those of the table's gate
SELECT partition, starts_at, ends_at, unsettled, reason
  FROM outbox.upkeep_plan(%(table)s)
 WHERE step IN ('hold', 'attach') AND unsettled IS DISTINCT FROM 0
 ORDER BY starts_at
