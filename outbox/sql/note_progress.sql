-- Does:  Record the progress of an operation.
-- Takes: id, succeeded, failed, skipped
-- Gives: state
-- Index: operation_pkey
UPDATE outbox.operation
   SET succeeded = %(succeeded)s,
       failed = %(failed)s,
       skipped = %(skipped)s
 WHERE id = %(id)s
RETURNING state
