-- Does:  List the operations that people started on the page, those that have not ended first, then the newest.
-- Takes: id (null: any), max_rows
-- Gives: the fields of outbox.web.operations.Operation
-- Index: operation_pkey where an id is given
SELECT id, kind, selection, reason, asked_by, asked_as, asked_at, starts_at, state, expected, succeeded, failed,
       skipped, reached, problem, worker, started_at, finished_at, ended_by
  FROM outbox.operation
 WHERE CAST(%(id)s AS uuid) IS NULL OR id = CAST(%(id)s AS uuid)
 ORDER BY finished_at IS NOT NULL, asked_at DESC
 LIMIT %(max_rows)s
