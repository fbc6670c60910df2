-- Administrator part: the prerequisites, checked before anything is created. Needs a superuser, or
-- CREATEROLE with CREATE on the database and pg_partman installed by the provider.

DO $check$
DECLARE
    v_major int := current_setting('server_version_num')::int / 10000;
    v_schema text;
    v_role text;
    v_installed text := (SELECT extversion FROM pg_extension WHERE extname = 'pg_partman');
    v_available text;
    -- Compared as numbers: 4.10 is newer than 4.7.
    v_number text := '^(\d+)\.(\d+)';
    v_oldest int[] := '{4,7}';
BEGIN
    IF v_major < 14 THEN
        RAISE EXCEPTION 'PostgreSQL % is too old: leases need idle_session_timeout', v_major
            USING HINT = 'upgrade the server to 14 or newer';
    END IF;
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION 'database "%" has the encoding %: topics and keys are UTF-8',
            current_database(), current_setting('server_encoding')
            USING HINT = 'use a database created with ENCODING ''UTF8''';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'pg_partman') THEN
        RAISE EXCEPTION 'extension pg_partman is not on this server'
            USING HINT = format('install it, on Debian: apt install postgresql-%s-partman', v_major);
    END IF;
    SELECT default_version INTO v_available FROM pg_available_extensions WHERE name = 'pg_partman';
    IF regexp_match(v_available, v_number)::int[] < v_oldest THEN
        RAISE EXCEPTION 'the pg_partman of this server, %, is older than 4.7', v_available
            USING HINT = format('install a newer package, on Debian: apt install postgresql-%s-partman', v_major)
                || CASE WHEN v_installed IS NULL THEN '' ELSE '; then run ALTER EXTENSION pg_partman UPDATE' END;
    END IF;
    IF regexp_match(v_installed, v_number)::int[] < v_oldest THEN
        RAISE EXCEPTION 'pg_partman % is installed in database "%", which is older than 4.7', v_installed, current_database()
            USING HINT = 'ALTER EXTENSION pg_partman UPDATE';
    END IF;
    SELECT n.nspname INTO v_schema
      FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
     WHERE e.extname = 'pg_partman';
    IF v_schema <> {partman_name} THEN
        RAISE EXCEPTION 'pg_partman is installed in the schema "%", not in "%"', v_schema, {partman_name}
            USING HINT = format('run pillarbox migrate --partman-schema %s', v_schema);
    END IF;
    IF NOT has_database_privilege(current_database(), 'CREATE') THEN
        RAISE EXCEPTION 'role "%" may not create schemas in database "%"', current_user, current_database()
            USING HINT = format('GRANT CREATE ON DATABASE %I TO %I, or migrate as the database''s owner', current_database(), current_user);
    END IF;
    FOREACH v_role IN ARRAY ARRAY[{owner_name}, {maintainer_name}, {detacher_name}, {application_name}, {relay_name}, {consumer_name}, {monitor_name}, {web_name}] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_role)
           AND NOT EXISTS (SELECT FROM pg_roles WHERE rolname = current_user AND (rolsuper OR rolcreaterole)) THEN
            RAISE EXCEPTION 'role "%" does not exist and "%" may not create roles', v_role, current_user
                USING HINT = 'let an administrator run the administrator part of: pillarbox migrate --sql';
        END IF;
    END LOOP;
END
$check$;
