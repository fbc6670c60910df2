-- Does:  List transactions that were prepared an hour ago or longer.
-- Takes: nothing
-- Gives: gid, the same as a string literal, prepared
-- Index: none
SELECT gid, quote_literal(gid), prepared FROM pg_prepared_xacts
 WHERE database = current_database() AND prepared < now() - interval '1 hour'
