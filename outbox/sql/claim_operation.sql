-- Does:  Claim the operation that has been due longest, or one whose process is gone, and lease it.
-- Takes: worker, lease
-- Gives: id; no row if none is due
-- Index: operation_open_idx
UPDATE outbox.operation
   SET state = CASE state WHEN 'waiting' THEN 'running' ELSE state END,
       worker = %(worker)s,
       lease_until = clock_timestamp() + %(lease)s,
       started_at = coalesce(started_at, clock_timestamp())
 WHERE id = (SELECT id
               FROM outbox.operation
              WHERE finished_at IS NULL
                AND starts_at <= clock_timestamp()
                AND (lease_until IS NULL OR lease_until < clock_timestamp())
              ORDER BY starts_at
              LIMIT 1
                FOR UPDATE SKIP LOCKED)
RETURNING id
