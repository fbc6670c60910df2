-- Administrator part: the prerequisites, checked before anything is created. Needs a superuser, or
-- CREATEROLE with CREATE on the database and the extensions installed by the provider.

DO $check$
DECLARE
    v_major int := current_setting('server_version_num')::int / 10000;
    v_available text;
    v_installed text;
    v_schema text;
    v_database text;
    v_problem text;
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
    IF {partman_name} IS NOT NULL THEN
        SELECT a.default_version, e.extversion, n.nspname INTO v_available, v_installed, v_schema
          FROM pg_available_extensions a
          LEFT JOIN pg_extension e ON e.extname = a.name LEFT JOIN pg_namespace n ON n.oid = e.extnamespace
         WHERE a.name = 'pg_partman';
        -- Compared as numbers: 4.10 is newer than 4.7.
        v_problem := CASE
            WHEN v_available IS NULL THEN format('is missing: install it (Debian: apt install postgresql-%s-partman)', v_major)
            WHEN regexp_match(coalesce(v_installed, v_available), '^(\d+)\.(\d+)')::int[] < '{4,7}'
            THEN format('%s is older than 4.7: install a newer one, and run ALTER EXTENSION pg_partman UPDATE', coalesce(v_installed, v_available))
            WHEN v_schema <> {partman_name} THEN format('is in the schema "%s": add --partman-schema %1$s', v_schema) END;
        IF v_problem IS NOT NULL THEN
            RAISE EXCEPTION 'pg_partman %', v_problem USING HINT = 'nothing was changed; or add --without-partman';
        END IF;
    END IF;
    IF {with_cron} THEN
        v_database := current_setting('cron.database_name', true);
        v_problem := CASE
            WHEN v_database <> current_database() THEN format('runs in database "%s", this is "%s"', v_database, current_database())
            WHEN NOT EXISTS (SELECT FROM pg_available_extensions a WHERE a.name = 'pg_cron')
            THEN format('is missing: install it (Debian: apt install postgresql-%s-cron)', v_major)
            WHEN v_database IS NULL THEN format('is not loaded: set shared_preload_libraries = ''pg_cron'' and cron.database_name = ''%s'', and restart',
                                                current_database()) END;
        IF v_problem IS NOT NULL THEN
            RAISE EXCEPTION 'pg_cron %', v_problem
                USING HINT = 'nothing was changed; or add --without-cron, and run pillarbox maintain every hour';
        END IF;
    END IF;
END
$check$;
