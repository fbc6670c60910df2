-- Does:  Find the owner of our tables, the schema of pg_partman, and whether pg_cron is installed.
-- Takes: nothing
-- Gives: owner, schema of pg_partman (null: not installed), has_cron
-- Index: none
SELECT pg_get_userbyid(c.relowner),
       (SELECT n.nspname FROM pg_extension e
          JOIN pg_namespace n ON n.oid = e.extnamespace
         WHERE e.extname = 'pg_partman'),
       EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_cron')
  FROM pg_class c WHERE c.oid = to_regclass('outbox.message')
