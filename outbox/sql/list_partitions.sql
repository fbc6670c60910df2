-- Does:  List the partitions of every table, including those that are detached or kept.
-- Takes: nothing
-- Gives: parent_table, partition, starts_at, ends_at, place, rows (null: never counted), bytes
-- Index: none
SELECT p.parent_table, format('%I.%I', n.nspname, c.relname) AS partition,
       x.starts_at, x.ends_at,
       CASE WHEN x.is_default THEN 'default'
            WHEN x.kept THEN 'kept'
            WHEN x.detached OR x.detach_pending THEN 'detached'
            WHEN x.starts_at > now() THEN 'ahead'
            WHEN x.ends_at > now() THEN 'today'
            ELSE 'past' END AS place,
       CASE WHEN c.reltuples >= 0 THEN c.reltuples::bigint END AS rows,
       pg_total_relation_size(c.oid) AS bytes
  FROM outbox.partition_policy p
 CROSS JOIN LATERAL (
       SELECT q.partition::oid AS oid, q.starts_at, q.ends_at, q.detach_pending,
              q.is_default, false, false
         FROM outbox.partitions(p.parent_table) q
       UNION ALL
       SELECT to_regclass(r.partition)::oid, r.starts_at, r.ends_at, false,
              false, true, r.kept
         FROM (SELECT partition, parent_table, starts_at, ends_at, false FROM outbox.retiring_partition
                UNION ALL
               SELECT partition, parent_table, starts_at, ends_at, true FROM outbox.kept_partition
              ) AS r (partition, parent_table, starts_at, ends_at, kept)
        WHERE r.parent_table = p.parent_table
       ) AS x (oid, starts_at, ends_at, detach_pending, is_default, detached, kept)
  JOIN pg_class c ON c.oid = x.oid AND (c.relispartition OR x.detached)
   AND NOT (c.relispartition AND x.detached)
  JOIN pg_namespace n ON n.oid = c.relnamespace
 ORDER BY p.parent_table, x.starts_at
