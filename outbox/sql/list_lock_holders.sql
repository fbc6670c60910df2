-- Does:  List the sessions that hold a lane or the member lock of a lock class, or wait for the latter; doubles as the heartbeat.
-- Takes: class (int4 of the lock), lanes, member (its object that every member holds in shared mode), settlements (a table; a role that may insert into it, or become our role, is trusted)
-- Gives: pid, ours (this session), role, application, client (null: unknown), trusted, lanes, is_member, excludes (it keeps members out)
-- Index: none, reads pg_locks and pg_stat_activity
SELECT l.pid, l.pid = pg_catalog.pg_backend_pid() AS ours,
       a.usename::text AS role, a.application_name AS application, a.client_addr::text AS client,
       -- A NOINHERIT role has to SET ROLE first.
       has_any_column_privilege(a.usesysid, %(settlements)s::text, 'INSERT')
       OR pg_has_role(a.usesysid, current_user, 'MEMBER') AS trusted,
       coalesce(array_agg(l.objid::bigint::integer) FILTER (WHERE l.granted AND l.objid::bigint = ANY (%(lanes)s::bigint[])), '{}') AS lanes,
       bool_or(l.objid = %(member)s::int::oid AND l.mode = 'ShareLock' AND l.granted) AS is_member,
       -- A session that is only waiting for it keeps them out, too.
       bool_or(l.objid = %(member)s::int::oid AND l.mode = 'ExclusiveLock') AS excludes
  FROM pg_catalog.pg_locks AS l
  JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   AND l.locktype = 'advisory'
   -- pg_locks shows both halves of the key as oid, which is unsigned.
   AND l.classid = (%(class)s::bigint & 4294967295)::oid
   AND l.objsubid = 2
   AND (l.objid::bigint = ANY (%(lanes)s::bigint[]) OR l.objid = %(member)s::int::oid)
 GROUP BY l.pid, a.usename, a.application_name, a.client_addr, a.usesysid
