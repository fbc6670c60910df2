-- Does:  Find the tables' owner, and whether this role can SET ROLE to it and so detach partitions.
-- Takes: nothing
-- Gives: owner, may_detach
-- Index: none
SELECT pg_catalog.pg_get_userbyid(c.relowner),
       pg_catalog.pg_has_role(current_user, c.relowner, CASE
           WHEN pg_catalog.current_setting('server_version_num')::int >= 160000
           THEN 'SET' ELSE 'MEMBER' END)
  FROM pg_catalog.pg_class c
 WHERE c.oid = 'outbox.message'::regclass
