-- Does:  Find the low-water marks of tables: earlier days were dropped or never existed.
-- Takes: tables
-- Gives: parent_table, begins_at (null: it has no partition)
-- Index: none, reads pg_inherits
SELECT p.parent_table,
       (SELECT min(q.starts_at) FROM outbox.partitions(p.parent_table) AS q) AS begins_at
  FROM outbox.partition_policy AS p
 WHERE p.parent_table = ANY (%(tables)s::text[])
 ORDER BY p.parent_table
