-- Does:  Add up the bytes of each table's partitions, with their indexes.
-- Takes: nothing
-- Gives: parent_table, bytes
-- Index: none, reads the catalog and the size of each file
SELECT p.parent_table, coalesce(sum(pg_total_relation_size(i.inhrelid)), 0)::bigint
  FROM outbox.partition_policy AS p
  LEFT JOIN pg_catalog.pg_inherits AS i ON i.inhparent = to_regclass(p.parent_table)
 GROUP BY p.parent_table
