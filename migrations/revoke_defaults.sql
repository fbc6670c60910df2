-- Administrator part, safe to repeat: default privileges of the role that migrates may let others create
-- objects in the new schemas, or triggers on the new tables, whose code would run as that role.

EXECUTE EACH
WITH defaults AS (
    SELECT a.grantee, a.privilege_type FROM pg_default_acl d CROSS JOIN LATERAL aclexplode(d.defaclacl) AS a
     WHERE d.defaclrole = (SELECT oid FROM pg_roles WHERE rolname = current_user) AND a.grantee <> d.defaclrole
), created AS (
    SELECT format('CREATE ON SCHEMA %I', n.nspname) AS what, 'CREATE' AS privilege, n.nspacl AS acl FROM pg_namespace n
     WHERE n.nspname IN ('outbox', 'inbox', {partman_name})
     UNION ALL
    SELECT format('TRIGGER ON %s', c.oid::regclass), 'TRIGGER', c.relacl FROM pg_class c
     WHERE c.oid = to_regclass('outbox.alembic_version')
        OR c.oid IN (SELECT d.objid FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_partman'
                      WHERE {partman_name} IS NOT NULL AND d.refclassid = 'pg_extension'::regclass AND d.classid = 'pg_class'::regclass)
)
SELECT DISTINCT format('REVOKE %s FROM %s', c.what, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
  FROM created c CROSS JOIN LATERAL aclexplode(c.acl) AS a
  JOIN defaults d ON d.grantee = a.grantee AND d.privilege_type = a.privilege_type
 WHERE a.privilege_type = c.privilege;
