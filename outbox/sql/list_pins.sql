-- Does:  List sessions, prepared transactions, replication slots and standbys that keep old snapshots or transaction ids in use.
-- Takes: at_least (an interval: how long a session's transaction has been open, if this role can see that), xids (how many transactions one of unknown age lies behind)
-- Gives: kind, name, pid, role, state, open_for (null: unknown), is_writing (has a transaction id), xid (the oldest one that it needs), xids (how many transactions it lies behind), slot (the kind of a slot, its database, and the WAL that it keeps)
-- Index: none, reads pg_stat_activity, pg_prepared_xacts and pg_replication_slots
SELECT 'session' AS kind, a.application_name AS name, a.pid, a.usename::text AS role, a.state,
       now() - a.xact_start AS open_for, a.backend_xid IS NOT NULL AS is_writing,
       (CASE WHEN age(a.backend_xid) > age(a.backend_xmin) OR a.backend_xmin IS NULL THEN a.backend_xid ELSE a.backend_xmin END)::text AS xid,
       greatest(age(a.backend_xid), age(a.backend_xmin)) AS xids, NULL AS slot
  FROM pg_catalog.pg_stat_activity AS a
 WHERE a.datname = pg_catalog.current_database() AND a.pid <> pg_catalog.pg_backend_pid()
   AND (a.backend_type = 'client backend' OR a.backend_type IS NULL)
   AND (a.xact_start < now() - %(at_least)s::interval
        OR a.xact_start IS NULL AND greatest(age(a.backend_xid), age(a.backend_xmin)) > %(xids)s)
 UNION ALL
SELECT 'prepared transaction', p.gid, NULL, p.owner::text, NULL, now() - p.prepared, true, p.transaction::text, age(p.transaction), NULL
  FROM pg_catalog.pg_prepared_xacts AS p
 WHERE p.database = pg_catalog.current_database() AND p.prepared < now() - %(at_least)s::interval
 UNION ALL
SELECT 'replication slot', s.slot_name::text, s.active_pid, NULL, CASE WHEN s.active THEN 'active' ELSE 'inactive' END, NULL, false,
       coalesce(s.xmin, s.catalog_xmin)::text, age(coalesce(s.xmin, s.catalog_xmin)),
       concat_ws(', ', coalesce('plugin ' || s.plugin, s.slot_type), 'database ' || s.database, 'keeps ' || pg_catalog.pg_size_pretty(pg_catalog.pg_wal_lsn_diff(
           CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_lsn() END, s.restart_lsn)) || ' of WAL')
  FROM pg_catalog.pg_replication_slots AS s
 WHERE NOT s.active OR age(coalesce(s.xmin, s.catalog_xmin)) > %(xids)s
 UNION ALL
SELECT 'standby', r.application_name, r.pid, r.usename::text, r.state, NULL, false, r.backend_xmin::text, age(r.backend_xmin), NULL
  FROM pg_catalog.pg_stat_replication AS r
 WHERE age(r.backend_xmin) > %(xids)s
 ORDER BY open_for DESC NULLS LAST, xids DESC NULLS LAST
