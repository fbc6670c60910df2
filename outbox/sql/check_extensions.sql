-- Does:  Find a pg_partman that is missing or too old.
-- Takes: migrate (the command), partman (its schema; null: migrated without it)
-- Gives: severity, finding, remedy
-- Index: none
SELECT 'error', f.finding, f.remedy
  FROM (SELECT (SELECT e.extversion FROM pg_extension e WHERE e.extname = 'pg_partman')) AS v (installed)
 CROSS JOIN LATERAL (
       VALUES (v.installed IS NULL, 'pg_partman is not installed: the upkeep creates no partitions',
               format('%%1$s  # or, to run without it: %%1$s --without-partman', %(migrate)s::text)),
              (regexp_match(v.installed, '^(\d+)\.(\d+)')::int[] < '{4,7}', format('pg_partman %%s is older than 4.7', v.installed),
               'ALTER EXTENSION pg_partman UPDATE;  -- then: ' || %(migrate)s::text)
       ) AS f (is_so, finding, remedy)
 WHERE f.is_so AND %(partman)s::text IS NOT NULL
