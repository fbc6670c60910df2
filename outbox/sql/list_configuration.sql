-- Does:  Read pg_partman's configuration of pillarbox's tables.
-- Takes: partman (its schema)
-- Gives: parent_table, forgotten, retention, is_automatic (although the policy disables it)
-- Index: none
SELECT p.parent_table, c.parent_table IS NULL, c.retention,
       c.automatic_maintenance = 'on' AND NOT p.automatic
  FROM outbox.partition_policy p
  LEFT JOIN {partman}.part_config c USING (parent_table)
 ORDER BY 1
