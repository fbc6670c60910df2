-- Owner part: the leased receipts of handlers that run too long for one transaction, and the suspects.

CREATE TABLE inbox.job (
    message_id          uuid        NOT NULL,
    message_at          timestamptz NOT NULL,
    consumer            text        NOT NULL,
    state               text        NOT NULL DEFAULT 'queued',
    lease               integer     NOT NULL DEFAULT 0,
    attempts            integer     NOT NULL DEFAULT 0,
    lease_until         timestamptz,
    queued_at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at          timestamptz,
    cancel_requested_at timestamptz,
    finished_at         timestamptz,
    topic               text,
    key                 text,
    tenant              text,
    worker              text,
    reason              text,
    checkpoint          jsonb,
    CONSTRAINT job_pkey PRIMARY KEY (message_id, consumer, message_at),
    CONSTRAINT message_at_from_id CHECK (message_at = inbox.moment_of(message_id)),
    CONSTRAINT message_id_is_uuid7 CHECK (get_byte(uuid_send(message_id), 6) >> 4 = 7),
    CONSTRAINT state_known CHECK (state IN ('queued', 'in_progress', 'waiting', 'success', 'failure', 'cancelled', 'timed_out', 'skipped')),
    CONSTRAINT texts_size CHECK (greatest(octet_length(topic), octet_length(key), octet_length(tenant)) <= 65536
                                 AND greatest(octet_length(worker), octet_length(reason)) <= 16384),
    CONSTRAINT finished_in_the_end CHECK ((finished_at IS NULL) = (state IN ('queued', 'in_progress', 'waiting')))
) PARTITION BY RANGE (message_at);
COMMENT ON TABLE inbox.job IS 'leased receipts: one row per message of a long handler';
COMMENT ON COLUMN inbox.job.state IS 'queued, in_progress, waiting (to be cancelled); then success, failure, cancelled, timed_out or skipped';
COMMENT ON COLUMN inbox.job.lease IS 'number of the current lease: a worker with another number has lost its lease';
COMMENT ON COLUMN inbox.job.attempts IS 'how often it was started, not counting starts that were released';
COMMENT ON COLUMN inbox.job.lease_until IS 'by the server''s clock; null: not leased';
COMMENT ON COLUMN inbox.job.worker IS 'host and process of the current or last lease';
COMMENT ON COLUMN inbox.job.checkpoint IS 'what the handler saved, for the next start';

-- Few jobs are open, and heartbeats change no indexed column.
CREATE INDEX job_open_idx ON inbox.job (consumer, queued_at) WHERE finished_at IS NULL;
-- Which topics of a consumer have long handlers: inbox.job_status steps from one to the next.
CREATE INDEX job_topic_idx ON inbox.job (consumer, topic) WHERE topic IS NOT NULL;

CREATE TABLE inbox.suspect (
    message_id  uuid        NOT NULL,
    message_at  timestamptz NOT NULL,
    consumer    text        NOT NULL,
    starts      integer     NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    is_open     boolean     NOT NULL DEFAULT true,
    error_reason     text,
    error_stacktrace text,
    CONSTRAINT suspect_pkey PRIMARY KEY (message_id, consumer, message_at),
    CONSTRAINT message_at_from_id CHECK (message_at = inbox.moment_of(message_id)),
    CONSTRAINT message_id_is_uuid7 CHECK (get_byte(uuid_send(message_id), 6) >> 4 = 7),
    CONSTRAINT started_once_at_least CHECK (starts > 0),
    CONSTRAINT reasons_size CHECK (octet_length(error_reason) <= 16384 AND octet_length(error_stacktrace) <= 131072)
) PARTITION BY RANGE (message_at);
COMMENT ON TABLE inbox.suspect IS
    'messages that may have been started before and have no outcome: one of them may kill the process that handles it';
COMMENT ON COLUMN inbox.suspect.starts IS 'how often its handler was started; counted before each call, deleted with the outcome';
COMMENT ON COLUMN inbox.suspect.started_at IS 'when it was last started';
COMMENT ON COLUMN inbox.suspect.is_open IS 'its last start may not have ended: it is handled alone next time';
COMMENT ON COLUMN inbox.suspect.error_reason IS 'what its handler raised last, for the dead letter; null: nothing is known';

