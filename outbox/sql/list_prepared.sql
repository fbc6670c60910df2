-- Does:  List transactions that were prepared an hour ago or longer.
-- Takes: nothing
-- Gives: gid, prepared
-- Index: none
SELECT gid, prepared FROM pg_prepared_xacts
 WHERE database = current_database() AND prepared < now() - interval '1 hour'
