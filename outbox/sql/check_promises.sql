-- Does:  Find what differs from what the migrations made.
-- Takes: migrate (the command)
-- Gives: severity, finding, remedy
-- Index: none; reads the catalog and positions
SELECT CASE WHEN restored_by IS NULL THEN 'warning' ELSE 'error' END, concat_ws(' ', object, difference),
       CASE WHEN starts_with(difference, 'is owned by ') THEN restored_by || ';  -- as a superuser' ELSE %(migrate)s END
  FROM outbox.schema_differences()
 ORDER BY object, difference
