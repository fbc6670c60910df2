-- Does:  Compare every partition with the one that pillarbox would create.
-- Takes: nothing
-- Gives: parent_table, partition, schema and a name to put it aside by, control (the column), is_default, starts_at, ends_at, ahead, owner, wanted_owner, five faults
-- Index: none
SELECT p.parent_table, x.partition::text AS partition, quote_ident(n.nspname) AS schema,
       quote_ident(o.relname || '_aside') AS aside, quote_ident(p.control) AS control,
       x.is_default, x.starts_at, x.ends_at,
       x.starts_at > now() AS ahead, x.owner::regrole::text AS owner,
       c.relowner::regrole::text AS wanted_owner,
       x.owner <> c.relowner AS is_foreign,
       x.starts_at <> date_trunc(CASE WHEN x.ends_at - x.starts_at < interval '1 day'
                                 THEN 'hour' ELSE 'day' END, x.starts_at, 'UTC')
           AS is_off,
       -- A day of 23 or 25 hours, from a time zone whose clocks change: the partitions after it are off.
       coalesce(x.ends_at = x.next_starts_at
                AND x.next_starts_at <> date_trunc(CASE WHEN x.next_ends_at - x.next_starts_at < interval '1 day'
                                                   THEN 'hour' ELSE 'day' END, x.next_starts_at, 'UTC'), false)
           AS ends_off,
       -- The four formats of outbox.name_format(); other names aren't judged.
       o.relname ~ '_p\d{4}_?\d\d_?\d\d(_\d{4,6})?$' AND NOT EXISTS (
           SELECT FROM unnest(ARRAY['YYYY_MM_DD', 'YYYY_MM_DD_HH24MI', 'YYYYMMDD',
                                    'YYYYMMDD_HH24MISS']) AS format
            WHERE right(o.relname, length(to_char(now(), format)) + 2)
                = '_p' || to_char(x.starts_at AT TIME ZONE 'UTC', format)) AS is_misnamed,
       x.detach_pending AND x.ends_at >= now() - p.retention AS half_detached
  FROM outbox.partition_policy p JOIN pg_class c ON c.oid = p.parent_table::regclass,
       LATERAL (SELECT q.*, lead(q.starts_at) OVER neighbours AS next_starts_at,
                       lead(q.ends_at) OVER neighbours AS next_ends_at
                  FROM outbox.partitions(p.parent_table) q
                WINDOW neighbours AS (ORDER BY q.starts_at)) AS x
  JOIN pg_class o ON o.oid = x.partition JOIN pg_namespace n ON n.oid = o.relnamespace
 ORDER BY p.parent_table, x.starts_at
