-- Does:  Read what pg_partman knows of our tables.
-- Takes: partman (its schema)
-- Gives: parent_table, forgotten, retention, is_automatic (and the policy says no)
-- Index: none
SELECT p.parent_table, c.parent_table IS NULL, c.retention,
       c.automatic_maintenance = 'on' AND NOT p.automatic
  FROM outbox.partition_policy p
  LEFT JOIN {partman}.part_config c USING (parent_table)
 ORDER BY 1
