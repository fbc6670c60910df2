-- Does:  Check whether this role sees the sessions of other roles.
-- Takes: nothing
-- Gives: true or false, this role as an identifier
-- Index: none
SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'), quote_ident(current_user)
