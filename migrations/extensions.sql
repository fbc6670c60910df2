-- Administrator part: the extensions, unless they are installed.

DO $extensions$
DECLARE
    v_name text;
    v_schema text;
BEGIN
    FOR v_name, v_schema IN
        SELECT w.name, ' SCHEMA ' || quote_ident(w.schema)
          FROM (VALUES ('pg_partman', {partman_name}, {partman_name} IS NOT NULL), ('pg_cron', NULL, {with_cron})) AS w (name, schema, is_wanted)
         WHERE w.is_wanted AND NOT EXISTS (SELECT FROM pg_extension e WHERE e.extname = w.name)
    LOOP
        EXECUTE concat('CREATE EXTENSION ', v_name, v_schema);
    END LOOP;
EXCEPTION WHEN insufficient_privilege THEN
    RAISE EXCEPTION 'role "%" may not install %', current_user, v_name
        USING HINT = format('let an administrator run: %sCREATE EXTENSION %s%s; or add --without-%s',
                            'CREATE' || v_schema || '; ', v_name, v_schema, substr(v_name, 4));
END
$extensions$;
