-- Does:  Ask the process that carries out an operation to stop it.
-- Takes: id, person
-- Gives: nothing
-- Index: operation_pkey
UPDATE outbox.operation
   SET state = 'stopping', stopped_by = %(person)s
 WHERE id = %(id)s
   AND state = 'running'
   AND kind IN ('retry', 'discard')
