-- Does:  List tables that look like our partitions, but are neither attached nor recorded.
-- Takes: nothing
-- Gives: parent_table, partition, starts_at, ends_at
-- Index: none
-- The bounds come from the CHECK that DETACH … CONCURRENTLY leaves, or else from the name: a partition
-- that begins on a Monday may be a week, if no other one begins in that week. In the past, bounds that
-- are too wide do no harm, but a partition can't be attached with bounds that are too narrow.
WITH relations AS MATERIALIZED (
    SELECT p.parent_table, p.control, p.span, c.oid, c.relispartition,
           to_regclass(p.parent_table) AS parent,
           regexp_match(c.relname,
               '_p([12]\d{3})_?(0[1-9]|1[0-2])_?(0[1-9]|[12]\d|3[01])(?:_([01]\d|2[0-3])([0-5]\d)(?:[0-5]\d)?)?$') AS moment
      FROM outbox.partition_policy p
      JOIN pg_class o ON o.oid = to_regclass(p.parent_table)
      JOIN pg_class c ON c.relnamespace = o.relnamespace AND c.relkind = 'r'
       AND starts_with(c.relname::text, o.relname || '_p')
), named AS MATERIALIZED (
    SELECT r.*, r.moment[4] IS NOT NULL AS is_hour,
           make_timestamptz(r.moment[1]::int, r.moment[2]::int, 1, coalesce(r.moment[4], '0')::int,
                            coalesce(r.moment[5], '0')::int, 0, 'UTC')
               + (r.moment[3]::int - 1) * interval '24 hours' AS begins_at
      FROM relations r WHERE r.moment IS NOT NULL
)
SELECT n.parent_table, n.oid::regclass::text AS partition,
       coalesce(k.bounds[1]::timestamptz, n.begins_at),
       coalesce(k.bounds[2]::timestamptz,
           n.begins_at + CASE
               WHEN n.is_hour THEN interval '1 hour'
               WHEN extract(isodow FROM n.begins_at AT TIME ZONE 'UTC') = 1
                AND (n.span = interval '7 days' OR n.begins_at < now() - interval '168 hours')
                AND NOT EXISTS (
                   SELECT FROM named o
                    WHERE o.parent = n.parent AND o.begins_at > n.begins_at
                      AND o.begins_at < n.begins_at + interval '168 hours')
               THEN interval '168 hours'
               ELSE interval '24 hours' END)
  FROM named n
  LEFT JOIN LATERAL (
       SELECT regexp_match(pg_get_constraintdef(q.oid),
                  format('\(%s >= ''([^'']+)''.*\(%s < ''([^'']+)''', n.control, n.control)) AS bounds
         FROM pg_constraint q WHERE q.conrelid = n.oid AND q.contype = 'c'
        ORDER BY 1 NULLS LAST LIMIT 1
       ) AS k ON true
 WHERE NOT n.relispartition
   AND NOT EXISTS (SELECT FROM outbox.retiring_partition r WHERE to_regclass(r.partition) = n.oid)
   AND NOT EXISTS (SELECT FROM outbox.kept_partition k WHERE to_regclass(k.partition) = n.oid)
   AND NOT EXISTS (
       SELECT FROM pg_attribute a
        WHERE a.attrelid = n.parent AND a.attnum > 0 AND NOT a.attisdropped
          AND NOT EXISTS (SELECT FROM pg_attribute b
                           WHERE b.attrelid = n.oid AND b.attname = a.attname
                             AND b.atttypid = a.atttypid AND NOT b.attisdropped))
 ORDER BY n.parent_table, 3
