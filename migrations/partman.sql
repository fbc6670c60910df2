-- Administrator part: pg_partman, unless it is installed.

DO $partman$
BEGIN
    CREATE EXTENSION IF NOT EXISTS pg_partman WITH SCHEMA {partman};
EXCEPTION WHEN insufficient_privilege THEN
    RAISE EXCEPTION 'role "%" may not install pg_partman', current_user
        USING HINT = format('let an administrator run: CREATE SCHEMA %I; CREATE EXTENSION pg_partman SCHEMA %I', {partman_name}, {partman_name});
END
$partman$;
