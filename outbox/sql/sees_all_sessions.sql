-- Does:  Tell whether this role sees what others do.
-- Takes: nothing
-- Gives: true or false, this role as an identifier
-- Index: none
SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'), quote_ident(current_user)
