-- Does:  List the readers of the outbox, each of which has its own lock class.
-- Takes: nothing
-- Gives: reader
-- Index: none
SELECT reader FROM outbox.reader ORDER BY reader
