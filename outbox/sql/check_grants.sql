-- Does:  Find privileges that the migrations granted and that were revoked, that PUBLIC has, or that the role of a reader lacks.
-- Takes: owner, reader_role, relay_role, partman (its schema), migrate (the command)
-- Gives: severity, finding, remedy
-- Index: none
-- Missing roles and objects are left out: other checks find them.
SELECT 'error', format('%%s lacks privileges on %%s', r.rolname, string_agg(DISTINCT p.relation, ', ' ORDER BY p.relation)), %(migrate)s::text
  FROM outbox.promise p
  JOIN pg_roles r ON r.rolname = substring(p.fact FROM '^right of (\S+) to ')
 WHERE NOT EXISTS (SELECT FROM outbox.rights() f WHERE (f.relation, f.fact) = (p.relation, p.fact))
   AND (EXISTS (SELECT FROM pg_class c WHERE c.oid::regclass::text = p.relation)
        OR EXISTS (SELECT FROM pg_proc f WHERE f.oid::regprocedure::text = p.relation) OR p.relation IN ('outbox', 'inbox'))
 GROUP BY r.rolname
 UNION ALL
SELECT 'warning', format('any role may run %%s', f.oid::regprocedure), format('REVOKE ALL ON ROUTINE %%s FROM PUBLIC;', f.oid::regprocedure)
  FROM pg_proc f JOIN pg_namespace n ON n.oid = f.pronamespace
 WHERE n.nspname IN ('outbox', 'inbox') AND f.prorettype <> 'trigger'::regtype
   AND (f.prosecdef OR f.provolatile = 'v' AND f.proparallel = 'u')
   AND has_function_privilege('public', f.oid, 'EXECUTE')
 UNION ALL
SELECT 'warning', CASE WHEN g.oid IS NULL THEN format('the role of reader %%s, %%s, doesn''t exist', d.reader, d.role)
                       ELSE format('the role of reader %%s, %%s, lacks the privileges of %%s', d.reader, d.role, %(reader_role)s::text) END,
       CASE WHEN g.oid IS NULL THEN format('UPDATE outbox.reader SET role = NULL WHERE reader = %%L;  -- or create the role', d.reader)
            ELSE format('GRANT %%I TO %%I;', %(reader_role)s::text, d.role) END
  FROM outbox.reader d LEFT JOIN pg_roles g ON g.rolname = d.role
 WHERE d.role IS NOT NULL
   AND EXISTS (SELECT FROM outbox.subscription s WHERE s.reader = d.reader AND s.ended_at IS NULL)
   AND NOT EXISTS (SELECT FROM pg_roles o WHERE o.rolname IN (%(reader_role)s, %(relay_role)s) AND pg_has_role(g.oid, o.oid, 'MEMBER'))
 UNION ALL
SELECT 'error', format('%%s lacks privileges on pg_partman: no new partitions will be created', %(owner)s::text), %(migrate)s::text
  FROM pg_namespace n JOIN pg_extension e ON e.extname = 'pg_partman'
 WHERE n.nspname = %(partman)s
   AND NOT (has_schema_privilege(%(owner)s::text, n.oid, 'USAGE')
            AND (SELECT bool_and(CASE d.classid WHEN 'pg_proc'::regclass THEN has_function_privilege(%(owner)s::text, d.objid, 'EXECUTE')
                                      ELSE (SELECT bool_and(has_table_privilege(%(owner)s::text, c.oid, p.privilege))
                                              FROM pg_class c CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p (privilege)
                                             WHERE c.oid = d.objid AND c.relkind IN ('r', 'p')) END)
                   FROM pg_depend d
                  WHERE d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND d.deptype = 'e'
                    AND d.classid IN ('pg_proc'::regclass, 'pg_class'::regclass)))
