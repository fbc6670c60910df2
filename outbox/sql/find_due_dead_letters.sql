-- Does:  Find the dead letters that the schedule should retry now, the longest overdue first.
-- Takes: origin (null: any), max_retries, max_rows
-- Gives: id, created_at
-- Index: dead_letter_retry_idx
SELECT id, created_at
  FROM {schema}.dead_letter
 WHERE status = 'PENDING'
   AND retry_after <= now()
   AND retry_count < CAST(%(max_retries)s AS integer)
   AND (CAST(%(origin)s AS text) IS NULL OR origin = CAST(%(origin)s AS text))
 ORDER BY retry_after
 LIMIT CAST(%(max_rows)s AS bigint)
