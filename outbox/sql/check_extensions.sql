-- Does:  Find a pg_partman that is missing, too old, or older than its package.
-- Takes: migrate (the command), partman (its schema; null: migrated without it)
-- Gives: severity, finding, remedy
-- Index: none
SELECT f.severity, f.finding, f.remedy
  FROM (SELECT (SELECT e.extversion FROM pg_extension e WHERE e.extname = 'pg_partman'),
               (SELECT a.default_version FROM pg_available_extensions a WHERE a.name = 'pg_partman')) AS v (installed, available)
 CROSS JOIN LATERAL (SELECT regexp_match(v.installed, '^(\d+)\.(\d+)')::int[] < '{4,7}') AS o (is_old)
 CROSS JOIN LATERAL (
       VALUES (v.installed IS NULL, 'error', 'pg_partman is not installed: the upkeep creates no partitions',
               format('%%1$s  # or, to do without it: %%1$s --without-partman', %(migrate)s::text)),
              (o.is_old, 'error', format('pg_partman %%s is older than 4.7', v.installed), 'ALTER EXTENSION pg_partman UPDATE;  -- then: ' || %(migrate)s::text),
              (v.installed <> v.available AND NOT o.is_old, 'warning',
               format('pg_partman %%s is installed, but the server''s package is %%s', v.installed, v.available),
               format('ALTER EXTENSION pg_partman UPDATE;  -- then: %%s, because the update from 4 to 5 drops privileges', %(migrate)s::text))
       ) AS f (is_so, severity, finding, remedy)
 WHERE f.is_so AND %(partman)s::text IS NOT NULL
