-- Does:  List objects, triggers and rights with which an untrusted role could run its code as the role that migrates or reads the schemas.
-- Takes: nothing; filled in: names of roles, partman
-- Gives: finding, remedy, whether even reading may run its code
-- Index: none
WITH trusted AS (
    SELECT r.oid FROM pg_roles r
     WHERE r.rolsuper OR r.rolname IN (current_user, {owner_name})
        -- On a managed service, no superuser but its administrators own extensions. Elsewhere, pg_partman 5
        -- belongs to the role that first installed it.
        OR (r.rolcreaterole OR NOT r.rolcanlogin)
       AND r.oid IN (SELECT e.extowner FROM pg_extension e WHERE e.extname = 'pg_partman')
), strangers AS MATERIALIZED (
    SELECT r.oid, quote_ident(r.rolname) AS name FROM pg_roles r
     WHERE NOT EXISTS (
           -- pg_database_owner stands for the owner of this database.
           SELECT FROM trusted t
            WHERE pg_has_role(CASE r.rolname WHEN 'pg_database_owner'
                              THEN (SELECT d.datdba FROM pg_database d WHERE d.datname = current_database())
                              ELSE r.oid END, t.oid, 'MEMBER'))
     UNION ALL SELECT 0, 'PUBLIC'
), schemas AS (
    SELECT n.* FROM pg_namespace n WHERE n.nspname IN ('outbox', 'inbox', {partman_name})
), tables AS MATERIALIZED (
    SELECT c.*, n.nspname FROM pg_class c JOIN schemas n ON n.oid = c.relnamespace
     WHERE n.nspname IN ('outbox', 'inbox')
        -- Others may have tables beside pg_partman's.
        OR EXISTS (SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_partman'
                    WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e')
), theirs AS MATERIALIZED (
    SELECT o.classid, o.objid, o.refobjid, s.name FROM pg_shdepend o JOIN strangers s ON s.oid = o.refobjid
     WHERE o.objsubid = 0 AND o.deptype = 'o'
       AND o.dbid = (SELECT b.oid FROM pg_database b WHERE b.datname = current_database())
), objects AS (
    SELECT 'pg_namespace'::regclass AS class, n.oid, n.nspowner AS owner FROM schemas n
     UNION ALL
    SELECT 'pg_class'::regclass, c.oid, c.relowner FROM tables c JOIN schemas n ON n.oid = c.relnamespace
     -- A view runs nothing until it is read. Only the owner can attach a partition.
     WHERE NOT c.relispartition AND c.relowner <> n.nspowner
       AND (c.relkind IN ('r', 'p', 'f') OR c.relkind IN ('v', 'm') AND c.relname = 'alembic_version')
     UNION ALL
    SELECT d.classid, d.objid, o.refobjid
      FROM pg_depend d
      JOIN schemas n ON d.refclassid = 'pg_namespace'::regclass AND d.refobjid = n.oid
      JOIN theirs o ON o.classid = d.classid AND o.objid = d.objid
     WHERE d.classid <> 'pg_class'::regclass AND o.refobjid <> n.nspowner
), ours AS (
    SELECT c.oid, c.relkind FROM tables c
     WHERE (c.relkind IN ('r', 'p') OR c.relname = 'alembic_version') AND c.relowner NOT IN (SELECT s.oid FROM strangers s)
), code AS MATERIALIZED (
    -- Tables with their columns' types, and what runs with them: triggers, rules, defaults, conditions, indexes, policies.
    SELECT 'pg_class'::regclass AS class, c.oid FROM ours c WHERE c.relkind IN ('r', 'p')
     UNION
    SELECT d.classid, d.objid FROM ours c
      JOIN pg_depend d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid AND d.deptype IN ('a', 'i')
     UNION
    -- Only administrators create event triggers, but those may run anybody's function.
    SELECT 'pg_event_trigger'::regclass, e.oid FROM pg_event_trigger e JOIN pg_proc p ON p.oid = e.evtfoid
     WHERE e.evtenabled <> 'D' AND p.proowner <> e.evtowner
)
SELECT format('the %s %s belongs to %s, which pillarbox has no reason to trust', i.type, i.identity, s.name) AS finding,
       format('DROP %1$s %2$s, or ALTER %1$s %2$s OWNER TO a superuser or the role that migrates', upper(i.type), i.identity) AS remedy,
       true AS runs_when_read
  FROM objects o JOIN strangers s ON s.oid = o.owner
 CROSS JOIN LATERAL pg_identify_object(o.class, o.oid, 0) AS i
 UNION ALL
SELECT format('%s may create objects in the schema %I', s.name, n.nspname), format('REVOKE CREATE ON SCHEMA %I FROM %s', n.nspname, s.name), false
  FROM schemas n CROSS JOIN LATERAL aclexplode(n.nspacl) AS a JOIN strangers s ON s.oid = a.grantee
 WHERE a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner
 UNION ALL
SELECT format('%s may create triggers on %s tables, such as %s', s.name, count(*), min(c.oid::regclass::text)),
       format('REVOKE TRIGGER ON %s FROM %s', CASE WHEN c.nspname IN ('outbox', 'inbox') THEN 'ALL TABLES IN SCHEMA ' || c.nspname
                                                   ELSE string_agg(c.oid::regclass::text, ', ') END, s.name), false
  FROM tables c CROSS JOIN LATERAL aclexplode(c.relacl) AS a JOIN strangers s ON s.oid = a.grantee
 WHERE a.privilege_type = 'TRIGGER' AND a.grantee <> c.relowner
 GROUP BY c.nspname, s.name
 UNION ALL
SELECT format('the %s %s uses the %s %s of %s', i.type, i.identity, f.type, f.identity, o.name),
       format('drop the %s %s', i.type, i.identity), c.class = 'pg_rewrite'::regclass
  FROM theirs o JOIN pg_depend d ON d.refclassid = o.classid AND d.refobjid = o.objid AND d.deptype = 'n'
  JOIN code c ON c.class = d.classid AND c.oid = d.objid
 CROSS JOIN LATERAL pg_identify_object(c.class, c.oid, d.objsubid) AS i
 CROSS JOIN LATERAL pg_identify_object(d.refclassid, d.refobjid, 0) AS f
 UNION ALL
-- Roles belong to the server: before there is a schema, they may be anybody's.
SELECT format('the role %I may log in, and everything will belong to it', r.rolname), format('ALTER ROLE %I NOLOGIN', r.rolname), false
  FROM pg_roles r WHERE r.rolname = {owner_name} AND r.rolcanlogin AND to_regclass('outbox.message') IS NULL
 UNION ALL
SELECT format('%I may grant the role %I to anybody', m.rolname, r.rolname),
       format('REVOKE ADMIN OPTION FOR %I FROM %I, or choose another --role-prefix', r.rolname, m.rolname), false
  FROM pg_auth_members a JOIN pg_roles r ON r.oid = a.roleid JOIN pg_roles m ON m.oid = a.member
 WHERE a.admin_option AND r.rolname IN ({owner_name}, {maintainer_name}, {detacher_name}) AND to_regclass('outbox.message') IS NULL
   AND NOT EXISTS (SELECT FROM pg_roles t WHERE (t.rolsuper OR t.rolname = current_user) AND pg_has_role(m.oid, t.oid, 'MEMBER'))
 ORDER BY 3 DESC, 1
