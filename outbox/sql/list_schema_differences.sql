-- Does:  List what differs from what the migrations made.
-- Takes: nothing
-- Gives: object, difference, the statement that restores it (null: a constraint is to be validated)
-- Index: none; reads the catalog and positions
SELECT object, difference, restored_by FROM outbox.schema_differences() ORDER BY object, difference
