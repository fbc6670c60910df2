-- Does:  Read the policy of every table.
-- Takes: nothing
-- Gives: parent_table, span, retention, premake
-- Index: partition_policy_pkey
SELECT parent_table, span, retention, premake FROM outbox.partition_policy ORDER BY 1
