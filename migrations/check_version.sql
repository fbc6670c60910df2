-- For both parts: SQL that was printed for one version must not run on another.

DO $version$
DECLARE
    v_version text;
BEGIN
    IF to_regclass('outbox.alembic_version') IS NULL THEN
        RAISE EXCEPTION 'database % has no pillarbox schema', current_database()
            USING HINT = 'print the SQL without --from';
    END IF;
    SELECT version_num INTO v_version FROM outbox.alembic_version;
    IF v_version IS DISTINCT FROM '{from_version}' THEN
        RAISE EXCEPTION 'this SQL updates version %, but the schema has version %', '{from_version}', v_version
            USING HINT = format('print it with --from %s', v_version);
    END IF;
END
$version$;
