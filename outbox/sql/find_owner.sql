-- Does:  Find the tables' owner, and whether this role can SET ROLE to it and so detach partitions; and the time.
-- Takes: nothing
-- Gives: owner, may_detach, now
-- Index: none
SELECT pg_catalog.pg_get_userbyid(c.relowner),
       pg_catalog.pg_has_role(current_user, c.relowner, CASE
           WHEN pg_catalog.current_setting('server_version_num')::int >= 160000
           THEN 'SET' ELSE 'MEMBER' END),
       pg_catalog.clock_timestamp()
  FROM pg_catalog.pg_class c
 WHERE c.oid = 'outbox.message'::regclass
