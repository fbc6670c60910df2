-- Does:  List sessions whose transaction has been open for an hour or longer.
-- Takes: nothing
-- Gives: pid, usename, state, since
-- Index: none
SELECT pid, usename, state, now() - xact_start FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend'
   AND xact_start < now() - interval '1 hour'
