-- Does:  List the operations that people started, the newest first.
-- Takes: max_rows, lock_class, lock
-- Gives: id, kind, selection, reason, asked_by, asked_as, asked_at, state, expected, succeeded, failed, skipped, problem, finished_at, stopped_by, is_lost (no process runs it; the locks are newer than the rows)
-- Index: operation_asked_idx
SELECT o.id, o.kind, o.selection, o.reason, o.asked_by, o.asked_as, o.asked_at,
       CASE WHEN o.is_lost THEN 'failed' ELSE o.state END AS state, o.expected, o.succeeded, o.failed, o.skipped,
       CASE WHEN o.is_lost THEN 'the process that ran it has ended' ELSE o.problem END AS problem,
       o.finished_at, o.stopped_by, o.is_lost
  FROM (SELECT p.*,
               -- Only the newest can be running, in the process that holds the lock.
               p.finished_at IS NULL AND p.kind <> 'pause' AND NOT (
                   p.asked_at = (SELECT max(n.asked_at) FROM outbox.operation AS n
                                  WHERE n.kind IN ('retry', 'discard'))
                   AND EXISTS (
                       SELECT FROM pg_catalog.pg_locks AS l
                        WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
                          AND l.database = (SELECT oid FROM pg_catalog.pg_database
                                             WHERE datname = pg_catalog.current_database())
                          AND l.classid = (%(lock_class)s::bigint & 4294967295)::oid
                          AND l.objid = %(lock)s::int::oid)) AS is_lost
          FROM outbox.operation AS p) AS o
 ORDER BY o.asked_at DESC
 LIMIT %(max_rows)s
