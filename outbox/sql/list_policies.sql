-- Does:  Read the policy of every table.
-- Takes: nothing
-- Gives: parent_table, span, retention, premake, minimum, keep_table, follows
-- Index: partition_policy_pkey
SELECT parent_table, span, retention, premake, minimum, keep_table, follows
  FROM outbox.partition_policy ORDER BY coalesce(follows, parent_table), follows NULLS FIRST, parent_table
