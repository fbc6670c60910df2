-- Administrator part, run in every migration and safe to repeat: ALTER EXTENSION pg_partman UPDATE from 4.x
-- to 5.x drops the grants on its objects. A removal revokes them.

-- Only the extension's own objects: a shared schema, such as public, has other tables, too.
EXECUTE EACH
WITH partman AS (
    SELECT e.oid, n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
     WHERE e.extname = 'pg_partman' AND n.nspname = {partman_name}
)
(SELECT format('{grant} USAGE ON SCHEMA %I {to} {owner}', e.nspname) FROM partman e)
 UNION ALL
(SELECT format(CASE d.classid WHEN 'pg_class'::regclass THEN '{grant} SELECT, INSERT, UPDATE, DELETE ON TABLE %s {to} {owner}'
                              ELSE '{grant} EXECUTE ON ROUTINE %s {to} {owner}' END,
               CASE d.classid WHEN 'pg_class'::regclass THEN d.objid::regclass::text ELSE d.objid::regprocedure::text END)
   FROM partman e JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
   LEFT JOIN pg_class c ON c.oid = d.objid AND d.classid = 'pg_class'::regclass
  WHERE d.deptype = 'e' AND (c.relkind IN ('r', 'p', 'v') OR d.classid = 'pg_proc'::regclass)
  ORDER BY 1);
