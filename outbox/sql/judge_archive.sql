-- Does:  Check whether a function can archive partitions.
-- Takes: archive (its name)
-- Gives: problem with the remedy (null: it can)
-- Index: none
SELECT a.problem FROM outbox.archive_problem(%(archive)s) a
