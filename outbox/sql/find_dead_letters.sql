-- Does:  Find dead letters in the order in which to retry them, oldest first.
-- Takes: as select_dead_letters.sql; after_at and after_id (null: from the oldest), max_rows (null: all)
-- Gives: id, created_at
-- Index: as select_dead_letters.sql
SELECT id, created_at
  FROM (
{selected}
       ) AS selected
 WHERE CAST(%(after_id)s AS uuid) IS NULL
    OR (created_at, id) > (CAST(%(after_at)s AS timestamptz), CAST(%(after_id)s AS uuid))
 ORDER BY created_at, id
 LIMIT CAST(%(max_rows)s AS bigint)
