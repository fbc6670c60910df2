-- Does:  List the partitions past their retention that are still attached, except those of tables that follow others.
-- Takes: nothing
-- Gives: parent_table, partition, starts_at, ends_at, overdue (how long it has been past its retention)
-- Index: none, reads the catalog
SELECT p.parent_table, x.partition::text AS partition, x.starts_at, x.ends_at, now() - p.retention - x.ends_at AS overdue
  FROM outbox.partition_policy AS p
 CROSS JOIN LATERAL outbox.partitions(p.parent_table) AS x
 WHERE p.follows IS NULL AND x.ends_at < now() - p.retention
 ORDER BY x.ends_at, p.parent_table
