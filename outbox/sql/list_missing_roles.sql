-- Does:  List which of the given roles don't exist.
-- Takes: roles
-- Gives: role
-- Index: none
SELECT wanted FROM unnest(%(roles)s::text[]) AS wanted
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = wanted)
