-- Administrator part: take back what 0001 made. The extension stays: others may use it.
-- A role that still owns or may touch something elsewhere stays too, with a notice.

REVOKE ALL ON ALL TABLES IN SCHEMA {partman} FROM {owner}, {monitor};
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {partman} FROM {owner};
REVOKE ALL ON ALL PROCEDURES IN SCHEMA {partman} FROM {owner};
REVOKE ALL ON SCHEMA {partman} FROM {owner}, {monitor};
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
