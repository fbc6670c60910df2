-- Does:  List the tables that have no models: partitions, tables of extensions, pg_partman's templates.
-- Takes: nothing
-- Gives: schema, table
-- Index: none
SELECT n.nspname, c.relname
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
   AND (c.relispartition
        OR EXISTS (SELECT FROM pg_catalog.pg_depend d
                    WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid
                      AND d.objid = c.oid AND d.deptype = 'e')
        OR (pg_catalog.starts_with(c.relname::text, 'template_')
            AND c.relnamespace = (SELECT e.extnamespace FROM pg_catalog.pg_extension e
                                   WHERE e.extname = 'pg_partman')))
