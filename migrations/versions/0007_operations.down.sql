-- Owner part: drops the record of the operations that people started on the page,
-- and the limits of timestamps.

SET LOCAL ROLE {owner};
DROP FUNCTION outbox.trim_operations();
DROP TABLE outbox.operation;

DO $moments$
DECLARE
    v_table regclass;
BEGIN
    -- Read first: two of the tables that it reads are changed, too.
    FOREACH v_table IN ARRAY ARRAY(
        SELECT n.conrelid::regclass FROM pg_constraint n JOIN pg_class c ON c.oid = n.conrelid
         WHERE n.conname = 'moments_finite' AND NOT c.relispartition
           AND n.connamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
           -- Detached partitions, which somebody may use, keep theirs.
           AND NOT EXISTS (SELECT FROM outbox.retiring_partition r WHERE to_regclass(r.partition) = c.oid)
           AND NOT EXISTS (SELECT FROM outbox.kept_partition k WHERE to_regclass(k.partition) = c.oid))
    LOOP
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT moments_finite', v_table);
    END LOOP;
END
$moments$;
RESET ROLE;
