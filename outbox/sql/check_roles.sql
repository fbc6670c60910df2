-- Does:  Find roles that don't exist or can't do their work.
-- Takes: roles, owner (of the tables), owner_role, maintainer_role, detacher_role, migrate (the command)
-- Gives: severity, finding, remedy
-- Index: none
WITH role AS (
    SELECT w.name, r.oid, r.rolcanlogin FROM unnest(%(roles)s::text[]) AS w (name) LEFT JOIN pg_roles r ON r.rolname = w.name
)
SELECT 'error',
       format('the tables belong to %%s, not to %%s: REASSIGN OWNED or ALTER … OWNER changed the owner, so the upkeep and pillarbox migrate fail',
              %(owner)s::text, %(owner_role)s::text),
       -- All objects of pillarbox, but no others that the role owns; in one line. By oid: a name could end the string or the body.
       coalesce(replace(replace(regexp_replace($give_back$DO $$ DECLARE it text; BEGIN FOR it IN
       SELECT format('SCHEMA %%I', n.nspname) FROM pg_namespace n WHERE n.nspname IN ('outbox', 'inbox') AND n.nspowner = {owner}
       UNION ALL SELECT format('TABLE %%I.%%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
       WHERE n.nspname IN ('outbox', 'inbox') AND c.relowner = {owner} AND c.relkind IN ('r', 'p', 'v', 'S')
       AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.classid = 'pg_class'::regclass
       AND d.refclassid = 'pg_class'::regclass AND c.relkind = 'S' AND d.deptype IN ('a', 'i'))
       UNION ALL SELECT format('ROUTINE %%s', p.oid::regprocedure) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
       WHERE n.nspname IN ('outbox', 'inbox') AND p.proowner = {owner}
       LOOP EXECUTE format('ALTER %%s OWNER TO %%s', it, '{wanted}'::regrole); END LOOP; END $$;$give_back$, '[[:space:]]+', ' ', 'g'), '{owner}', (SELECT r.oid::text FROM pg_roles r WHERE r.rolname = %(owner)s)),
               '{wanted}', (SELECT oid::text FROM role WHERE name = %(owner_role)s)), %(migrate)s)
 WHERE %(owner)s::text <> %(owner_role)s::text
 UNION ALL
SELECT 'error', format('the role %%s doesn''t exist', name), %(migrate)s::text FROM role WHERE oid IS NULL
 UNION ALL
SELECT 'error', format('%%s may not log in, but pg_cron only runs jobs of roles that may', name), format('ALTER ROLE %%I LOGIN;', name)
  FROM role WHERE name IN (%(maintainer_role)s, %(detacher_role)s) AND NOT rolcanlogin
 UNION ALL
SELECT 'warning', format('%%s may log in, and could then change and drop everything', name), format('ALTER ROLE %%I NOLOGIN;', name)
  FROM role WHERE name = %(owner_role)s AND rolcanlogin
 UNION ALL
SELECT 'error', format('%%s lacks the privileges of %%s: it can''t detach partitions', d.name, o.name), format('GRANT %%I TO %%I;', o.name, d.name)
  FROM role d JOIN role o ON o.name = %(owner_role)s WHERE d.name = %(detacher_role)s AND NOT pg_has_role(d.oid, o.oid, 'USAGE')
