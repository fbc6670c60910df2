-- Does:  Record the progress of an operation, and renew its lease.
-- Takes: id, worker, succeeded, failed, skipped, reached, problem, lease
-- Gives: state; no row if another process has it
-- Index: operation_pkey
UPDATE outbox.operation
   SET succeeded = %(succeeded)s,
       failed = %(failed)s,
       skipped = %(skipped)s,
       reached = %(reached)s,
       problem = %(problem)s,
       lease_until = clock_timestamp() + %(lease)s
 WHERE id = %(id)s
   AND worker = %(worker)s
   AND finished_at IS NULL
RETURNING state
