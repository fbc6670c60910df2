-- Does:  End an operation with its final counts.
-- Takes: id, worker, state, succeeded, failed, skipped, reached, problem
-- Gives: nothing
-- Index: operation_pkey
UPDATE outbox.operation
   SET state = %(state)s,
       succeeded = %(succeeded)s,
       failed = %(failed)s,
       skipped = %(skipped)s,
       reached = %(reached)s,
       problem = %(problem)s,
       lease_until = NULL,
       finished_at = clock_timestamp()
 WHERE id = %(id)s
   AND worker = %(worker)s
   AND finished_at IS NULL
