-- Does:  Find out where pg_cron runs its jobs.
-- Takes: nothing
-- Gives: whether it is installed here, its database (null: not loaded), this database, whether its database exists, whether jobs connect to their node and port (otherwise background workers run them, or this role can't see it)
-- Index: none
-- A role that may not read the settings assumes this database: pg_cron can't be installed elsewhere.
SELECT to_regclass('cron.job') IS NOT NULL, s.home, current_database(),
       EXISTS (SELECT FROM pg_database d WHERE d.datname = s.home), s.heeds_nodes
  FROM (SELECT CASE WHEN r.sees THEN current_setting('cron.database_name', true) ELSE current_database() END,
               CASE WHEN r.sees THEN coalesce(current_setting('cron.use_background_workers', true) = 'off', false) ELSE false END
          FROM (SELECT pg_has_role(current_user, 'pg_read_all_settings', 'USAGE')) AS r (sees)) AS s (home, heeds_nodes)
