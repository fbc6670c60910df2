-- Does:  List settings of pg_partman that were changed by hand, except for those of list_configuration.sql.
-- Takes: nothing
-- Gives: parent_table, setting, found, wanted
-- Index: none
SELECT p.parent_table, c.setting, coalesce(c.found, 'null'), coalesce(c.wanted, 'null')
  FROM outbox.partition_policy p, outbox.changed_settings(p.parent_table) c
 WHERE c.by_hand AND c.setting NOT IN ('retention', 'automatic_maintenance')
 ORDER BY 1, 2
