-- Does:  Find the owner of our tables, and where pg_partman lives.
-- Takes: nothing
-- Gives: owner, schema of pg_partman (null: not installed)
-- Index: none
SELECT pg_get_userbyid(c.relowner),
       (SELECT n.nspname FROM pg_extension e
          JOIN pg_namespace n ON n.oid = e.extnamespace
         WHERE e.extname = 'pg_partman')
  FROM pg_class c WHERE c.oid = to_regclass('outbox.message')
