-- Owner part, repeated at the end of every migration: restore what somebody has changed since.

SET LOCAL ROLE {owner};

DO $restore$
DECLARE
    v record;
BEGIN
    FOR v IN SELECT d.object, d.difference, d.restored_by FROM outbox.schema_differences() d WHERE d.restored_by IS NOT NULL LOOP
        BEGIN
            EXECUTE v.restored_by;
        EXCEPTION WHEN insufficient_privilege OR integrity_constraint_violation THEN
            RAISE WARNING '% %: %', v.object, v.difference, SQLERRM USING HINT = 'what restores it: ' || v.restored_by;
        END;
    END LOOP;
END
$restore$;

RESET ROLE;
