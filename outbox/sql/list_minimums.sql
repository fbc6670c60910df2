-- Does:  Read which tables need a message's day, and for how long.
-- Takes: nothing
-- Gives: parent_table, minimum, retention
-- Index: partition_policy_pkey
SELECT parent_table, minimum, retention FROM outbox.partition_policy WHERE minimum IS NOT NULL ORDER BY 1