-- A job is recorded when a worker has room for it. Until then only the postgres broker has it, as a
-- delivery to a consumer that has had jobs of that topic.
CREATE VIEW inbox.job_status AS
WITH RECURSIVE long_handler (consumer, topic) AS (
    (SELECT j.consumer, j.topic FROM inbox.job AS j WHERE j.topic IS NOT NULL ORDER BY j.consumer, j.topic LIMIT 1)
     UNION ALL
    SELECT next.consumer, next.topic
      FROM long_handler AS h
     CROSS JOIN LATERAL (
          SELECT j.consumer, j.topic
            FROM inbox.job AS j
           WHERE j.topic IS NOT NULL AND (j.consumer, j.topic) > (h.consumer, h.topic)
           ORDER BY j.consumer, j.topic
           LIMIT 1
     ) AS next
)
SELECT j.message_id, j.consumer, j.state, true AS is_known, j.attempts, j.topic, j.key, j.tenant, j.worker, j.reason,
       j.queued_at, j.started_at, j.cancel_requested_at, j.finished_at, j.lease_until
  FROM inbox.job AS j
 UNION ALL
SELECT d.message_id, d.consumer, 'queued', false, d.attempts, d.topic, d.key, d.tenant, NULL, NULL,
       d.created_at, NULL, NULL, NULL, NULL
  FROM inbox.unsettled_delivery AS d
 WHERE (d.consumer, d.topic) IN (SELECT h.consumer, h.topic FROM long_handler AS h)
   AND (SELECT true
          FROM inbox.job AS j
         WHERE j.message_id = d.message_id AND j.consumer = d.consumer AND j.message_at = inbox.moment_of(d.message_id)
         LIMIT 1) IS NULL;
COMMENT ON VIEW inbox.job_status IS
    'the jobs of long handlers, with those that no worker has had room for: deliveries of the postgres broker to a consumer that has had jobs of that topic';
COMMENT ON COLUMN inbox.job_status.is_known IS 'whether it is in inbox.job: a worker had room for it';

-- Like outbox.message_life: the known events in the life of each message on this side.
CREATE VIEW inbox.message_life AS
SELECT d.message_id, d.created_at AS delivery_at, d.created_at AS at, 'delivered' AS step,
       'inbox.message' AS source, d.created_at AS partition_at,
       d.consumer, 0 AS attempts, CAST(NULL AS timestamptz) AS due_at, CAST(NULL AS text) AS by, CAST(NULL AS text) AS reason
  FROM inbox.covered_delivery AS d
 UNION ALL
SELECT d.message_id, d.created_at, d.covered_at, 'acked', 'inbox.position', d.created_at, d.consumer, 0, NULL, NULL, NULL
  FROM inbox.covered_delivery AS d
 WHERE d.covered_at IS NOT NULL
   -- Otherwise the log has what became of it.
   AND (SELECT true FROM inbox.deferral AS e
         WHERE e.seq = d.seq AND e.created_at = d.created_at AND (e.consumer = d.consumer) IS TRUE LIMIT 1) IS NULL
 UNION ALL
SELECT d.message_id, d.created_at, e.entered_at, e.cause, 'inbox.deferral', e.created_at, e.consumer, e.attempts, e.due_at, NULL, NULL
  FROM inbox.message AS d
 CROSS JOIN LATERAL (SELECT * FROM inbox.deferral AS q WHERE q.seq = d.seq AND q.created_at = d.created_at OFFSET 0) AS e
 UNION ALL
SELECT r.message_id, NULL, r.received_at, 'handled', 'inbox.receipt', r.message_at, r.consumer, 0, NULL, NULL, NULL
  FROM inbox.receipt AS r
 UNION ALL
SELECT s.message_id, NULL, s.started_at, 'started', 'inbox.suspect', s.message_at, s.consumer, s.starts, NULL, NULL,
       CASE WHEN s.is_open THEN 'this start has not ended' ELSE s.error_reason END
  FROM inbox.suspect AS s
 UNION ALL
SELECT j.message_id, NULL, t.at, t.step, 'inbox.job', j.message_at, j.consumer, t.attempts, t.due_at, t.by, t.reason
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
       NULL, t.at, t.step, 'inbox.dead_letter', d.created_at, substring(d.origin FROM '^consumer:(.*)$'),
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
COMMENT ON COLUMN inbox.message_life.delivery_at IS 'when the delivery was created that this is about; null: about none';
COMMENT ON COLUMN inbox.message_life.at IS 'when it was recorded; handled: when the handler''s transaction began';
COMMENT ON COLUMN inbox.message_life.step IS
    'delivered, refused, blocked, open, found, acked: of the postgres broker; started, handled; job_queued and so on; dead_letter, retry_failed, retry_succeeded, discarded';
COMMENT ON COLUMN inbox.message_life.source IS 'the table that records it';
COMMENT ON COLUMN inbox.message_life.partition_at IS 'the moment by which that table is partitioned';
COMMENT ON COLUMN inbox.message_life.due_at IS 'when it is delivered or retried next, or until when a worker has leased the job';
COMMENT ON COLUMN inbox.message_life.by IS 'the worker of a job, what gave the message up, or who discarded the dead letter';
