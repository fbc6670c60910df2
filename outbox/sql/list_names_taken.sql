-- Does:  List tables that have the name of a missing partition.
-- Takes: nothing
-- Gives: parent_table, table, an unused name for it, whether it is a partition of the table
-- Index: none
SELECT p.parent_table, c.oid::regclass::text, quote_ident(c.relname || '_aside'),
       EXISTS (SELECT FROM pg_inherits i
                WHERE i.inhrelid = c.oid AND i.inhparent = p.parent_table::regclass)
  FROM outbox.partition_policy p,
       LATERAL outbox.missing_partitions(p.parent_table) m,
       LATERAL to_regclass(p.parent_table || '_p' || to_char(m.starts_at AT TIME ZONE 'UTC',
           outbox.name_format(p.parent_table, p.span))) AS taken
  JOIN pg_class c ON c.oid = taken
 ORDER BY 1, 2
