-- Does:  Lease the dead letters that the schedule should retry now: until the lease ends they are not due. Skips those that another session has locked.
-- Takes: origin (null: any), max_retries, max_rows, lease (seconds)
-- Gives: id, created_at, the longest overdue first
-- Index: dead_letter_retry_idx and dead_letter_pkey
WITH due AS MATERIALIZED (
    SELECT id, created_at, retry_after
      FROM {schema}.dead_letter
     WHERE status = 'PENDING'
       AND retry_after <= now()
       AND retry_count < CAST(%(max_retries)s AS integer)
       AND (CAST(%(origin)s AS text) IS NULL OR origin = CAST(%(origin)s AS text))
     ORDER BY retry_after
     LIMIT CAST(%(max_rows)s AS bigint)
       FOR UPDATE SKIP LOCKED
), leased AS (
    UPDATE {schema}.dead_letter
       SET retry_after = clock_timestamp() + make_interval(secs => CAST(%(lease)s AS float8))
     WHERE id = ANY (ARRAY (SELECT id FROM due))
       AND created_at = ANY (ARRAY (SELECT created_at FROM due))
)
SELECT id, created_at FROM due ORDER BY retry_after
