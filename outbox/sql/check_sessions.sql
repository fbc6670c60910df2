-- Does:  Report if this role can't see how long transactions have been open.
-- Takes: nothing
-- Gives: severity, finding, remedy
-- Index: none
SELECT 'unknown', 'this role can''t see how long transactions of others have been open', format('GRANT pg_monitor TO %%I;', current_user)
 WHERE NOT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')
