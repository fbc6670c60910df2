-- Does:  Find out where pg_cron runs its jobs.
-- Takes: nothing
-- Gives: the fields of pillarbox.outbox.administration.checks.upkeep.CronHome; heeds_nodes is false as well if this role can't see it
-- Index: none
-- A role that may not read the settings assumes this database: pg_cron can't be installed elsewhere.
SELECT i.installed AND coalesce(s.home = current_database(), false),
       i.installed AND s.home IS NOT NULL AND NOT EXISTS (SELECT FROM pg_database d WHERE d.datname = s.home),
       s.home, current_database(), s.heeds_nodes
  FROM (SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_cron')) AS i (installed)
 CROSS JOIN (SELECT CASE WHEN r.sees THEN current_setting('cron.database_name', true) ELSE current_database() END,
                    CASE WHEN r.sees THEN coalesce(current_setting('cron.use_background_workers', true) = 'off', false) ELSE false END
               FROM (SELECT pg_has_role(current_user, 'pg_read_all_settings', 'USAGE')) AS r (sees)) AS s (home, heeds_nodes)
