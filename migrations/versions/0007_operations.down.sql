-- Owner part: drops the record of the operations that people started on the page,
-- and the limits of timestamps.

SET LOCAL ROLE {owner};
DROP FUNCTION outbox.trim_operations();
DROP TABLE outbox.operation;

DO $moments$
DECLARE
    v_table regclass;
BEGIN
    FOR v_table IN
        SELECT n.conrelid FROM pg_constraint n JOIN pg_class c ON c.oid = n.conrelid
         WHERE n.conname = 'moments_finite' AND NOT c.relispartition
           AND n.connamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
    LOOP
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT moments_finite', v_table);
    END LOOP;
END
$moments$;
RESET ROLE;
