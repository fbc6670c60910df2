-- Does:  Compare every partition with how we make them.
-- Takes: nothing
-- Gives: parent_table, partition, is_default, starts_at, ends_at, ahead, owner, wanted_owner, three faults
-- Index: none
SELECT p.parent_table, x.partition::text, x.is_default, x.starts_at, x.ends_at,
       x.starts_at > now() AS ahead, x.owner::regrole::text, c.relowner::regrole::text,
       x.owner <> c.relowner AS is_foreign,
       x.starts_at <> date_trunc(CASE WHEN x.ends_at - x.starts_at < interval '1 day'
                                 THEN 'hour' ELSE 'day' END, x.starts_at, 'UTC')
           AS is_off,
       x.detach_pending AND x.ends_at >= now() - p.retention AS half_detached
  FROM outbox.partition_policy p JOIN pg_class c ON c.oid = p.parent_table::regclass,
       outbox.partitions(p.parent_table) x
 ORDER BY p.parent_table, x.starts_at
