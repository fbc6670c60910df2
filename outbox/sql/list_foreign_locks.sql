-- Does:  List sessions that hold or wait for pillarbox's advisory locks, but whose role isn't a member of pillarbox's roles.
-- Takes: class (int4 of the outbox's locks), classes (int4 of all of pillarbox's locks), outbox_bell, inbox_bell (the doorbells' objects), roles
-- Gives: pid, role, application, client (null: unknown), locks (how many, without doorbells), rings (holds a doorbell), muffles (holds a doorbell in shared mode, and has written nothing)
-- Index: none, reads pg_locks
WITH of_upkeep AS (
    SELECT pg_catalog.hashtextextended(pg_catalog.format('%%s %%s.%%s', step.name, n.nspname, c.relname), 0) AS key
      FROM pg_catalog.pg_class AS c
      JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
     CROSS JOIN (VALUES ('outbox.make_partitions'), ('outbox.finish_detached')) AS step (name)
     WHERE c.relkind = 'p' AND n.nspname IN ('outbox', 'inbox')
), held AS (
    SELECT l.pid,
           CASE WHEN l.locktype = 'relation' THEN NULL
                WHEN l.classid = (%(class)s::bigint & 4294967295)::oid AND l.objid = %(outbox_bell)s::int::oid THEN 'outbox'
                WHEN l.classid = (%(class)s::bigint & 4294967295)::oid AND l.objid = %(inbox_bell)s::int::oid THEN 'inbox'
           END AS bell,
           l.locktype = 'advisory' AS is_ours,
           l.mode = 'ExclusiveLock' AS excludes,
           l.mode = 'ShareLock' AND l.granted AS shares,
           n.nspname AS writes
      FROM pg_catalog.pg_locks AS l
      LEFT JOIN (pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace)
        ON l.locktype = 'relation' AND c.oid = l.relation
     WHERE l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
       AND (l.locktype = 'advisory'
            AND l.objsubid = 2
            -- pg_locks shows both halves of the key as oid, which is unsigned.
            AND l.classid IN (SELECT (class::bigint & 4294967295)::oid FROM unnest(%(classes)s::int[]) AS ours (class))
            -- The upkeep's locks of each partitioned table.
            OR l.locktype = 'advisory'
            AND l.objsubid = 1
            AND (l.classid::bigint, l.objid::bigint) IN (SELECT k.key >> 32 & 4294967295, k.key & 4294967295 FROM of_upkeep AS k)
            -- A writer also holds a doorbell in shared mode, along with the table's lock, until its transaction ends.
            -- Both in one scan, since pg_locks may change in between.
            OR l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
            AND (n.nspname, c.relname) IN (('outbox', 'message'), ('inbox', 'delivery')))
), judged AS (
    SELECT pid,
           -- In shared mode, too: whoever needs it takes it exclusively. Only doorbells are for everybody.
           count(*) FILTER (WHERE is_ours AND bell IS NULL)::integer AS locks,
           coalesce(bool_or(excludes AND bell IS NOT NULL), false) AS rings,
           coalesce(bool_or(shares AND bell = 'outbox') AND NOT coalesce(bool_or(writes = 'outbox'), false), false)
           OR coalesce(bool_or(shares AND bell = 'inbox') AND NOT coalesce(bool_or(writes = 'inbox'), false), false) AS muffles
      FROM held
     GROUP BY pid
)
SELECT a.pid, a.usename::text AS role, a.application_name AS application, a.client_addr::text AS client,
       j.locks, j.rings, j.muffles
  FROM judged AS j
  JOIN pg_catalog.pg_stat_activity AS a ON a.pid = j.pid
 WHERE (j.locks > 0 OR j.rings OR j.muffles)
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles AS r
                    WHERE r.rolname = ANY (%(roles)s::text[]) AND pg_has_role(a.usename, r.oid, 'MEMBER'))
 ORDER BY a.pid
