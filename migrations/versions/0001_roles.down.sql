-- Administrator part: take back what 0001 made. The extension stays: others may use it.
-- A role that still owns or may touch something elsewhere stays too, with a notice.

DO $grants$
DECLARE
    v_object record;
BEGIN
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
        EXECUTE format(CASE WHEN v_object.is_table THEN 'REVOKE ALL ON TABLE %s FROM {owner}, {monitor}'
                            ELSE 'REVOKE ALL ON ROUTINE %s FROM {owner}' END, v_object.name);
    END LOOP;
END
$grants$;
REVOKE USAGE ON SCHEMA {partman} FROM {owner}, {monitor};
REVOKE ALL ON outbox.alembic_version FROM {monitor};
DROP SCHEMA inbox;
ALTER SCHEMA outbox OWNER TO CURRENT_USER;
REVOKE ALL ON SCHEMA outbox FROM {owner}, {maintainer}, {detacher}, {application}, {relay}, {consumer}, {monitor};

DO $roles$
DECLARE
    v_role text;
BEGIN
    FOREACH v_role IN ARRAY ARRAY[{monitor_name}, {consumer_name}, {relay_name}, {application_name}, {detacher_name}, {maintainer_name}, {owner_name}] LOOP
        BEGIN
            EXECUTE format('DROP ROLE IF EXISTS %I', v_role);
        EXCEPTION WHEN dependent_objects_still_exist OR insufficient_privilege THEN
            RAISE NOTICE 'role "%" stays: %', v_role, SQLERRM;
        END;
    END LOOP;
END
$roles$;
