-- Does:  Read the policy of every table.
-- Takes: nothing
-- Gives: parent_table, span, retention, premake, minimum, keep_table, archive
-- Index: partition_policy_pkey
SELECT parent_table, span, retention, premake, minimum, keep_table, archive FROM outbox.partition_policy ORDER BY 1
