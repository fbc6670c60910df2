-- Does:  Change the width of a table's partitions to come; what is empty ahead is replaced.
-- Takes: parent_table, span, premake
-- Gives: nothing
-- Index: partition_policy_pkey
SELECT outbox.set_interval(%(parent_table)s, %(span)s, %(premake)s)
