-- Does:  List tables that are named like pillarbox's partitions, but are neither attached nor recorded.
-- Takes: nothing
-- Gives: parent_table, partition; those of tables that follow another one come first, since that one's rows need theirs
-- Index: none
SELECT s.parent_table, s.partition
  FROM outbox.strays() AS s
  JOIN outbox.partition_policy AS p ON p.parent_table = s.parent_table
 ORDER BY p.follows IS NULL, s.parent_table, s.partition
