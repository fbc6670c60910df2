-- Does:  Check whether the owner has all privileges on pg_partman.
-- Takes: owner, partman (its schema)
-- Gives: true or false
-- Index: none
SELECT has_schema_privilege(%(owner)s, n.oid, 'USAGE')
   AND (SELECT bool_and(has_table_privilege(%(owner)s, c.oid, privilege))
          FROM pg_class c,
               unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
         WHERE c.relnamespace = n.oid
           AND c.relname IN ('part_config', 'part_config_sub'))
   AND (SELECT bool_and(has_function_privilege(%(owner)s, p.oid, 'EXECUTE'))
          FROM pg_extension e
          JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
           AND d.deptype = 'e' AND d.classid = 'pg_proc'::regclass
          JOIN pg_proc p ON p.oid = d.objid
         WHERE e.extname = 'pg_partman')
  FROM pg_namespace n WHERE n.nspname = %(partman)s
