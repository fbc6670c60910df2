-- Administrator part, run at the end of every migration and safe to repeat:
-- ALTER EXTENSION pg_partman UPDATE from 4.x to 5.x drops the grants on its objects.

GRANT USAGE ON SCHEMA {partman} TO {owner};
DO $grants$
DECLARE
    v_object record;
BEGIN
    -- Only the extension's own objects: a shared schema, such as public, has other tables, too.
    FOR v_object IN
        SELECT d.classid = 'pg_class'::regclass AS is_table,
               CASE d.classid WHEN 'pg_class'::regclass THEN d.objid::regclass::text
                              ELSE d.objid::regprocedure::text END AS name
          FROM pg_extension e JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
          LEFT JOIN pg_class c ON c.oid = d.objid AND d.classid = 'pg_class'::regclass
         WHERE e.extname = 'pg_partman' AND d.deptype = 'e'
           AND (c.relkind IN ('r', 'p', 'v') OR d.classid = 'pg_proc'::regclass)
         ORDER BY name
    LOOP
        EXECUTE format(CASE WHEN v_object.is_table THEN 'GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE %s TO {owner}'
                            ELSE 'GRANT EXECUTE ON ROUTINE %s TO {owner}' END, v_object.name);
    END LOOP;
END
$grants$;
