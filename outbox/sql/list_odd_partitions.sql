-- Does:  List the partitions that pillarbox would not have created, and those that are half detached.
-- Takes: nothing
-- Gives: parent_table, partition, what is wrong, half_detached (otherwise it is not ours), starts_at, ends_at, wanted_owner (null: the owner is right)
-- Index: none
SELECT x.parent_table, x.partition::text,
       CASE WHEN x.half_detached THEN 'it is half detached, but not expired: queries don''t see it'
            WHEN x.owner <> x.wanted_owner THEN format('it belongs to %s, so that the upkeep can''t drop it', x.owner)
            WHEN x.is_default THEN 'it is a DEFAULT partition, which forbids concurrent detaches, and keeps the days of its rows from being created'
            WHEN x.odd_bounds THEN format('it holds %s to %s, not whole hours, days or weeks in UTC', coalesce(x.starts_at::text, 'MINVALUE'), coalesce(x.ends_at::text, 'MAXVALUE'))
            ELSE format('it begins at %s, but its name is that of another time', x.starts_at) END,
       x.half_detached, x.starts_at, x.ends_at,
       CASE WHEN x.owner <> x.wanted_owner THEN x.wanted_owner::text END
  FROM (SELECT p.parent_table, q.partition, q.starts_at, q.ends_at, q.is_default, q.owner::regrole, c.relowner::regrole AS wanted_owner,
               q.detach_pending AND q.ends_at >= now() - p.retention AS half_detached,
               coalesce(q.starts_at <> date_trunc(u.unit, q.starts_at, 'UTC') OR q.ends_at <> date_trunc(u.unit, q.ends_at, 'UTC'), true) AS odd_bounds,
               -- Other names harm nothing.
               n.digits <> left(to_char(q.starts_at AT TIME ZONE 'UTC', 'YYYYMMDDHH24MISS'), length(n.digits)) AS odd_name
          FROM outbox.partition_policy p
          JOIN pg_class c ON c.oid = to_regclass(p.parent_table)
         CROSS JOIN LATERAL outbox.partitions(p.parent_table) q
         CROSS JOIN LATERAL (SELECT CASE WHEN q.ends_at < q.starts_at + interval '1 day' THEN 'hour' ELSE 'day' END) AS u (unit)
         CROSS JOIN LATERAL (SELECT translate(substring(q.partition::text FROM '_p(\d{4}_?\d\d_?\d\d(?:_\d{4,6})?)$'), '_', '')) AS n (digits)) AS x
 WHERE x.half_detached OR x.odd_bounds OR x.odd_name OR x.owner <> x.wanted_owner
 ORDER BY x.parent_table, x.starts_at
