-- Does:  List tables that look like pillarbox's partitions, but are neither attached nor recorded.
-- Takes: nothing
-- Gives: parent_table, partition, starts_at, ends_at, follows; partitions that other rows need come first
-- Index: none
SELECT s.parent_table, s.partition::text, s.starts_at, s.ends_at, p.follows
  FROM outbox.strays() AS s
  JOIN outbox.partition_policy AS p ON p.parent_table = s.parent_table
 ORDER BY p.follows IS NULL, s.parent_table, s.starts_at
