-- Does:  Find the low-water marks of tables: earlier days were dropped or never existed.
-- Takes: tables, at (a moment; null: none)
-- Gives: parent_table, begins_at (null: it has no partition), detached (the detached table with the rows of that moment, if any)
-- Index: none, reads pg_inherits
SELECT p.parent_table,
       (SELECT min(q.starts_at) FROM outbox.partitions(p.parent_table) AS q) AS begins_at,
       (SELECT min(b.partition)
          FROM (SELECT k.partition, k.starts_at, k.ends_at FROM outbox.kept_partition AS k WHERE k.parent_table = p.parent_table
                 UNION ALL
                SELECT r.partition, r.starts_at, r.ends_at FROM outbox.retiring_partition AS r WHERE r.parent_table = p.parent_table
               ) AS b
         WHERE to_regclass(b.partition) IS NOT NULL
           AND NOT EXISTS (SELECT FROM pg_catalog.pg_inherits AS i WHERE i.inhrelid = to_regclass(b.partition))
           AND %(at)s::timestamptz >= b.starts_at AND %(at)s::timestamptz < b.ends_at) AS detached
  FROM outbox.partition_policy AS p
 WHERE p.parent_table = ANY (%(tables)s::text[])
 ORDER BY p.parent_table
