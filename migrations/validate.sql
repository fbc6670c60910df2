-- Owner part, run after every migration in its own transaction: validate the constraints that were
-- added without reading existing rows. Doesn't block writers and readers.

DO $validate$
DECLARE
    v_constraint record;
BEGIN
    FOR v_constraint IN
        SELECT c.conrelid::regclass AS on_table, c.conname
          FROM pg_constraint c JOIN pg_class t ON t.oid = c.conrelid
         WHERE t.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
           AND c.contype IN ('c', 'f') AND NOT c.convalidated
         -- Partitions first: then the table itself has nothing left to read.
         ORDER BY t.relispartition DESC, t.relname, c.conname
    LOOP
        BEGIN
            EXECUTE format('ALTER TABLE %s VALIDATE CONSTRAINT %I', v_constraint.on_table, v_constraint.conname);
        EXCEPTION
            WHEN integrity_constraint_violation THEN
                RAISE WARNING 'rows of % violate its constraint %', v_constraint.on_table, v_constraint.conname
                    USING HINT = 'they are kept; correct them, then run pillarbox migrate again';
            WHEN lock_not_available THEN
                RAISE WARNING 'the constraint % of % is not validated yet', v_constraint.conname, v_constraint.on_table
                    USING HINT = 'another session has a lock on the table: run pillarbox migrate again';
        END;
    END LOOP;
END
$validate$;
