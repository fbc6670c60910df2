-- Does:  Change the width of a table's future partitions, and replace the empty ones.
-- Takes: parent_table, span, premake
-- Gives: nothing
-- Index: partition_policy_pkey
SELECT outbox.set_interval(%(parent_table)s, %(span)s, %(premake)s)
