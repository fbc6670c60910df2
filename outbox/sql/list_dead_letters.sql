-- Does:  List dead letters, newest first, without the columns that the monitor may not read.
-- Takes: as select_dead_letters.sql; before_at and before_id (null: from the newest), max_rows (null: all)
-- Gives: the columns of pillarbox.outbox.dead_letters.letter.Summary
-- Index: as select_dead_letters.sql
SELECT id, created_at, updated_at, status, retry_count, retry_after, origin, message_id,
       topic, key, tenant, attempts, error_reason, discard_reason, discarded_by
  FROM (
{selected}
       ) AS selected
 WHERE CAST(%(before_id)s AS uuid) IS NULL
    OR (created_at, id) < (CAST(%(before_at)s AS timestamptz), CAST(%(before_id)s AS uuid))
 ORDER BY created_at DESC, id DESC
 LIMIT CAST(%(max_rows)s AS bigint)
