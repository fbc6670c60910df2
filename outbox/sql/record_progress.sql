-- Does:  Record the progress of an operation, or how it ended.
-- Takes: id, succeeded, failed, skipped, ended (its last state; null: it is still running), problem
-- Gives: state
-- Index: operation_pkey
UPDATE outbox.operation
   SET succeeded = %(succeeded)s,
       failed = %(failed)s,
       skipped = %(skipped)s,
       state = coalesce(%(ended)s, state),
       problem = %(problem)s,
       finished_at = CASE WHEN CAST(%(ended)s AS text) IS NOT NULL THEN clock_timestamp() END
 WHERE id = %(id)s
RETURNING state
