-- Does:  Find out whether the launcher of pg_cron runs, unless this server is a standby, which has the jobs of its primary but no launcher.
-- Takes: nothing
-- Gives: severity, finding, remedy
-- Index: none
SELECT 'error',
       concat('the pg_cron launcher isn''t running, so no job of this server runs',
              CASE WHEN n.orphans > 0 THEN format(': %%s jobs belong to roles that no longer exist', n.orphans) END),
       'DELETE FROM cron.job WHERE username NOT IN (SELECT rolname FROM pg_roles);  -- if it still isn''t running, restart the server, and read its log'
  -- Only pg_monitor sees the backend_type; every role sees the application_name.
  FROM (SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_cron launcher' OR application_name = 'pg_cron scheduler'),
               (SELECT count(*) FROM cron.job WHERE username NOT IN (SELECT rolname FROM pg_roles))) AS n (launchers, orphans)
 WHERE (n.orphans > 0 OR n.launchers = 0) AND NOT pg_is_in_recovery()
