-- Does:  Tell whether this role sees what others do.
-- Takes: nothing
-- Gives: true or false
-- Index: none
SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')
