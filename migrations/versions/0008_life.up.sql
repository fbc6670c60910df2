-- Owner part: the lives of messages at their consumers.

-- Like outbox.message_life: the known events in the life of each message on this side.
CREATE VIEW inbox.message_life AS
SELECT r.message_id, r.received_at AS at, 'handled' AS step, 'inbox.receipt' AS source, r.message_at AS partition_at, r.consumer,
       0 AS attempts, CAST(NULL AS timestamptz) AS due_at, CAST(NULL AS text) AS by, CAST(NULL AS text) AS reason
  FROM inbox.receipt AS r
 UNION ALL
SELECT s.message_id, s.started_at, 'started', 'inbox.suspect', s.message_at, s.consumer, s.starts, NULL, NULL,
       CASE WHEN s.is_open THEN 'this start has not ended' ELSE s.error_reason END
  FROM inbox.suspect AS s
 UNION ALL
SELECT j.message_id, t.at, t.step, 'inbox.job', j.message_at, j.consumer, t.attempts, t.due_at, t.by, t.reason
  FROM inbox.job AS j
 CROSS JOIN LATERAL (
      -- A job that was cancelled before its message arrived has no topic.
      VALUES (CASE WHEN j.topic IS NOT NULL THEN j.queued_at END, 'job_queued', 0, NULL, NULL, NULL),
             (j.started_at, 'job_started', j.attempts, CASE WHEN j.finished_at IS NULL THEN j.lease_until END, j.worker, NULL),
             (j.cancel_requested_at, 'job_cancel_requested', 0, NULL, NULL, j.reason),
             (j.finished_at, 'job_' || j.state, j.attempts, NULL, j.worker, j.reason)
  ) AS t (at, step, attempts, due_at, by, reason)
 WHERE t.at IS NOT NULL
 UNION ALL
SELECT CASE WHEN d.message_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN d.message_id::uuid END,
       t.at, t.step, 'inbox.dead_letter', d.created_at, substring(d.origin FROM '^consumer:(.*)$'),
       t.attempts, t.due_at, t.by, t.reason
  FROM inbox.dead_letter AS d
 CROSS JOIN LATERAL (
      VALUES (d.created_at, 'dead_letter', d.attempts, CASE WHEN d.status = 'PENDING' THEN d.retry_after END, d.origin, d.error_reason),
             (CASE WHEN d.status <> 'PENDING' OR d.retry_count > 0 THEN d.updated_at END,
              CASE d.status WHEN 'PENDING' THEN 'retry_failed' WHEN 'SUCCEEDED' THEN 'retry_succeeded' ELSE 'discarded' END,
              d.retry_count, NULL, d.discarded_by, CASE WHEN d.status = 'DISCARDED' THEN d.discard_reason END)
  ) AS t (at, step, attempts, due_at, by, reason)
 WHERE t.at IS NOT NULL;
COMMENT ON VIEW inbox.message_life IS
    'what happened to each message at its consumers, one row for each step; ask for one message_id';
COMMENT ON COLUMN inbox.message_life.at IS 'when it was recorded; handled: when the handler''s transaction began';
COMMENT ON COLUMN inbox.message_life.step IS
    'started, handled; job_queued and so on; dead_letter, retry_failed, retry_succeeded, discarded';
COMMENT ON COLUMN inbox.message_life.source IS 'the table that records it';
COMMENT ON COLUMN inbox.message_life.partition_at IS 'the moment by which that table is partitioned';
COMMENT ON COLUMN inbox.message_life.due_at IS 'when it is retried next, or until when a worker has leased the job';
COMMENT ON COLUMN inbox.message_life.by IS 'the worker of a job, what dead-lettered the message, or who discarded the dead letter';
