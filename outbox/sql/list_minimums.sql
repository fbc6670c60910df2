-- Does:  List the tables that need the partition of a message's time, and for how long.
-- Takes: nothing
-- Gives: parent_table, minimum and retention in seconds, whatever the IntervalStyle
-- Index: partition_policy_pkey
SELECT parent_table, CAST(extract(epoch FROM minimum) AS float8),
       CAST(extract(epoch FROM retention) AS float8)
  FROM outbox.partition_policy WHERE minimum IS NOT NULL ORDER BY 1
