-- Does:  List the days of outbox.message that lack the index by tenant, oldest first.
-- Takes: nothing
-- Gives: schema, day, index (the name that it is to get), is_valid (of an index with that name; null: there is none)
-- Index: none; reads the catalog
SELECT n.nspname, c.relname, i.name,
       (SELECT x.indisvalid FROM pg_index AS x WHERE x.indexrelid = to_regclass(format('%I.%I', n.nspname, i.name)))
  FROM outbox.partitions('outbox.message') AS p
  JOIN pg_class AS c ON c.oid = p.partition
  JOIN pg_namespace AS n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL (SELECT c.relname || '_tenant_idx') AS i (name)
 WHERE NOT p.detach_pending
   AND NOT EXISTS (
       SELECT FROM pg_inherits AS h
         JOIN pg_index AS x ON x.indexrelid = h.inhrelid
        WHERE h.inhparent = to_regclass('outbox.message_tenant_idx')
          AND x.indrelid = c.oid
   )
 ORDER BY p.starts_at
