-- Does:  End an operation with its final counts.
-- Takes: id, state, succeeded, failed, skipped, problem
-- Gives: nothing
-- Index: operation_pkey
UPDATE outbox.operation
   SET state = %(state)s,
       succeeded = %(succeeded)s,
       failed = %(failed)s,
       skipped = %(skipped)s,
       problem = %(problem)s,
       finished_at = clock_timestamp()
 WHERE id = %(id)s
