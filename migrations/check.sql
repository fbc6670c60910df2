-- Administrator part: the prerequisites, checked before anything is created. Needs a superuser, or
-- CREATEROLE with CREATE on the database and the extensions installed by the provider.

DO $check$
DECLARE
    v_major int := current_setting('server_version_num')::int / 10000;
    v_available text;
    v_installed text;
    v_schema text;
    -- Compared as numbers: 4.10 is newer than 4.7.
    v_number text := '^(\d+)\.(\d+)';
    v_oldest int[] := '{4,7}';
    v_database text;
    v_found text;
    v_problem text;
    v_remedy text;
    v_without text;
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
    -- Both extensions in one report, with the two remedies.
    IF {partman_name} IS NOT NULL THEN
        SELECT a.default_version INTO v_available FROM pg_available_extensions a WHERE a.name = 'pg_partman';
        SELECT e.extversion, n.nspname INTO v_installed, v_schema
          FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'pg_partman';
        IF v_available IS NULL OR regexp_match(v_available, v_number)::int[] < v_oldest THEN
            v_problem := CASE WHEN v_available IS NULL THEN 'is missing' ELSE format('%s is older than 4.7', v_available) END;
            v_remedy := format('install pg_partman (Debian: apt install postgresql-%s-partman)', v_major)
                || CASE WHEN v_installed IS NULL THEN '' ELSE ' and run ALTER EXTENSION pg_partman UPDATE' END;
        ELSIF regexp_match(v_installed, v_number)::int[] < v_oldest THEN
            v_problem := format('%s, installed in this database, is older than 4.7', v_installed);
            v_remedy := 'run ALTER EXTENSION pg_partman UPDATE';
        ELSIF v_schema <> {partman_name} THEN
            v_problem := format('is installed in the schema "%s", not in "%s"', v_schema, {partman_name});
            v_remedy := 'add --partman-schema' || CASE WHEN v_schema ~ '^\w+$' THEN ' ' || v_schema ELSE '' END;
        END IF;
        v_found := format(', pg_partman %s', coalesce(v_problem, v_available));
        v_without := CASE WHEN v_problem IS NOT NULL THEN ' --without-partman' END;
    END IF;
    IF {with_cron} THEN
        v_database := current_setting('cron.database_name', true);
        SELECT a.default_version INTO v_available FROM pg_available_extensions a WHERE a.name = 'pg_cron';
        v_problem := CASE
            WHEN v_database <> current_database() THEN format('runs in database "%s", this is "%s"', v_database, current_database())
            WHEN v_available IS NULL THEN 'is missing'
            WHEN v_database IS NULL THEN 'is not loaded by this server' END;
        IF v_problem IS NOT NULL THEN
            v_remedy := concat_ws('; ', v_remedy,
                CASE WHEN v_available IS NULL THEN format('install pg_cron (Debian: apt install postgresql-%s-cron)', v_major) END,
                format('set %scron.database_name = ''%s'' and restart',
                       CASE WHEN v_database IS NULL THEN 'shared_preload_libraries = ''pg_cron'' and ' END, current_database()));
            v_without := concat(v_without, ' --without-cron');
        END IF;
        v_found := format('%s, pg_cron %s', v_found, coalesce(v_problem, v_available));
    END IF;
    IF v_without IS NOT NULL THEN
        RAISE EXCEPTION 'this server lacks extensions that pillarbox uses by default; found PostgreSQL %', current_setting('server_version') || v_found
            USING HINT = format('nothing was changed: either %s; or add%s%s', v_remedy, v_without,
                                CASE WHEN v_without LIKE '%-cron' THEN ', and run pillarbox maintain every hour' END);
    END IF;
    IF NOT has_database_privilege(current_database(), 'CREATE') THEN
        RAISE EXCEPTION 'role "%" may not create schemas in database "%"', current_user, current_database()
            USING HINT = format('GRANT CREATE ON DATABASE %I TO %I, or migrate as the database''s owner', current_database(), current_user);
    END IF;
END
$check$;
