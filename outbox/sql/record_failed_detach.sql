-- Does:  Record why pillarbox maintain could not detach a partition.
-- Takes: failure, step, parent_table, partition, state (its SQLSTATE), context
-- Gives: nothing
-- Index: upkeep_failure_pkey
SELECT outbox.note_failure(%(failure)s, %(step)s, %(parent_table)s, %(partition)s, %(state)s, %(context)s)
