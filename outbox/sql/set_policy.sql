-- Does:  Change the policy of a table.
-- Takes: parent_table, retention, premake, minimum, keep_table
-- Gives: nothing
-- Index: partition_policy_pkey
UPDATE outbox.partition_policy
   SET retention = %(retention)s, premake = %(premake)s, minimum = %(minimum)s,
       keep_table = %(keep_table)s
 WHERE parent_table = %(parent_table)s
