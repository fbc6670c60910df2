-- Does:  Undo an operation that has not started, or stop a running one.
-- Takes: id, person
-- Gives: state; no row if it has ended
-- Index: operation_pkey
UPDATE outbox.operation
   SET state = CASE state WHEN 'waiting' THEN 'undone' ELSE 'stopping' END,
       finished_at = CASE state WHEN 'waiting' THEN clock_timestamp() END,
       ended_by = %(person)s
 WHERE id = %(id)s
   AND finished_at IS NULL
RETURNING state
