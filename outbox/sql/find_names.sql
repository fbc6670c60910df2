-- Does:  Find the owner of our tables, the prefix of the roles, the schema of the pg_partman that they use, and whether pg_cron is installed.
-- Takes: nothing
-- Gives: owner, role_prefix, schema of pg_partman (null: migrated without it), has_cron
-- Index: none
-- The prefix comes from the maintainer's right to run the upkeep, which outlives a change of owner.
SELECT pg_get_userbyid(c.relowner),
       coalesce((SELECT left(r.rolname, -length('_maintainer'))
                   FROM pg_proc f CROSS JOIN LATERAL aclexplode(f.proacl) AS a JOIN pg_roles r ON r.oid = a.grantee
                  WHERE f.oid = to_regprocedure('outbox.maintain(timestamptz)') AND r.rolname LIKE '%\_maintainer'
                  ORDER BY left(r.rolname, -length('_maintainer')) || '_owner' = pg_get_userbyid(c.relowner) DESC LIMIT 1),
                regexp_replace(pg_get_userbyid(c.relowner), '_owner$', '')),
       CASE WHEN to_regprocedure('outbox.make_with_partman(text, timestamptz[])') IS NOT NULL
            THEN coalesce((SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
                            WHERE e.extname = 'pg_partman'), 'partman') END,
       EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_cron')
  FROM pg_class c WHERE c.oid = to_regclass('outbox.message')
