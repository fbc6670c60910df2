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
        -- The extension's script would call them with the rights of the role that installs it.
        IF v_schema IS NOT NULL AND EXISTS (
            SELECT FROM pg_namespace n
             CROSS JOIN LATERAL (SELECT f.proowner FROM pg_proc f WHERE f.pronamespace = n.oid
                                  UNION SELECT o.oprowner FROM pg_operator o WHERE o.oprnamespace = n.oid) AS each (owner)
              JOIN pg_roles r ON r.oid = each.owner AND NOT r.rolsuper AND r.rolname <> current_user
             WHERE n.nspname = {partman_name})
        THEN
            RAISE EXCEPTION 'the schema for pg_partman contains foreign functions or operators'
                USING HINT = 'drop them, or choose another schema with --partman-schema';
        END IF;
        EXECUTE concat('CREATE EXTENSION ', v_name, v_schema);
    END LOOP;
EXCEPTION WHEN insufficient_privilege THEN
    RAISE EXCEPTION 'role "%" may not install %', current_user, v_name
        USING HINT = format('let an administrator run: %sCREATE EXTENSION %s%s; or add --without-%s',
                            'CREATE' || v_schema || '; ', v_name, v_schema, substr(v_name, 4));
END
$extensions$;
