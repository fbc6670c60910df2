-- Owner part, repeated at the end of every migration: restore definitions that were changed since the last one.

DO $restore$
DECLARE
    v record;
BEGIN
    FOR v IN SELECT d.* FROM outbox.schema_differences() d WHERE d.restored_by IS NOT NULL LOOP
        BEGIN
            EXECUTE v.restored_by;
            -- Another version of PostgreSQL may write the same definition differently.
            UPDATE outbox.promise p SET definition = f.definition FROM outbox.schema_facts() f
             WHERE (p.relation, p.fact) = (v.object, v.fact) AND (f.relation, f.fact) = (v.object, v.fact);
        EXCEPTION WHEN insufficient_privilege OR integrity_constraint_violation THEN
            RAISE WARNING '% %: %', v.object, v.difference, SQLERRM USING HINT = 'restore it with: ' || v.restored_by;
        END;
    END LOOP;
END
$restore$;
