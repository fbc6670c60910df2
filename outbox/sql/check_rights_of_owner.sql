-- Does:  Tell whether the owner may use pg_partman.
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
          FROM pg_proc p WHERE p.pronamespace = n.oid)
  FROM pg_namespace n WHERE n.nspname = %(partman)s
